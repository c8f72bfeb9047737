"""Figure 6: the target changes, and changes back."""

from omnidraft.experiments.curves import Curve
from omnidraft.experiments.experiment import Stream
from omnidraft.experiments.learning import CACHE, DIRECT, SHORTER, setting

ROWS = {"without n-grams": ("direct", DIRECT), "with n-grams": ("hybrid", CACHE)}


class Figure6(Curve):
    title = "Figure 6: the target changes"
    paper = "switching from Qwen2.5-14B to 7B and back costs little, less with the cache."
    differs = SHORTER
    parts = 3  # the second is the other target's

    def cells(self, scale):
        for row, (loss, method) in ROWS.items():
            cell = setting(scale, scale.math, method, loss, target=scale.scaling[-1], other=scale.scaling[0])
            yield cell | dict(row=row, watch=1, test=0)

    def streams(self, cell):
        for target in dict.fromkeys((cell["target"], cell["other"])):
            yield Stream(target, cell["drafter"], cell["task"], "train", cell["train"], cell["tokens"])

    def legs(self, lab, cell):
        """A third of the stream each; both targets have one vocabulary, so one drafter serves both."""
        third = cell["train"] // 3
        answers = {stream.target: lab.stream(stream) for stream in self.streams(cell)}
        turns = (cell["target"], cell["other"], cell["target"])
        return [
            (lab.pair(target, cell["drafter"]), answers[target][i * third : (i + 1) * third])
            for i, target in enumerate(turns)
        ]
