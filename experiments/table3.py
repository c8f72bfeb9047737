"""Table 3: larger targets and a larger drafter, before and after learning."""

from omnidraft.experiments import markdown
from omnidraft.experiments.claims import ALIKE, more_tokens
from omnidraft.experiments.experiment import Experiment
from omnidraft.experiments.learning import CACHE, SHORTER, setting, tested

PAPER = {  # by the place of the target: Qwen2.5 7B, 14B, 32B, with Llama-68M after learning
    "gsm8k": ("0.401 1.66x", "0.407 1.92x", "0.42 2.05x"),
    "mbpp": ("0.27 1.33x", "0.272 1.57x", "0.274 1.71x"),
}


class Table3(Experiment):
    title = "Table 3: scaling"
    paper = (
        "with a larger target acceptance stays and the speedup grows; a drafter of 160M accepts more (0.47 to 0.49) "
        "and is slower (1.12x to 1.62x)."
    )
    differs = SHORTER
    apart = ("small",)  # the drafter that the larger one is beside
    claims = (
        more_tokens("A larger drafter is accepted more often.", dict(size="larger"), dict(size="small"),
                    over=(*ALIKE, "loss")),
    )  # fmt: skip

    def cells(self, scale):
        drafters = dict(small=scale.drafter, larger=scale.larger_drafter)
        if scale.larger_drafter == scale.drafter:
            del drafters["larger"]
        for at, target in enumerate(scale.scaling):
            for task in dict.fromkeys((scale.math, scale.code)):
                for size, drafter in drafters.items():
                    for loss in (None, "hybrid"):
                        yield setting(
                            scale, task, CACHE, loss, target=target, drafter=drafter, size=size, at=at,
                            small=scale.drafter,
                        )  # fmt: skip

    def run(self, lab, cell):
        return tested(lab, cell)

    def report(self, results):
        def paper(said):
            known = PAPER.get(said["task"].split("+")[0], ())
            learned = said["size"] == "small" and said["loss"]
            return known[said["at"]] if learned and said["at"] < len(known) else ""

        return markdown.decoding(results, ("target", "drafter", "task", "loss", "size", "at"), paper)
