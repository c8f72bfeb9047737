"""How far the law of the next token is from the target's, under each rule.

At points of recorded answers a step is begun again and again with fresh noise, and its first token counted. The
distance (half the sum of differences) of what was counted from the target's own row is never zero, for counts are few;
so as many draws from the row itself stand beside it.
"""

import numpy as np

from omnidraft.bench import method_options
from omnidraft.drafting import Drafter
from omnidraft.experiments import markdown, statistics
from omnidraft.experiments.experiment import Claim, Experiment
from omnidraft.ngrams import Trie
from omnidraft.options import make_options
from omnidraft.sampling import Sampler, Sampling
from omnidraft.session import feed
from omnidraft.translate import SymbolTranslator
from omnidraft.verify import Paper, Walk

METHODS = ["prefill:trie:splits", "prefill:paper"]
TEMPERATURES = (0.5, 1.0)
POINTS = 2  # of an answer
DRAWS = 20  # a point, times the scale's prompts
K = 2


def exact(results):
    rows = [(values, runs[0]) for values, runs in results.groups("method", drawn_at=1.0)]
    found = {
        values[0]: statistics.mean(np.subtract(run["distance"], run["noise"])) for values, run in rows
    }  # fmt: skip
    if len(found) < len(METHODS):
        return None
    trie, paper = (found[method] for method in METHODS)
    said = f"distance beyond noise: trie {trie.text('.3f')}, paper {paper.text('.3f')}"
    verdict = "refuted" if trie.low > 0.01 else "confirmed" if paper.low > 0 else "undecided"
    return verdict, said


class Law(Experiment):
    title = "Distance from the target's law"
    claims = (
        Claim("(ours) The trie keeps the target's law at temperature 1, the paper's rule does not.", exact),
    )

    def cells(self, scale):
        for temperature in TEMPERATURES:
            for method in METHODS:
                yield dict(
                    target=scale.targets[0], drafter=scale.drafter, task=scale.code, test=scale.prompts,
                    tokens=scale.tokens, temperature=0.0, drawn_at=temperature, method=method, k=K,
                    draws=DRAWS * scale.prompts,
                )  # fmt: skip

    def run(self, lab, cell):
        [stream] = self.streams(cell)
        pair = lab.pair(cell["target"], cell["drafter"])
        strategy = make_options(**method_options(cell["method"])).strategy
        trie = Trie(pair.lexicon, splits=strategy.splits)
        trie.fill()
        walks = strategy.verification == "trie"
        rule, translator = (Walk if walks else Paper)(trie), SymbolTranslator(trie, walk=walks)
        session, memo = lab.model(cell["target"]).session(), lab.memo(cell["drafter"])
        size = lab.vocab(cell["target"]).size
        measured = dict(distance=[], noise=[])
        for i, one in enumerate(lab.stream(stream)):
            for point in np.random.default_rng(i).integers(0, len(one.answer), POINTS):
                context = [*one.prompt, *one.answer[:point]]
                row = feed(session, context, 1)[0].copy()
                counts, own = np.zeros(size), np.zeros(size)
                for seed in range(cell["draws"]):
                    sampler = Sampler(Sampling(temperature=cell["drawn_at"], seed=seed), context, size)
                    drafter = Drafter(memo, translator, lab.context_length(cell["drafter"]), sampler)
                    draft, proposal = drafter.propose(context, cell["k"])
                    # The first token depends on the first row alone.
                    verdict = rule([row] * (len(proposal.tokens) + 1), draft, proposal, sampler, ())
                    counts[verdict.tokens[0]] += 1
                p = sampler.law(row).astype(float)
                p /= p.sum()
                own += np.random.default_rng(i).multinomial(cell["draws"], p)
                for name, seen in (("distance", counts), ("noise", own)):
                    measured[name].append(float(np.abs(seen / cell["draws"] - p).sum() / 2))
        return measured

    def seconds(self, cell, times):
        points = cell["test"] * POINTS
        return points * (times.target + 20 * times.draft + cell["draws"] * 8) / 1000

    def report(self, results):
        rows = []
        for (method, temperature), (found, *_) in results.groups("method", "drawn_at"):
            beyond = statistics.mean(np.subtract(found["distance"], found["noise"]))
            told = [statistics.mean(found[name]).text(".3f") for name in ("distance", "noise")]
            rows.append((method, f"{temperature:g}", len(found["noise"]), *told, beyond.text(".3f")))
        head = (
            "method and rule",
            "temperature",
            "points",
            "distance",
            "distance of draws from the row itself",
            "beyond",
        )
        return f"{markdown.table(head, rows)}\n\nTotal variation, k = {K}; as many draws at each point."
