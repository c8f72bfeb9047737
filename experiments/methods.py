"""Every proposal and rule side by side: the paper's cache, prefilled n-grams, re-tokenised text, by k.

`perfect` drafts the recorded answer, so what it loses is translation's alone; `ideal` proposes all target tokens that
its bytes cover; `kept` leaves accepted draft tokens in the drafter's context as they were drafted.
"""

from omnidraft.experiments import markdown, statistics
from omnidraft.experiments.claims import more_tokens, pooled
from omnidraft.experiments.experiment import Experiment
from omnidraft.experiments.replay import IDEAL, Replay

PROPOSALS = [
    "direct:compare:nosplits", "direct:compare:splits", "ngram:compare:nosplits", "ngram:compare:splits",
    "prefill:compare:nosplits", "prefill:compare:splits", "text:compare",
]  # fmt: skip
RULES = [
    *(
        f"{name}:trie:{splits}"
        for name in ("direct", "ngram", "prefill")
        for splits in ("nosplits", "splits")
    ),
    *(f"{name}:paper" for name in ("direct", "ngram", "prefill")),
]
KEPT = ["text:compare", "prefill:compare:splits"]
PAIRS = [  # whose ratios are shown
    ("ngram:compare:nosplits", "direct:compare:nosplits"), ("ngram:compare:splits", "direct:compare:splits"),
    ("prefill:compare:splits", "ngram:compare:splits"), ("prefill:trie:splits", "ngram:trie:splits"),
    ("text:compare", "prefill:compare:splits"), ("text:compare", "ngram:compare:nosplits"),
    ("prefill:trie:splits", "prefill:paper"), ("kept text:compare", "text:compare"),
    ("perfect prefill:compare:splits", "perfect ideal"), ("perfect text:compare", "perfect ideal"),
]  # fmt: skip


class Methods(Experiment):
    title = "Proposals and rules"
    claims = tuple(
        more_tokens(f"N-grams help at k = {k}, without learning.",
                    dict(method="ngram:compare:nosplits", temperature=0.0, k=k, who=""),
                    dict(method="direct:compare:nosplits", temperature=0.0, k=k, who=""))
        for k in (4, 8)
    ) + tuple(
        more_tokens(f"(ours) {text} beats the paper's cache, k = {k}.",
                    dict(method=method, temperature=0.0, k=k, who=""),
                    dict(method="ngram:compare:nosplits", temperature=0.0, k=k, who=""))
        for k in (4, 8)
        for text, method in (("Re-tokenised text", "text:compare"), ("The prefilled trie", "prefill:compare:splits"))
    )  # fmt: skip

    def cells(self, scale):
        for task in scale.tasks[:3]:
            for temperature in (0.0, 1.0):
                for k in (2 * scale.k, scale.k):
                    rules = RULES if not temperature and k == scale.k else []
                    kept = KEPT if k == scale.k else []
                    lines = [("", method) for method in PROPOSALS + rules]
                    lines += [("perfect", method) for method in [*PROPOSALS, IDEAL]] + [
                        ("kept", m) for m in kept
                    ]
                    for who, method in lines:
                        yield dict(
                            target=scale.targets[0], drafter=scale.drafter, task=task, test=scale.prompts,
                            tokens=scale.tokens, temperature=temperature, k=k, method=method, who=who,
                        )  # fmt: skip

    def run(self, lab, cell):
        [stream] = self.streams(cell)
        pair = lab.pair(cell["target"], cell["drafter"])
        replay = Replay(pair.lexicon, cell["method"], cell["k"], who=cell["who"])
        return pair.measure(lab.stream(stream), {"": replay})[""]

    def seconds(self, cell, times):
        """A drafter's pass is made once for all methods, and all of those of k for twice k."""
        first = cell["method"] == PROPOSALS[0] and not cell["who"]
        drafted = cell["test"] * cell["tokens"] * 4 * first
        return drafted * times.draft / 1000 + 1

    def report(self, results):
        parts = []
        for size, _ in results.groups("temperature", "k", "tokens"):
            own = dict(zip(("temperature", "k", "tokens"), size, strict=True))
            tasks = [task for (task,), _ in results.groups("task", **own)]
            rows = []
            for (who, method), _ in results.groups("who", "method", **own):
                row = [f"{who} {method}".strip()]
                for task in tasks:
                    runs = results.find(task=task, who=who, method=method, **own)
                    row += [
                        told(statistics.acceptance, runs, ".3f"),
                        told(statistics.tokens_per_step, runs, ".2f"),
                    ]
                rows.append(row)
            head = [
                "method",
                *(f"{task}: {what}" for task in tasks for what in ("acceptance", "tokens a step")),
            ]
            prompts = max(statistics.prompts(runs) for _, runs in results.groups("task", **own))
            parts += [
                f"### Temperature {own['temperature']:g}, k = {own['k']}, {own['tokens']} tokens, "
                f"{prompts} prompts a task",
                markdown.table(head, rows),
                markdown.table(
                    ("method", "against", "tokens a step, as a multiple, all tasks"),
                    self.ratios(results, own),
                ),
            ]
        return "\n\n".join(parts)

    def ratios(self, results, own):
        for one, other in PAIRS:
            both = pooled(results, self.named(one) | own, self.named(other) | own, ("task",))
            if both:
                yield one, other, statistics.ratio(*both).text(".3f")

    def named(self, name):
        who, _, method = name.rpartition(" ")
        return dict(who=who, method=method)


def told(measure, runs, form):
    return measure(runs).text(form) if runs else None
