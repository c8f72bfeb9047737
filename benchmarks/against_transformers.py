"""omnidraft against transformers' own cross-tokenizer assisted generation: same weights, prompts, k and dtype.

Greedy. Five ways to the same answers, each prompt by all of them before the next prompt, in rotated order:

- `transformers-plain`: `generate`.
- `transformers-assisted`: `generate(assistant_model=..., tokenizer=..., assistant_tokenizer=...)`, which at
  `do_sample=False` re-tokenises the draft's text for the target (universal assisted generation).
- `plain`, `direct`, `text`: ours.

Both sides run the very same torch modules, loaded once, and turn prompt ids into answer ids from empty KV
caches; templates and detokenisation stay outside the clock. A step is a pass of the target that verifies.

    python benchmarks/against_transformers.py --target qwen2.5-coder-0.5b --drafter smollm2-135m \\
        --data ../shared/data --limit 20 --max-tokens 64 --repeat 3 --json against_transformers.json
"""

from __future__ import annotations

import json
import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from omnidraft import hub
from omnidraft.backends.huggingface import PRECISIONS, HuggingFaceModel
from omnidraft.control import Fixed
from omnidraft.decode import decode
from omnidraft.drafting import Drafter
from omnidraft.errors import OmniDraftError
from omnidraft.ngrams import Trie
from omnidraft.provenance import provenance
from omnidraft.sampling import Sampler, Sampling
from omnidraft.spellings import Lexicon
from omnidraft.tasks import TASKS, load_task
from omnidraft.translate import SymbolTranslator, TextTranslator, Translator
from omnidraft.verify import Compare
from omnidraft.vocab import Alignment

ASSISTED, TEXT = "transformers-assisted", "text"
_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer's tokens, the steps it took, how many target tokens were proposed in them, and when the first token
    was there, by `perf_counter`."""

    tokens: list[int]
    steps: int
    proposed: int
    first: float


@dataclass(frozen=True, slots=True)
class Run:
    """One answer, and its wall time."""

    method: str
    prompt: int
    answer: Answer
    seconds: float

    @property
    def tokens(self) -> list[int]:
        return self.answer.tokens


Contender = Callable[[Sequence[int]], Answer]


def ours(
    target: HuggingFaceModel,
    drafter: HuggingFaceModel,
    translator: Translator | None,
    k: int,
    max_tokens: int,
) -> Contender:
    """Our loop from empty KV caches; without a translator, plain decoding."""

    def answer(prompt: Sequence[int]) -> Answer:
        drafting = Drafter(drafter.session(), translator, drafter.context_length) if translator else None
        steps = decode(
            target.session(),
            drafting,
            prompt,
            sampler=Sampler(Sampling(), prompt, target.vocab.size),
            rule=Compare(),
            control=Fixed(k),
            max_tokens=max_tokens,
            ends=target.vocab.eos,
        )
        all_steps = [next(steps)]
        first = perf_counter()
        all_steps += steps
        return Answer(
            first=first,
            tokens=[token for step in all_steps for token in step.tokens],
            steps=len(all_steps),
            proposed=sum(len(step.proposal.tokens) for step in all_steps),
        )

    return answer


def transformers_generate(
    target: HuggingFaceModel,
    drafter: HuggingFaceModel | None,
    max_tokens: int,
    *,
    k: int | None = None,
    threshold: float | None = None,
) -> Contender:
    """transformers' `generate`, assisted if there is a drafter: by a constant k and threshold, or as it is set up."""
    # What a checkpoint's generation_config says of sampling and penalties must not reach a greedy comparison.
    options: dict[str, Any] = {
        "max_new_tokens": max_tokens,
        "do_sample": False,
        "repetition_penalty": 1.0,
        "eos_token_id": list(target.vocab.eos),
        "pad_token_id": target.vocab.eos[0],
    }
    if drafter:
        # Only the assistant's own generation_config is asked for these; arguments of `generate` are not.
        if k is not None:
            config = drafter.module.generation_config
            config.num_assistant_tokens = k
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = threshold
        options |= {
            "assistant_model": drafter.module,
            "tokenizer": target.tokenizer,
            "assistant_tokenizer": drafter.tokenizer,
        }

    def answer(prompt: Sequence[int]) -> Answer:
        rows: list[int] = []  # of each pass: one more than it was given to verify
        times: list[float] = []

        def count(_module: Any, _input: Any, output: Any) -> None:
            rows.append(output.logits.shape[1])
            times.append(perf_counter())

        input_ids = torch.tensor([list(prompt)], device=target.device)
        hook = target.module.register_forward_hook(count)
        try:
            output = target.module.generate(input_ids, attention_mask=torch.ones_like(input_ids), **options)
        finally:
            hook.remove()
        return Answer(
            output[0, len(prompt) :].tolist(), steps=len(rows), proposed=sum(rows) - len(rows), first=times[0]
        )

    return answer


def timed(name: str, contender: Contender, index: int, prompt: Sequence[int]) -> Run:
    """One answer and its wall time."""
    start = perf_counter()
    answer = contender(prompt)
    return Run(name, index, answer, perf_counter() - start)


def interleaved(
    contenders: dict[str, Contender],
    prompts: Sequence[Sequence[int]],
    repeat: int,
    advance: Callable[[], None],
) -> list[list[Run]]:
    """Every contender on every prompt, `repeat` times; a list of runs for each repeat."""
    order = deque(contenders)
    repeats: list[list[Run]] = []
    for _ in range(repeat):
        runs: list[Run] = []
        for index, prompt in enumerate(prompts):
            for name in order:
                runs.append(timed(name, contenders[name], index, prompt))
                advance()
            order.rotate(-1)
        repeats.append(runs)
    return repeats


def speed(runs: Sequence[Run]) -> float:
    """Tokens per second over all of them."""
    return sum(len(run.tokens) for run in runs) / sum(run.seconds for run in runs)


def rows(task: str, repeats: Sequence[Sequence[Run]]) -> list[dict[str, Any]]:
    """A row for each contender."""
    names = list(dict.fromkeys(run.method for run in repeats[0]))
    plain = {run.prompt: run.tokens for run in repeats[0] if run.method == names[0]}
    made = []
    for name in names:
        own = [[run for run in runs if run.method == name] for runs in repeats]
        tokens, steps = sum(len(run.tokens) for run in own[0]), sum(run.answer.steps for run in own[0])
        made.append(
            {
                "task": task,
                "method": name,
                "prompts": len(own[0]),
                "tokens": tokens,
                "steps": steps,
                "tokens_per_step": tokens / steps,
                "proposed_per_step": sum(run.answer.proposed for run in own[0]) / steps,
                "tokens_per_second": median(speed(runs) for runs in own),
                "tokens_per_second_all": [speed(runs) for runs in own],
                "answers_equal_to_transformers_plain": sum(run.tokens == plain[run.prompt] for run in own[0]),
                "same_in_every_repeat": all(
                    [run.tokens for run in runs] == [run.tokens for run in own[0]] for runs in own
                ),
            }
        )
    return made


def ratio(repeats: Sequence[Sequence[Run]], ours: str, theirs: str, seed: int) -> dict[str, Any]:
    """Our tokens per second over theirs, with a 95 % interval by resampling prompts (the paired bootstrap)."""
    prompts = sorted({run.prompt for run in repeats[0]})

    def one(method: str, prompt: int) -> tuple[int, float]:
        runs = [run for runs in repeats for run in runs if (run.method, run.prompt) == (method, prompt)]
        return len(runs[0].tokens), median(run.seconds for run in runs)

    pairs = [(*one(ours, prompt), *one(theirs, prompt)) for prompt in prompts]

    def of(sample: Sequence[tuple[int, float, int, float]]) -> float:
        our_tokens, our_seconds, their_tokens, their_seconds = map(sum, zip(*sample, strict=True))
        return float(our_tokens / our_seconds * their_seconds / their_tokens)

    draw = random.Random(seed)
    resampled = sorted(of(draw.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES))
    interval = [resampled[int(q * (_RESAMPLES - 1))] for q in (0.025, 0.975)]
    faster = sum(of([pair]) > 1 for pair in pairs)
    return {"ours": ours, "theirs": theirs, "ratio": of(pairs), "ci95": interval, "faster_on_prompts": faster}


def show(result: dict[str, Any]) -> None:
    """The result as two tables."""
    console = Console()
    title = f"{result['target']} with {result['drafter']}, {result['dtype']}, k = {result['k']}, greedy"
    columns = ("task", "method", "tokens\nper s", "tokens\nper step", "proposed\nper step", "answers\nequal")
    table = Table(*columns, title=title, caption="equal to transformers' plain ones")
    for row in result["rows"]:
        numbers = (row["tokens_per_second"], row["tokens_per_step"], row["proposed_per_step"])
        equal = f"{row['answers_equal_to_transformers_plain']} of {row['prompts']}"
        table.add_row(row["task"], row["method"], *(f"{number:.2f}" for number in numbers), equal)
    console.print(table)
    ratios = Table(
        "task", "text / assisted", "95 % interval", "faster on", title="Ratio of tokens per second"
    )
    for row in result["ratios"]:
        low, high = row["ci95"]
        faster = f"{row['faster_on_prompts']} of {row['prompts']} prompts"
        ratios.add_row(row["task"], f"{row['ratio']:.2f}", f"{low:.2f} .. {high:.2f}", faster)
    console.print(ratios)


def measure(
    target: Annotated[str, typer.Option(help="Name, hub id, folder or GGUF file.")] = "qwen2.5-coder-0.5b",
    drafter: Annotated[str, typer.Option(help="The same.")] = "smollm2-135m",
    tasks: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(TASKS),
    data: Annotated[Path, typer.Option(help="Folder of the tasks' files.")] = Path("../shared/data"),
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each task.")] = 20,
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    k: Annotated[int, typer.Option("-k", min=1, help="Draft tokens a step.")] = 4,
    confidence_threshold: Annotated[
        float, typer.Option(help="Where transformers' drafter stops early; 0 never, its default is 0.4.")
    ] = 0.0,
    precision: Annotated[str, typer.Option(help=", ".join(PRECISIONS))] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda")] = "auto",
    repeat: Annotated[int, typer.Option(min=1)] = 1,
    seed: Annotated[int, typer.Option(help="Of the bootstrap.")] = 0,
    out: Annotated[Path | None, typer.Option("--json", help="Where to write the result.")] = None,
) -> None:
    """Compare tokens per second with transformers' plain and assisted generation."""
    texts = {task: load_task(task, data, limit) for task in tasks.split(",")}
    target_model, draft_model = (
        HuggingFaceModel(hub.resolve(name), name=name, precision=precision, device=device)
        for name in (target, drafter)
    )
    alignment = Alignment(draft_model.vocab, target_model.vocab)

    def drafted(translator: Translator) -> Contender:
        return ours(target_model, draft_model, translator, k, max_tokens)

    contenders = {
        "transformers-plain": transformers_generate(target_model, None, max_tokens),
        ASSISTED: transformers_generate(
            target_model, draft_model, max_tokens, k=k, threshold=confidence_threshold
        ),
        "plain": ours(target_model, draft_model, None, k, max_tokens),
        "direct": drafted(SymbolTranslator(Trie(Lexicon.build(alignment), splits=False))),
        TEXT: drafted(TextTranslator(alignment)),
    }
    prompts = {
        task: [target_model.chat([{"role": "user", "content": text}]) for text in all_texts]
        for task, all_texts in texts.items()
    }
    result: dict[str, Any] = {
        "provenance": provenance(),
        "target": target,
        "drafter": drafter,
        "dtype": str(target_model.dtype).removeprefix("torch."),
        "device": target_model.device,
        "k": k,
        "confidence_threshold": confidence_threshold,
        "temperature": 0,
        "max_tokens": max_tokens,
        "repeat": repeat,
        "seed": seed,
        "rows": [],
        "ratios": [],
    }
    first = next(iter(prompts.values()))[0]
    with Progress(console=Console(stderr=True)) as progress:
        answers = repeat * sum(len(all_prompts) for all_prompts in prompts.values()) * len(contenders)
        bar = progress.add_task("answers", total=answers)
        for contender in contenders.values():
            contender(first)  # warms up; not counted
        for task, all_prompts in prompts.items():
            repeats = interleaved(contenders, all_prompts, repeat, lambda: progress.advance(bar))
            result["rows"] += rows(task, repeats)
            compared = ratio(repeats, TEXT, ASSISTED, seed)
            result["ratios"].append({"task": task, "prompts": len(all_prompts)} | compared)
            if out:  # after every task: an hour's work is not lost to a Ctrl-C
                out.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


if __name__ == "__main__":
    try:
        typer.run(measure)
    except OmniDraftError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
