"""Table 11: adaptive drafting with LoRA, a drafter and a target of one vocabulary."""

from typing import ClassVar

from omnidraft.experiments import adaptive
from omnidraft.experiments.learning import QUARTER


class Table11(adaptive.Adaptive):
    title = "Table 11: adaptive drafting with LoRA"
    paper = "as table 2, a little less; interleaved training is the faster one on average (Vicuna-7B)."
    differs = QUARTER
    told: ClassVar = {
        "distill only": ("0.37 1.95x", "0.24 1.52x", "0.25 1.54x", "0.23 1.49x"),
        "joint": ("0.49 1.87x", "0.39 1.59x", "0.39 1.58x", "0.41 1.54x"),
        "interleaved": ("0.49 1.94x", "0.38 1.61x", "0.42 1.58x", "0.39 1.55x"),
    }

    def pair(self, scale):
        return scale.same_vocabulary

    def weights(self, scale):
        return scale.lora
