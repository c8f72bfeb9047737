"""Table 5: what the n-gram cache brings, without learning, with direct distillation, and with the hybrid loss."""

from omnidraft.experiments import markdown
from omnidraft.experiments.claims import more_tokens
from omnidraft.experiments.experiment import Experiment
from omnidraft.experiments.learning import CACHE, DIRECT, SHORTER, setting, tested

ROWS = {
    "SpDDM": (None, DIRECT),
    "SpDDM + n-grams": (None, CACHE),
    "L_DM": ("direct", DIRECT),
    "L_DM + n-grams": ("direct", CACHE),
    "L_DM + λ L_ngram": ("hybrid", CACHE),
}
KS = (3, 4)
PAPER = {  # acceptance, speedup, hits a step
    3: ("0.16 1.04x 0", "0.20 1.16x 0.87", "0.40 1.59x 0", "0.42 1.61x 0.48", "0.46 1.66x 2.40"),
    4: ("0.12 1.01x 0", "0.16 1.11x 1.49", "0.32 1.51x 0", "0.35 1.54x 0.75", "0.41 1.61x 3.66"),
}


class Table5(Experiment):
    title = "Table 5: effect of the n-gram cache"
    paper = "n-grams help at every k, and more with the hybrid loss (Llama3-8B, GSM8K; acceptance, speedup, hits)."
    differs = SHORTER
    claims = tuple(
        more_tokens(
            f"N-grams help at k = {k}, {what}.", dict(row=f"{row} + n-grams", k=k), dict(row=row, k=k)
        )
        for k in KS
        for row, what in (("SpDDM", "without learning"), ("L_DM", "after direct distillation"))
    )

    def cells(self, scale):
        for row, (loss, method) in ROWS.items():
            for k in KS:
                yield setting(scale, scale.math, method, loss, k=k, row=row)

    def run(self, lab, cell):
        return tested(lab, cell)

    def report(self, results):
        def paper(said):
            return dict(zip(ROWS, PAPER.get(said["k"], ()), strict=False)).get(said["row"], "")

        return markdown.decoding(results, ("target", "task", "k", "row"), paper, hits=True)
