"""Table 1: test sets after learning online, by what is learned and which weights are trained."""

from omnidraft.experiments import markdown
from omnidraft.experiments.claims import more_tokens
from omnidraft.experiments.experiment import Experiment
from omnidraft.experiments.learning import CACHE, DIRECT, SHORTER, setting, tested

ROWS = {  # -> loss, weights, method
    "SpDDM": (None, None, DIRECT),
    "L_DM": ("direct", "full", DIRECT),
    "L_DM + λ L_ngram": ("hybrid", "full", CACHE),
    "L_DM + λ L_ngram, LoRA": ("hybrid", "lora", CACHE),
    "push-forward, LoRA, text (ours)": ("pushforward", "lora", "text"),
}
PAPER = {  # Llama3-8B; Qwen2-7B
    "SpDDM": dict(gsm8k="0.10 0.94x; 0.14 1.04x", mbpp="0.09 1.03x; 0.09 0.91x", alpaca="0.09 0.96x; 0.13 1.01x",
                  xsum="0.11 0.91x; 0.12 0.96x"),
    "L_DM": dict(gsm8k="0.32 1.58x; 0.33 1.50x", mbpp="0.22 1.26x; 0.22 1.29x", alpaca="0.16 1.25x; 0.17 1.25x",
                 xsum="0.20 1.20x; 0.19 1.16x"),
    "L_DM + λ L_ngram": dict(gsm8k="0.42 1.70x; 0.37 1.61x", mbpp="0.27 1.33x; 0.26 1.36x",
                             alpaca="0.20 1.30x; 0.20 1.30x", xsum="0.24 1.24x; 0.22 1.22x"),
    "L_DM + λ L_ngram, LoRA": dict(gsm8k="0.37 1.59x; 0.31 1.41x", mbpp="0.19 1.28x; 0.21 1.21x",
                                   alpaca="0.17 1.21x; 0.18 1.25x", xsum="0.23 1.21x; 0.22 1.21x"),
}  # fmt: skip


class Table1(Experiment):
    title = "Table 1: after learning online"
    paper = (
        "hybrid distillation is ahead everywhere, all weights slightly ahead of LoRA (Llama3-8B; Qwen2-7B)."
    )
    differs = SHORTER
    apart = ("drafter",)
    claims = (
        more_tokens("The hybrid loss with n-grams beats direct distillation.",
                    dict(row="L_DM + λ L_ngram"), dict(row="L_DM")),
        more_tokens("Training all weights beats LoRA slightly.",
                    dict(row="L_DM + λ L_ngram"), dict(row="L_DM + λ L_ngram, LoRA")),
    )  # fmt: skip

    def cells(self, scale):
        for target in scale.targets:
            for task in scale.tasks:
                for row, (loss, weights, method) in ROWS.items():
                    how = getattr(scale, weights) if weights else None
                    yield setting(scale, task, method, loss, weights=how, target=target, row=row)

    def run(self, lab, cell):
        return tested(lab, cell)

    def report(self, results):
        def paper(said):
            return PAPER.get(said["row"], {}).get(said["task"].split("+")[0], "")

        return markdown.decoding(results, ("target", "task", "row"), paper)
