"""Our push-forward loss against the paper's, by the proposal that serves each."""

from omnidraft.experiments import markdown
from omnidraft.experiments.claims import ALIKE, more_tokens
from omnidraft.experiments.experiment import Experiment
from omnidraft.experiments.learning import setting, tested

LOSSES = (None, "pushforward", "hybrid", "pushforward-reverse", "hybrid-kl", "direct")


class Losses(Experiment):
    title = "Push-forward against hybrid"
    claims = (
        more_tokens(
            "(ours) Push-forward KL beats the hybrid loss.", dict(loss="pushforward"), dict(loss="hybrid"),
            over=(*ALIKE, "rate", "rank"),
        ),
    )  # fmt: skip

    def cells(self, scale):
        for loss in LOSSES:
            for task in dict.fromkeys((scale.code, scale.math)):
                yield setting(scale, task, "text", loss, weights=scale.lora)

    def run(self, lab, cell):
        return tested(lab, cell)

    def report(self, results):
        return markdown.decoding(results, ("target", "task", "train", "loss", "rate", "rank"))
