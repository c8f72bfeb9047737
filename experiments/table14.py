"""Table 14: eviction policies of a bounded n-gram cache, over the code stream."""

import numpy as np

from omnidraft.experiments import markdown, statistics
from omnidraft.experiments.claims import agreed
from omnidraft.experiments.experiment import Claim, Experiment
from omnidraft.experiments.replay import Replay
from omnidraft.learn.record import Recorded
from omnidraft.session import Session
from omnidraft.tasks import load_rows
from omnidraft.types import as_tokens

SHARES = ((1.0, None), (0.5, "lru"), (0.5, "lfu"), (0.25, "lru"), (0.25, "lfu"))
PAPER = dict(
    zip(SHARES, ("0.267 1.36x", "0.261 1.35x", "0.263 1.36x", "0.254 1.33x", "0.259 1.36x"), strict=True)
)
METHOD = "ngram:compare:splits"


def lfu_wins(results):
    said, verdicts = [], []
    for (who, source), _ in results.groups("who", "source"):
        quarter = dict(who=who, source=source, share=0.25)
        lfu, lru = (results.find(**quarter, policy=policy) for policy in ("lfu", "lru"))
        if lfu and lru:
            found = statistics.mean(np.subtract(lfu[0]["ngram_hits"], lru[0]["ngram_hits"]))
            verdicts.append(statistics.above(found, statistics.exactly(0)))
            said.append(f"{source}, {who or 'real'} drafter: {found.text('.3f')} more hits an answer")
    if not said:
        return None
    return agreed(verdicts), "; ".join(said)


class Table14(Experiment):
    title = "Table 14: eviction"
    paper = "no cache 0.219 1.29x; at a quarter of the size LFU 0.259, LRU 0.254; the whole 0.267 (code)."
    differs = (
        "hits are counted with a drafter that writes the answer itself, where nothing but the cache can fail; "
        "so acceptance is far above the paper's, and the order of the policies is what can be compared."
    )
    claims = (Claim("LFU beats LRU at a quarter of the size.", lfu_wins),)

    def cells(self, scale):
        task = scale.code
        base = dict(target=scale.targets[0], drafter=scale.drafter, tokens=scale.tokens, k=scale.k)
        for who, source, answers in (
            ("perfect", "answers", scale.train[task]),
            ("perfect", "solutions", 6 * scale.train[task]),
            ("", "answers", scale.train[task]),
        ):
            for share, policy in SHARES:
                size = dict(train=answers) if source == "answers" else dict(texts=answers)
                yield base | dict(task=task, source=source, who=who, share=share, policy=policy) | size

    def streams(self, cell):
        return super().streams(cell) if cell["source"] == "answers" else iter(())

    def run(self, lab, cell):
        pair = lab.pair(cell["target"], cell["drafter"])
        vocab = pair.lexicon.alignment.target
        if cell["source"] == "answers":
            [stream] = self.streams(cell)
            answers = lab.stream(stream)
        else:  # the task's own solutions, as if the target had written them
            task = cell["task"].split("+")[0]
            rows = [
                row
                for split in ("test", "train")
                for row in load_rows(task, lab.data, cell["texts"], split=split)
            ]
            texts = [row["code"].replace("\r\n", "\n") for row in rows[: cell["texts"]]]
            answers = [Recorded([vocab.eos[0]], vocab.encode_bytes(text.encode()), None) for text in texts]
        known = Replay(pair.lexicon, METHOD, cell["k"])
        known.know(answers)
        capacity = None if cell["share"] == 1 else round(cell["share"] * len(known.trie))
        replay = Replay(
            pair.lexicon,
            METHOD,
            cell["k"],
            who=cell["who"],
            capacity=capacity,
            eviction=cell["policy"] or "lfu",
        )
        session = Silent() if cell["who"] else None
        found = pair.measure(answers, {"": replay}, session)[""]
        return found | dict(capacity=capacity or len(known.trie))

    def seconds(self, cell, times):
        first = not cell["who"] and cell["share"] == 1  # a drafter's pass is made once for all
        return 20 + first * cell.get("train", 0) * cell["tokens"] * 3 * times.draft / 1000

    def report(self, results):
        rows = []
        for values, runs in results.groups("target", "source", "who", "share", "policy"):
            target, source, who, share, policy = values
            [whole, *_] = results.find(target=target, source=source, who=who, share=1.0) or [runs[0]]
            kept = statistics.share(runs[0]["ngram_hits"], whole["ngram_hits"]) if whole else None
            rows.append(
                (
                    target, source, who or "real", share, policy, runs[0]["capacity"], statistics.prompts(runs),
                    kept.text(".1%"), statistics.acceptance(runs).text(".3f"),
                    statistics.tokens_per_step(runs).text(".3f"), PAPER[share, policy],
                )
            )  # fmt: skip
        head = ("target", "stream", "drafter", "share of the n-grams kept", "policy", "n-grams", "answers",
                "hits, of the whole cache's", "acceptance", "tokens a step", "the paper's")  # fmt: skip
        return (
            f"{markdown.table(head, rows)}\n\nThe cache is empty at first and grows along the stream. A perfect "
            "drafter writes the answer itself: every n-gram that is known is hit. `solutions` are "
            "the task's own programs."
        )


class Silent(Session):
    """A session for a perfect drafter, which asks no model."""

    def __init__(self):
        self.tokens = as_tokens()
        self.seconds = 0.0

    def session(self):
        return self
