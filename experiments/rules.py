"""Rules by temperature: the trie against the paper's rule and against compare, decoded live."""

from omnidraft.experiments import live, markdown, statistics
from omnidraft.experiments.claims import more_tokens
from omnidraft.experiments.experiment import TOKENS_A_STEP, Experiment
from omnidraft.experiments.replay import by_prompt

METHODS = ["prefill:trie:splits", "prefill:paper", "ngram:trie:splits", "ngram:paper", "direct:trie:splits",
           "prefill:compare:splits", "text:compare"]  # fmt: skip
TEMPERATURES = (1.0, 0.5)


class Rules(Experiment):
    title = "Rules by temperature"
    claims = (
        more_tokens("(ours) At temperature 1 the trie makes more tokens than the paper's rule.",
                    dict(method="prefill:trie:splits", temperature=1.0), dict(method="prefill:paper", temperature=1.0)),
        more_tokens("(ours) At temperature 1 the trie makes more tokens than comparing text.",
                    dict(method="prefill:trie:splits", temperature=1.0), dict(method="text:compare", temperature=1.0)),
    )  # fmt: skip

    def cells(self, scale):
        for task in scale.tasks[:3]:
            for temperature in TEMPERATURES:
                for method in METHODS:
                    yield dict(
                        target=scale.targets[0], drafter=scale.drafter, task=task, prompts=scale.prompts,
                        tokens=scale.tokens // 2, temperature=temperature, k=scale.k, method=method,
                    )  # fmt: skip

    def streams(self, cell):
        return iter(())

    def run(self, lab, cell):
        model = lab.pair(cell["target"], cell["drafter"]).live()
        prompts = lab.prompts(cell["task"], "test", cell["prompts"])
        options = dict(k=cell["k"], temperature=cell["temperature"], max_tokens=cell["tokens"])
        return by_prompt([took for *_, took in live.answers(model, prompts, cell["method"], **options)])

    def seconds(self, cell, times):
        steps = cell["prompts"] * cell["tokens"] / TOKENS_A_STEP
        return steps * (cell["k"] * times.draft + times.target) / 1000

    def report(self, results):
        rows = []
        for (task, temperature, method), runs in results.groups("task", "temperature", "method"):
            told = (statistics.acceptance(runs).text(".3f"), statistics.tokens_per_step(runs).text())
            rows.append((task, f"{temperature:g}", method, statistics.prompts(runs), *told))
        head = ("task", "temperature", "method and rule", "prompts", "acceptance", "tokens a step")
        return markdown.table(head, sorted(rows, key=lambda row: row[:2]))
