"""Table 12: the rank of the LoRA adapter."""

from dataclasses import replace

from omnidraft.experiments import markdown, statistics
from omnidraft.experiments.claims import pooled
from omnidraft.experiments.experiment import Claim, Experiment
from omnidraft.experiments.learning import CACHE, SHORTER, setting, tested

PAPER = {8: "0.30", 16: "0.34", 32: "0.37", 64: "0.38", 128: "0.38"}
LITTLE = 1.03  # times the tokens a step


def little_beyond_32(results):
    sides = pooled(results, dict(rank=128), dict(rank=32), ("target", "task"))
    if sides is None:
        return None
    found = statistics.ratio(*sides)
    verdict = "confirmed" if found.high < LITTLE else "refuted" if found.low > LITTLE else "undecided"
    return verdict, f"rank 128 makes {found.text()} times rank 32's tokens a step (little: under {LITTLE})"


class Table12(Experiment):
    title = "Table 12: rank of the adapter"
    paper = "acceptance 0.30 at rank 8 to 0.38 at 64 and 128."
    differs = SHORTER
    claims = (Claim("Rank beyond 32 gains little.", little_beyond_32),)

    def cells(self, scale):
        for rank in PAPER:
            yield setting(scale, scale.math, CACHE, "hybrid", weights=replace(scale.lora, rank=rank))

    def run(self, lab, cell):
        return tested(lab, cell)

    def report(self, results):
        return markdown.decoding(
            results, ("target", "task", "rank"), lambda said: PAPER.get(said["rank"], "")
        )
