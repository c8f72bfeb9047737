"""omnidraft against the engines a user could pick instead, on the same prompts with the same limits, greedily.

    python benchmarks/peers.py --target qwen2.5-coder-0.5b --data ../shared/data --limit 2 --max-tokens 32
    python benchmarks/peers.py --render    # docs/benchmarks.md and its pictures, from the results alone

Each contender answers in a process of its own, so that its peak memory is its own too; the contenders take turns, a
few prompts each, in rotated order, and each first answers a prompt that does not count. Every answer is kept as it
comes: a run that was stopped goes on where it was. Prompts are of test splits; a profile, if one is given, must
have been made from training splits (`omnidraft adapt --task`), and learns nothing here. Needs the extras hf,
openvino, llamacpp and plot, and openvino-genai; what fails is left out, and the page says why.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from omnidraft import hub
from omnidraft.demo import PROMPTS
from omnidraft.errors import OmniDraftError, OptionError
from omnidraft.experiments import markdown, statistics
from omnidraft.experiments.draw import draw
from omnidraft.experiments.results import Results
from omnidraft.provenance import provenance
from omnidraft.tasks import load_task

PLAIN, ADAPTED = ", plain", ", adapted"
PAGE, PICTURE = Path("docs/benchmarks.md"), Path("docs/pictures/benchmarks.svg")
# engine -> its weights; GenAI reads a GGUF file into a graph of its own
WEIGHTS = {"transformers": "float32", "llamacpp": "Q4_K_M", "openvino": "int8", "genai": "Q4_K_M"}
# contender -> engine, and whether it decodes plainly
CONTENDERS = {
    "transformers": ("transformers", True),
    "transformers, assisted": ("transformers", False),
    "llama.cpp": ("llamacpp", True),
    "llama.cpp, n-grams": ("llamacpp", False),
    "OpenVINO GenAI": ("openvino", True),
    "OpenVINO GenAI on GGUF": ("genai", True),
    "OpenVINO GenAI on GGUF, prompt look-up": ("genai", False),
    **{
        f"omnidraft on {engine}{how}": (engine, how == PLAIN)
        for engine in ("transformers", "llamacpp", "openvino")
        for how in (PLAIN, "", ADAPTED)
    },
}
COLUMNS = [
    "contender",
    "weights",
    "tokens/s",
    "x plain",
    "tokens/step",
    "first token (ms)",
    "peak memory (GB)",
    "same",
]
HEAD = """# Against other engines

Written by `benchmarks/peers.py` from `{path}`, which says what made each number. Greedy; every contender in a
process of its own, in turns, on the same prompts of test splits. *x plain*: tokens a second over the fastest plain
decoding with the same weights on the same engine. *Same*: answers that are that plain decoding's. Medians with 95 %
intervals, by bootstrap over prompts. Weights differ between engines, so answers do too: compare speeds of one kind
of weights first.
Turns are of four prompts: in a run of one turn what else the machine did falls on some contenders and not on others.
"""
CANNOT = """What the others cannot do, as of the versions above:

- llama-cpp-python drafts by n-grams of the context alone; it has no drafting by a model.
- OpenVINO GenAI drafts by prompt look-up, or by a model of the target's own vocabulary; the drafter here has another.
  Its prompt look-up does not run the int8 graph (its paged attention refuses it), so it runs what GenAI makes of the
  GGUF file.
- transformers' assisted generation crosses vocabularies, but drafts on where that does not pay, and does not learn.
"""
PEERS = ("llama-cpp-python", "openvino", "openvino-genai")  # beside those that provenance names
_CHUNK = 4  # prompts a turn


@dataclass(frozen=True)
class Job:
    """What a contender is asked, as its process gets it."""

    contender: str
    target: str
    drafter: str
    profile: str | None
    max_tokens: int
    threads: int
    warm_up: list[int]
    prompts: list[list[int]]
    ends: list[int]


@dataclass(frozen=True)
class Answer:
    """The tokens, passes of the target where the engine tells them, and when the first token was there."""

    tokens: list[int]
    steps: int | None
    first: float  # by `perf_counter`


Contender = Callable[[list[int]], Answer]


def transformers(job: Job) -> Contender:
    """As a user has it: the modules as transformers loads them."""
    import torch
    from against_transformers import transformers_generate
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from omnidraft.backends.huggingface import HuggingFaceModel

    torch.set_num_threads(job.threads)

    def load(name: str) -> HuggingFaceModel:
        folder = hub.resolve(name)
        module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return HuggingFaceModel.of(module, AutoTokenizer.from_pretrained(folder))

    drafter = load(job.drafter) if "assisted" in job.contender else None
    generate = transformers_generate(load(job.target), drafter, job.max_tokens)

    def answer(prompt: list[int]) -> Answer:
        found = generate(prompt)
        return Answer(found.tokens, found.steps, found.first)

    return answer


def llama_cpp(job: Job) -> Contender:
    """llama-cpp-python's `generate`; two n-gram tokens a step, which it says suits CPUs."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    class Counting(Llama):
        passes = 0

        def eval(self, tokens: Sequence[int]) -> None:
            self.passes += 1
            super().eval(tokens)

    drafting = LlamaPromptLookupDecoding(num_pred_tokens=2) if "n-grams" in job.contender else None
    longest = max(map(len, [job.warm_up, *job.prompts])) + job.max_tokens
    model = Counting(
        str(hub.pull_gguf(job.target)), n_ctx=longest + 16, n_threads=job.threads, n_threads_batch=job.threads,
        flash_attn=True, draft_model=drafting, verbose=False,
    )  # fmt: skip

    def answer(prompt: list[int]) -> Answer:
        model.reset()
        model.passes = 0
        tokens: list[int] = []
        first = 0.0
        for token in model.generate(prompt, temp=0, repeat_penalty=1):
            first = first or perf_counter()
            tokens.append(token)
            if token in job.ends or len(tokens) == job.max_tokens:
                break
        return Answer(tokens, model.passes, first)

    return answer


def genai(job: Job) -> Contender:
    """OpenVINO GenAI's pipeline over the files that our engine runs, or over the GGUF file."""
    import numpy as np
    import openvino as ov
    import openvino_genai
    from against_genai import pipeline
    from transformers import AutoTokenizer

    from omnidraft.backends.openvino import SETTINGS
    from omnidraft.cache import home_of

    look_up = "look-up" in job.contender
    settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": job.threads}
    settings |= {"prompt_lookup": True} if look_up else {"ATTENTION_BACKEND": "SDPA"}
    if CONTENDERS[job.contender][0] == "genai":
        model = openvino_genai.LLMPipeline(str(hub.pull_gguf(job.target)), "CPU", **settings)
    else:
        graph = home_of(job.target) / "openvino-int8" / "openvino_model.xml"
        tokenizer = AutoTokenizer.from_pretrained(hub.resolve(job.target))
        with tempfile.TemporaryDirectory() as folder:
            # In the arithmetic that is fastest: OpenVINO's own choice is slower on CPUs with AMX.
            model = pipeline(graph, tokenizer, Path(folder), **SETTINGS | settings)
    config = openvino_genai.GenerationConfig(max_new_tokens=job.max_tokens, do_sample=False)
    config.stop_token_ids = set(job.ends)
    config.include_stop_str_in_output = True
    if look_up:
        config.num_assistant_tokens, config.max_ngram_size = 5, 3

    class Clock(openvino_genai.StreamerBase):
        def __init__(self) -> None:
            super().__init__()
            self.first = 0.0

        def write(self, token: Any) -> Any:
            self.first = self.first or perf_counter()
            return openvino_genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    def answer(prompt: list[int]) -> Answer:
        clock = Clock()
        ids, mask = ov.Tensor(np.array([prompt], np.int64)), ov.Tensor(np.ones((1, len(prompt)), np.int64))
        result = model.generate(openvino_genai.TokenizedInputs(ids, mask), config, clock)
        steps = len(result.perf_metrics.raw_metrics.token_infer_durations)
        return Answer(list(result.tokens[0]), steps or None, clock.first)

    return answer


def ours(job: Job) -> Contender:
    """omnidraft as a user has it, from empty KV caches."""
    import omnidraft

    engine, plain = CONTENDERS[job.contender]
    settings = {
        "openvino": {"INFERENCE_NUM_THREADS": str(job.threads)},
        "llamacpp": {"n_threads": str(job.threads)},
    }
    model = omnidraft.load(job.target, None if plain else job.drafter, engine=engine, settings=settings)
    if job.contender.endswith(ADAPTED):
        learner = model.learn("off", profile=job.profile)
        if learner.problem or not learner.account.updates:
            raise OptionError(f"profile {job.profile}: {learner.problem or 'nothing was learned in it'}")
    options = omnidraft.Options(method="plain" if plain else "auto", max_tokens=job.max_tokens)

    def answer(prompt: list[int]) -> Answer:
        model.reset()
        steps = model.steps(prompt, options, job.max_tokens, job.ends)
        taken = [next(steps)]
        first = perf_counter()
        taken += steps
        return Answer([token for step in taken for token in step.tokens], len(taken), first)

    return answer


def maker(contender: str) -> Callable[[Job], Contender]:
    """What loads a contender."""
    if contender.startswith("omnidraft"):
        return ours
    return {"transformers": transformers, "llamacpp": llama_cpp}.get(CONTENDERS[contender][0], genai)


def work(job: Job) -> Iterator[dict[str, Any]]:
    """The answers of a contender, measured; in its own process."""
    contender = maker(job.contender)(job)
    contender(job.warm_up)
    for prompt in job.prompts:
        start = perf_counter()
        answer = contender(prompt)
        end = perf_counter()
        yield {
            "tokens": len(answer.tokens),
            "steps": answer.steps,
            "seconds": end - start,
            "first_seconds": answer.first - start,
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "answer": hashlib.sha256(repr(answer.tokens).encode()).hexdigest()[:16],
        }


def answers(job: Job) -> Iterator[dict[str, Any]]:
    """`work` in another process, a prompt at a time.

    Raises:
        OmniDraftError: the process failed.
    """
    threads = str(job.threads)
    environment = os.environ | {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, __file__, "--job", json.dumps(asdict(job))]
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, env=environment) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):  # libraries print too
                yield json.loads(line)
        if process.wait():
            said.seek(0)
            raise OmniDraftError((said.read().strip().splitlines() or ["it was killed"])[-1])


def run(
    results: Results,
    setting: dict[str, Any],
    jobs: Job,
    tasks: dict[str, list[list[int]]],
    engines: Sequence[str],
) -> None:
    """Answer what is not answered yet. Whoever fails is left out; why is kept with the provenance."""
    born = provenance()
    born["versions"] |= {name: version(name) for name in PEERS}
    failed: dict[str, str] = {}
    prompts = [(task, i, ids) for task, every in tasks.items() for i, ids in enumerate(every)]
    prompts.sort(key=lambda one: one[1])  # all tasks in each turn
    names = [
        name
        for name, (engine, _) in CONTENDERS.items()
        if engine in engines and (jobs.profile or not name.endswith(ADAPTED))
    ]
    for turn in range(0, len(prompts), _CHUNK):
        names = names[1:] + names[:1]
        for name in names:
            cells = [
                (setting | {"contender": name, "task": task, "prompt": i}, ids)
                for task, i, ids in prompts[turn : turn + _CHUNK]
            ]
            left = [(cell, ids) for cell, ids in cells if cell not in results]
            if not left or name in failed:
                continue
            own = Job(**asdict(jobs) | {"contender": name, "prompts": [ids for _, ids in left]})
            start = perf_counter()
            try:
                for (cell, _), measured in zip(left, answers(own), strict=False):
                    results.add(cell, measured, measured["seconds"], born)
            except OmniDraftError as error:
                failed[name] = str(error)
            print(f"{turn // _CHUNK + 1}: {name}, {perf_counter() - start:.0f} s", file=sys.stderr)
    results.provenances.append(born | {"left_out": failed})
    results.save()


Found = dict[int, dict[str, Any]]  # prompt -> what a contender was measured to take


def found(results: Results, setting: dict[str, Any], task: str) -> dict[str, Found]:
    """What each contender that has answered was measured to take, on the prompts that all of them have answered."""
    every: dict[str, Found] = {}
    for name in CONTENDERS:
        own = results.groups("prompt", **setting, contender=name, task=task)
        every |= {name: answered} if (answered := {i: one[0] for (i,), one in own}) else {}
    common = set.intersection(*map(set, every.values()))
    return {name: {i: own[i] for i in sorted(common)} for name, own in every.items()}


def speed(own: Found) -> statistics.Interval:
    return statistics.middle([one["tokens"] / one["seconds"] for one in own.values()])


def column(own: Found, field: str) -> list[Any]:
    return [one[field] for one in own.values()]


def rows(every: dict[str, Found]) -> Iterator[list[Any]]:
    """The table of a task. The base of an engine is what decodes plainly fastest on the same weights."""
    for name, own in every.items():
        engine = CONTENDERS[name][0]
        plain = [other for other in every if CONTENDERS[other] == (engine, True)]
        base = max(plain, key=lambda other: speed(every[other]).value, default=name)
        sides = [
            [{field: column(side, field) for field in ("tokens", "seconds")}] for side in (own, every[base])
        ]
        steps = column(own, "steps")
        same = map(str.__eq__, column(own, "answer"), column(every[base], "answer"))
        yield [
            name,
            WEIGHTS[engine],
            speed(own).text(".1f"),
            statistics.ratio(*sides, per="seconds").text(".2f", "x"),
            None if None in steps else f"{sum(column(own, 'tokens')) / sum(steps):.2f}",
            f"{1000 * statistics.middle(column(own, 'first_seconds')).value:.0f}",
            f"{max(column(own, 'peak_mb')) / 1000:.1f}",
            f"{sum(same)}/{len(own)}",
        ]


class Chart:
    """What `omnidraft.experiments.draw` draws: tokens a second of each contender, a mark for each task."""

    def __init__(self, setting: dict[str, Any]) -> None:
        self.title = f"{setting['target']}: tokens a second, median over prompts, 95 % interval"
        self._setting = setting

    def draw(self, results: Results, axes: Any) -> bool:
        """See `Experiment`."""
        for (task,), _ in results.groups("task", **self._setting):
            speeds = {name: speed(own) for name, own in found(results, self._setting, task).items()}
            middle = [one.value for one in speeds.values()]
            reach = [
                [one.value - one.low for one in speeds.values()],
                [one.high - one.value for one in speeds.values()],
            ]
            axes.errorbar(middle, list(speeds), xerr=reach, linestyle="", label=task)
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        return True


def render(path: Path) -> None:
    """Write the page and its pictures."""
    results = Results(path)
    lines = [HEAD.format(path=path)]
    settings = results.groups("target", "drafter", "max_tokens", "threads", "profile")
    for (target, drafter, max_tokens, threads, profile), _ in settings:
        setting = dict(
            target=target, drafter=drafter, max_tokens=max_tokens, threads=threads, profile=profile
        )
        born = results.provenances[
            [one["provenance"] for one in results.cells if setting.items() <= one["setting"].items()][-1]
        ]
        versions = ", ".join(f"{name} {number}" for name, number in born["versions"].items() if number)
        learned = f", profile {profile}" if profile else ""
        lines += [
            f"## {target}\n",
            f"Drafter {drafter}{learned}, up to {max_tokens} tokens an answer, {threads} threads, "
            f"{born['machine']['cpu']}, {versions}.\n",
        ]
        for (task,), _ in results.groups("task", **setting):
            lines += [f"### {task}\n", markdown.table(COLUMNS, rows(found(results, setting, task))), ""]
        own = "-".join(filter(None, (PICTURE.stem, target, drafter, profile))).replace("/", "_")
        name = PICTURE.with_name(f"{own}{PICTURE.suffix}")
        light, dark = (file.name for file in draw(Chart(setting), results, name))
        lines += [
            f'<picture><source media="(prefers-color-scheme: dark)" srcset="pictures/{dark}">'
            f'<img alt="Tokens a second of each contender" src="pictures/{light}"></picture>\n'
        ]
    left_out = [f"- {name}: `{error}`" for name, error in results.provenances[-1].get("left_out", {}).items()]
    lines += ["## Left out, for they failed\n", *left_out, ""] if left_out else []
    PAGE.write_text("\n".join([*lines, CANNOT]), encoding="utf-8")


def main(
    target: Annotated[
        str, typer.Option(help="A known name: llama.cpp runs its GGUF file.")
    ] = "qwen2.5-coder-0.5b",
    drafter: Annotated[str, typer.Option(help="Of omnidraft and of transformers.")] = "smollm2-135m",
    profile: Annotated[
        str | None, typer.Option(help="Of `omnidraft adapt`: adds the adapted contenders.")
    ] = None,
    tasks: Annotated[str, typer.Option(help="Comma-separated; test splits.")] = "gsm8k,mbpp",
    data: Annotated[Path, typer.Option(help="Folder of the tasks' files.")] = Path("../shared/data"),
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each task.")] = 40,
    max_tokens: Annotated[int, typer.Option(min=1)] = 160,
    threads: Annotated[int, typer.Option(min=1)] = os.cpu_count() or 1,
    engines: Annotated[str, typer.Option(help="Comma-separated: whose contenders take part.")] = ",".join(
        WEIGHTS
    ),
    path: Annotated[Path, typer.Option("--json", help="Results; goes on where they end.")] = Path(
        "results/peers.json"
    ),
    render_only: Annotated[bool, typer.Option("--render", help="Only write the page.")] = False,
    job: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure every contender, then write the page and its pictures."""
    if job:
        for measured in work(Job(**json.loads(job))):
            print(json.dumps(measured), flush=True)
        return
    chosen = engines.split(",")
    if unknown := set(chosen) - WEIGHTS.keys():
        raise OptionError(f"unknown engine {', '.join(sorted(unknown))}; known are {', '.join(WEIGHTS)}")
    if not render_only:
        from omnidraft.backends.checkpoint import CheckpointModel
        from omnidraft.backends.openvino_convert import converted

        folder = hub.pull(target)
        hub.pull(drafter)
        model = CheckpointModel(folder, target)
        converted(target, folder, model.config.get_text_config(), "int8")

        def prompt(text: str) -> list[int]:
            return model.chat([{"role": "user", "content": text}])

        texts = {task: load_task(task, data, limit) for task in tasks.split(",")}
        common = Job(
            "", target, drafter, profile, max_tokens, threads, prompt(PROMPTS[0]), [], [*model.vocab.eos]
        )
        setting = dict(
            target=target, drafter=drafter, max_tokens=max_tokens, threads=threads, profile=profile
        )
        prompts = {task: [prompt(text) for text in every] for task, every in texts.items()}
        run(Results(path), setting, common, prompts, chosen)
    render(path)


if __name__ == "__main__":
    try:
        typer.run(main)
    except OmniDraftError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
