"""Figure 9: how the n-gram cache grows with the tokens decoded."""

import numpy as np

from omnidraft.experiments import markdown, statistics
from omnidraft.experiments.answers import OfAnswers
from omnidraft.experiments.experiment import Claim
from omnidraft.ngrams import Trie

HALVES = 200  # ways to part the answers in two


def sub_linear(results):
    found = {
        f"{task} ({target})": interval(measured["exponents"])
        for (target, task), (measured, *_) in results.groups("target", "task")
    }
    if not found:
        return None
    highest = max(found.values(), key=lambda exponent: exponent.high)
    said = ", ".join(f"{name} {exponent.text()}" for name, exponent in found.items())
    return statistics.above(statistics.exactly(1), highest), f"n-grams grow as tokens to the power of: {said}"


def interval(exponents):
    return statistics.Interval(np.mean(exponents), *np.quantile(exponents, [0.025, 0.975]))


class CacheGrowth(OfAnswers):
    title = "Figure 9: growth of the n-gram cache"
    paper = "Sub-linear in the tokens decoded."
    differs = "streams of 10,000 tokens are the steep beginning of the paper's curves."
    claims = (Claim("The cache grows sub-linearly.", sub_linear),)

    def run(self, lab, cell):
        answers = self.answers(lab, cell)
        lexicon = lab.pair(cell["target"], cell["drafter"]).lexicon
        tokens, ngrams = growth(lexicon, answers)
        exponents = []
        for seed in range(HALVES):
            order = np.random.default_rng(seed).permutation(len(answers))
            halves = [growth(lexicon, [answers[i] for i in half])[1][-1] for half in np.array_split(order, 2)]
            exponents.append(float(np.log2(max(ngrams[-1], 1) / max(np.mean(halves), 1))))
        return dict(tokens=tokens, ngrams=ngrams, exponents=exponents)

    def report(self, results):
        rows = (
            (
                target, drafter, task, len(found["tokens"]), f"{found['tokens'][-1]:,}", found["ngrams"][-1],
                interval(found["exponents"]).text(),
            )
            for (target, drafter, task), (found, *_) in results.groups("target", "drafter", "task")
        )  # fmt: skip
        head = ("target", "drafter", "task", "answers", "tokens", "n-grams at the end", "exponent")
        return (
            f"{markdown.table(head, rows)}\n\nThe exponent says what twice as many answers bring: 2 to its "
            f"power times as many n-grams. Its interval is over {HALVES} ways to part the answers in two; "
            "1 would be linear."
        )

    def draw(self, results, axes):
        for (target, task), (found, *_) in results.groups("target", "task"):
            axes.plot(found["tokens"], found["ngrams"], label=f"{task}, {target}")
        axes.set(xlabel="tokens decoded", ylabel="n-grams in the cache")
        return True


def growth(lexicon, answers):
    """Tokens decoded and n-grams known after each answer."""
    trie = Trie(lexicon, splits=False)  # the paper's cache
    sizes = []
    for answer in answers:
        trie.insert(answer)
        sizes.append(len(trie))
    return np.cumsum([len(answer) for answer in answers]).tolist(), sizes
