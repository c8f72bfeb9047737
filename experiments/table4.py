"""Table 4: the size of the n-gram cache at the end of a stream."""

import tempfile
from pathlib import Path

from omnidraft.experiments import markdown
from omnidraft.experiments.answers import OfAnswers
from omnidraft.ngrams import Trie

PAPER = dict(gsm8k="5,569, 1.37 MB", mbpp="2,238, 0.50 MB", alpaca="20,339, 4.57 MB", xsum="17,013, 3.92 MB")


class Table4(OfAnswers):
    title = "Table 4: size of the n-gram cache"
    paper = "after streams of 1,000 to 8,000 answers, 2,238 n-grams (code) to 20,339 (Alpaca)."
    differs = "our streams are a hundredth of the paper's; the growth is figure 9."

    def run(self, lab, cell):
        answers = self.answers(lab, cell)
        trie = Trie(lab.pair(cell["target"], cell["drafter"]).lexicon, splits=False)  # the paper's cache
        empty = trie.nbytes
        for answer in answers:
            trie.insert(answer)
        with tempfile.TemporaryDirectory() as folder:
            trie.save(Path(folder) / "ngrams", drafter=cell["drafter"], target=cell["target"])
            on_disk = (Path(folder) / "ngrams").stat().st_size
        return dict(
            answers=len(answers), tokens=sum(map(len, answers)), ngrams=len(trie), on_disk=on_disk,
            grown=trie.nbytes - empty, tables=trie.lexicon.nbytes + empty,
        )  # fmt: skip

    def report(self, results):
        rows = (
            (
                target, drafter, task, found["answers"], f"{found['tokens']:,}", f"{found['ngrams']:,}",
                f"{found['on_disk'] / 1000:.1f} kB", f"{found['grown'] / 1000:.1f} kB",
                f"{found['tables'] / 1e6:.1f} MB", PAPER.get(task.split("+")[0], ""),
            )
            for (target, drafter, task), (found, *_) in results.groups("target", "drafter", "task")
        )  # fmt: skip
        head = ("target", "drafter", "task", "answers", "tokens", "n-grams", "on disk", "memory they take",
                "tables of the pair", "the paper's")  # fmt: skip
        return (
            f"{markdown.table(head, rows)}\n\nCounts of one stream: they have no interval. Ours are smaller because "
            "the streams are; how they grow is figure 9. Spellings of all tokens are tables of the pair, the same for "
            "any number of n-grams; the paper's megabytes are for a cache that stores each spelling."
        )
