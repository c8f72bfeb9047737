"""Figure 5: the domain changes from mathematics to code in the middle of the stream."""

from omnidraft.experiments import statistics
from omnidraft.experiments.curves import Curve, parted
from omnidraft.experiments.experiment import Claim
from omnidraft.experiments.learning import CACHE, DIRECT, SHORTER, setting

ROWS = {"without n-grams": ("direct", DIRECT), "with n-grams": ("hybrid", CACHE)}


def recovers(results):
    sides = [parted(runs, 4)[-1] for row in ROWS for _, runs in results.groups("target", row=row)]
    if len(sides) < len(ROWS):
        return None
    found = statistics.ratio(sides[1], sides[0])
    verdict = statistics.above(found, statistics.exactly(1))
    return verdict, f"with n-grams {found.text()} times the tokens a step, in the last quarter of the stream"


class Figure5(Curve):
    title = "Figure 5: the domain changes"
    paper = "acceptance drops at the change from GSM8K to code, then recovers, better with the cache."
    differs = SHORTER
    claims = (Claim("Recovery after a change of domain is better with n-grams.", recovers),)
    parts = 4  # the change is after the second

    def cells(self, scale):
        tasks = dict.fromkeys((scale.math, scale.code))
        size = dict(task=",".join(tasks), train=min(scale.train[task] for task in tasks), test=0, watch=1)
        for row, (loss, method) in ROWS.items():
            yield setting(scale, scale.math, method, loss) | dict(row=row) | size
