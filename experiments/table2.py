"""Table 2: adaptive drafting, a drafter and a target of one vocabulary."""

from typing import ClassVar

from omnidraft.experiments import adaptive
from omnidraft.experiments.learning import QUARTER


class Table2(adaptive.Adaptive):
    title = "Table 2: adaptive drafting"
    paper = "adapting and distilling add up; interleaved training is the faster one on average (Vicuna-7B)."
    differs = QUARTER
    told: ClassVar = {
        "SpD": ("0.21 1.44x", "0.14 1.22x", "0.20 1.44x", "0.20 1.42x"),
        "adapt only": ("0.38 1.50x", "0.28 1.34x", "0.38 1.52x", "0.38 1.51x"),
        "distill only": ("0.42 2.20x", "0.35 1.92x", "0.25 1.57x", "0.23 1.53x"),
        "joint": ("0.61 2.08x", "0.51 1.91x", "0.44 1.61x", "0.42 1.59x"),
        "interleaved": ("0.52 2.15x", "0.48 1.94x", "0.41 1.60x", "0.38 1.58x"),
    }

    def pair(self, scale):
        return scale.same_vocabulary

    def weights(self, scale):
        return scale.default
