"""The simulation validated: recorded answers replayed, against the same prompts decoded live."""

import numpy as np

from omnidraft.experiments import live, markdown, statistics
from omnidraft.experiments.experiment import TOKENS_A_STEP, Claim, Experiment
from omnidraft.experiments.learning import CACHE
from omnidraft.experiments.replay import Replay

METHODS = ("text:compare", CACHE)


def the_same(results):
    runs = [run for _, found in results.groups("task", "method") for run in found]
    if not runs:
        return None
    answers = [same for run in runs for same in run["same_answer"]]
    steps = [a == b for run in runs for a, b in zip(run["steps"], run["live_steps"], strict=True)]
    among = [same for same, equal in zip(answers, steps, strict=True) if equal]
    verdict = (
        "confirmed" if all(equal for same, equal in zip(answers, steps, strict=True) if same) else "refuted"
    )
    return verdict, (
        f"{sum(answers)} of {len(answers)} live answers are the recorded ones (the others part at a near-tie); "
        f"{sum(steps)} take the same number of steps, {sum(among)} of those with the same answer"
    )


class Validation(Experiment):
    title = "The simulation validated"
    claims = (Claim("(ours) A replayed answer takes the steps that it takes live.", the_same),)

    def cells(self, scale):
        for task in dict.fromkeys((scale.math, scale.code)):
            for method in METHODS:
                yield dict(
                    target=scale.targets[0], drafter=scale.drafter, task=task, test=scale.prompts,
                    tokens=scale.tokens, k=scale.k, method=method,
                )  # fmt: skip

    def run(self, lab, cell):
        [stream] = self.streams(cell)
        recorded = lab.stream(stream)
        pair = lab.pair(cell["target"], cell["drafter"])
        replayed = pair.measure(recorded, {"": Replay(pair.lexicon, cell["method"], cell["k"])})[""]
        prompts = lab.prompts(cell["task"], "test", cell["test"])
        options = dict(k=cell["k"], max_tokens=cell["tokens"])
        lived = list(live.answers(pair.live(), prompts, cell["method"], **options))
        return replayed | dict(
            live_steps=[took["steps"] for *_, took in lived],
            live_tokens=[took["tokens"] for *_, took in lived],
            live_acceptance=[took["acceptance"] for *_, took in lived],
            same_answer=[
                list(tokens) == one.answer for (tokens, *_), one in zip(lived, recorded, strict=True)
            ],
        )

    def seconds(self, cell, times):
        steps = cell["test"] * cell["tokens"] / TOKENS_A_STEP
        return steps * (2 * cell["k"] * times.draft + times.target) / 1000

    def report(self, results):
        rows = []
        for values, (found, *_) in results.groups("target", "task", "method"):
            same = np.array(found["same_answer"])
            equal = np.equal(found["steps"], found["live_steps"])
            lived = dict(
                tokens=found["live_tokens"], steps=found["live_steps"], acceptance=found["live_acceptance"]
            )
            replayed, live_ = ([statistics.acceptance([run]).text(".3f"), statistics.tokens_per_step([run]).text()]
                               for run in (found, lived))  # fmt: skip
            rows.append((*values, len(same), int(same.sum()), int((equal & same).sum()), *replayed, *live_))
        head = ("target", "task", "method", "prompts", "the same answer", "of these, the same steps",
                "replayed: acceptance", "tokens a step", "live: acceptance", "tokens a step")  # fmt: skip
        return (
            f"{markdown.table(head, rows)}\n\nWhere a live answer is another than the recorded one, two tokens were "
            "equally likely to within the rounding of a batch (a near-tie)."
        )
