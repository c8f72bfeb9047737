"""Figure 7: how often the target's answers hold n-grams of the drafter's, and which."""

from collections import Counter

from omnidraft.experiments import markdown, statistics
from omnidraft.experiments.answers import OfAnswers
from omnidraft.experiments.claims import agreed
from omnidraft.experiments.experiment import Claim
from omnidraft.ngrams import Trie


def more_in_code(results):
    said, verdicts = [], []
    for models, own in results.parts("target"):
        rates = {
            task: statistics.share(found["ngrams"], found["tokens"])
            for (task,), (found, *_) in own.groups("task")
        }
        code = next((rates.pop(task) for task in [*rates] if "mbpp" in task), None)
        if code is not None and rates:
            verdicts.append(statistics.above(code, *rates.values()))
            others = ", ".join(f"{task} {rate.text('.1%')}" for task, rate in rates.items())
            said.append(f"{models['target']}: n-grams are {code.text('.1%')} of the tokens of code; {others}")
    return (agreed(verdicts), "; ".join(said)) if said else None


class NGramFrequency(OfAnswers):
    title = "Figure 7: frequency of n-grams"
    paper = "A long tail; n-grams are more frequent in code than elsewhere."
    differs = (
        "ours are shares of the tokens of a short stream, and a larger vocabulary is shared (39,234 tokens "
        "of smollm2-135m's), so fewer words are n-grams."
    )
    claims = (Claim("N-grams are more frequent in code.", more_in_code),)

    def run(self, lab, cell):
        answers = self.answers(lab, cell)
        trie = Trie(lab.pair(cell["target"], cell["drafter"]).lexicon, splits=False)  # as the paper has them
        trie.fill()
        found = [[token for token in answer if len(trie.spelling(token)) > 1] for answer in answers]
        counts = Counter(token for own in found for token in own)
        return dict(
            tokens=[len(answer) for answer in answers],
            ngrams=[len(own) for own in found],
            counts=sorted(counts.values(), reverse=True),
        )

    def report(self, results):
        def row(target, drafter, task, found):
            counts = found["counts"]
            ten, once = sum(counts[:10]) / max(sum(counts), 1), counts.count(1) / max(len(counts), 1)
            return (
                target, drafter, task, len(found["tokens"]), f"{sum(found['tokens']):,}",
                statistics.share(found["ngrams"], found["tokens"]).text(".1%"),
                len(counts), f"{ten:.0%}", f"{once:.0%}",
            )  # fmt: skip

        head = ("target", "drafter", "task", "answers", "tokens", "n-grams among them",
                "distinct", "the ten commonest make up", "met once")  # fmt: skip
        groups = results.groups("target", "drafter", "task")
        return markdown.table(head, (row(*values, found) for values, (found, *_) in groups))

    def draw(self, results, axes):
        for (target, task), (found, *_) in results.groups("target", "task"):
            axes.plot(range(1, len(found["counts"]) + 1), found["counts"], label=f"{task}, {target}")
        axes.set(xscale="log", yscale="log", xlabel="n-gram, by rank", ylabel="times met")
        return True
