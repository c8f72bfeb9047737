"""Table 6: losses."""

from omnidraft.experiments import markdown
from omnidraft.experiments.claims import more_tokens
from omnidraft.experiments.experiment import Experiment
from omnidraft.experiments.learning import CACHE, SHORTER, setting, tested

PAPER = {  # loss -> its name in the paper, acceptance and speedup at T = 0.01; T = 1
    "ngram": "L_ngram NLL alone: 0.090 0.86x; 0.070 0.79x",
    "likelihood": "L_DM NLL + L_ngram NLL: 0.368 1.51x; 0.271 1.23x",
    "hybrid": "L_DM KL + L_ngram NLL: 0.375 1.57x; 0.273 1.27x",
    "hybrid-kl": "L_DM KL + L_ngram KL: 0.376 1.57x; 0.275 1.31x",
}


class Table6(Experiment):
    title = "Table 6: losses"
    paper = "the n-grams' likelihood alone is worth little; KL on both is as good as KL and likelihood."
    differs = SHORTER
    claims = (
        more_tokens(
            "KL on direct tokens beats the n-grams' likelihood alone.",
            dict(loss="hybrid"),
            dict(loss="ngram"),
        ),
        more_tokens(
            "KL on direct tokens beats their likelihood.", dict(loss="hybrid"), dict(loss="likelihood")
        ),
    )

    def cells(self, scale):
        for loss in PAPER:
            yield setting(scale, scale.math, CACHE, loss)

    def run(self, lab, cell):
        return tested(lab, cell)

    def report(self, results):
        rows = markdown.decoding(
            results, ("target", "task", "loss"), lambda said: PAPER.get(said["loss"], "")
        )
        return (
            f"{rows}\n\nAt temperature 0, where the paper's rule accepts what `compare` does; "
            "the paper has 0.01, and 1."
        )
