"""Figure 2: acceptance while learning."""

from omnidraft.experiments.curves import Curve
from omnidraft.experiments.learning import CACHE, DIRECT, SHORTER, setting

ROWS = {"SpDDM": (None, DIRECT), "L_DM": ("direct", DIRECT), "L_DM + λ L_ngram": ("hybrid", CACHE)}


class Figure2(Curve):
    title = "Figure 2: acceptance while learning"
    paper = "acceptance and speedup rise along the stream, most with the hybrid loss."
    differs = SHORTER

    def cells(self, scale):
        for task in dict.fromkeys((scale.math, scale.code)):
            for row, (loss, method) in ROWS.items():
                yield setting(scale, task, method, loss) | dict(row=row, watch=1, test=0, batch=scale.batch)
