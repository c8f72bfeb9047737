"""Task quality is not touched: right answers of plain and of speculative decoding."""

from omnidraft.experiments import live, markdown, statistics
from omnidraft.experiments.experiment import TOKENS_A_STEP, Claim, Experiment
from omnidraft.experiments.grading import right
from omnidraft.experiments.replay import by_prompt
from omnidraft.tasks import load_rows, prompt_of

TASKS = ("gsm8k", "humaneval", "mbpp")
METHODS = ("plain", "text:compare")


def equal(results):
    said, unequal = [], False
    for (task,), _ in results.groups("task"):
        sides = [results.find(task=task, method=method) for method in METHODS]
        if all(sides):
            both = list(zip(*(side[0]["right"] for side in sides), strict=False))  # of the prompts both have
            plain, drafted = (sum(map(bool, one)) for one in zip(*both, strict=True))
            same = sum(bool(a) == bool(b) for a, b in both)
            said.append(f"{task}: {plain} and {drafted} of {len(both)} right, {same} alike")
            unequal |= same < len(both)
    if not said:
        return None
    return "refuted" if unequal else "confirmed", "; ".join(said)


class Quality(Experiment):
    title = "Task quality"
    claims = (Claim("(ours) Plain and speculative answers are right alike.", equal),)

    def cells(self, scale):
        for task in TASKS:
            for method in METHODS:
                yield dict(
                    target=scale.targets[0], drafter=scale.drafter, task=task, prompts=scale.graded,
                    tokens=scale.graded_tokens, k=scale.k, method=method,
                )  # fmt: skip

    def streams(self, cell):
        return iter(())

    def run(self, lab, cell):
        model = lab.pair(cell["target"], cell["drafter"]).live()
        rows = load_rows(cell["task"], lab.data, cell["prompts"])
        prompts = [prompt_of(cell["task"], row) for row in rows]
        options = dict(k=cell["k"], max_tokens=cell["tokens"])
        found = []
        for row, (_, text, took) in zip(
            rows, live.answers(model, prompts, cell["method"], **options), strict=True
        ):
            found.append(took | {"right": int(right(cell["task"], row, text))})
            lab.say(
                f"{cell['task']}, {cell['method']}: {sum(one['right'] for one in found)} of {len(found)} right"
            )
        return by_prompt(found)

    def seconds(self, cell, times):
        tokens = cell["prompts"] * cell["tokens"]
        if cell["method"] == "plain":
            return tokens * times.target / 1000
        return tokens / TOKENS_A_STEP * (cell["k"] * times.draft + times.target) / 1000

    def report(self, results):
        rows = []
        for values, runs in results.groups("target", "task", "method"):
            score = statistics.mean(runs[0]["right"])
            told = (statistics.prompts(runs), score.text(".1%"), statistics.tokens_per_step(runs).text())
            rows.append((*values, *told, f"{sum(runs[0]['tokens']) / sum(runs[0]['seconds']):.1f}"))
        head = ("target", "task", "method", "prompts", "right", "tokens a step", "tokens a second")
        return markdown.table(head, rows)
