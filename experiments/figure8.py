"""Figure 8: how often n-grams are accepted while they are learned."""

from omnidraft.experiments import markdown, statistics
from omnidraft.experiments.curves import Curve, parted
from omnidraft.experiments.experiment import Claim
from omnidraft.experiments.learning import CACHE, SHORTER, setting


def rises(results):
    for _, runs in results.groups("target", "task", row="hybrid"):
        before, after = (statistics.per_step(own, "ngram_hits") for own in (parted(runs, 2) * 2)[:2])
        return statistics.above(
            after, before
        ), f"accepted n-grams a step {before.text()}, then {after.text()}"
    return None


class Figure8(Curve):
    title = "Figure 8: n-grams learned"
    paper = "the acceptance of n-grams rises while the hybrid loss is trained."
    differs = SHORTER
    claims = (Claim("N-grams are accepted more often as they are learned.", rises),)

    def cells(self, scale):
        for loss in ("hybrid", "direct"):
            yield setting(scale, scale.code, CACHE, loss) | dict(row=loss, watch=1, test=0)

    def report(self, results):
        rows = []
        for values, runs in results.groups("target", "task", "row"):
            for i, own in enumerate(parted(runs, 2)):
                rate, hits = statistics.ngram_acceptance(own), statistics.per_step(own, "ngram_hits")
                rows.append(
                    (*values, f"{i + 1} of 2", len(runs), len(own[0]["at"]), rate.text(), hits.text())
                )
        head = ("target", "task", "loss", "half of the stream", "seeds", "answers", "n-grams accepted",
                "accepted n-grams a step")  # fmt: skip
        return markdown.table(head, rows)
