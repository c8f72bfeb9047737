"""Step times and tokens per second at the shapes of a 7B target and a 68M drafter, on a machine with a GPU.

Nothing is downloaded: weights are random and made on the device, for time depends on shapes only. What the
weights decide in real use, how often the target agrees, is set by hand instead (*controlled acceptance*):

- `Scripted` lifts one token a position in the target's logits, after the pass, so that its greedy answer is
  known and does not hang on rounding. It does so for plain decoding too.
- `Controlled` proposes the script's next tokens, each right with probability a and else wrong.

Everything else is the real loop: k passes of the drafter, translation, one pass of the target over the
proposal, comparison, rewinding. Two things differ from real use: the drafter's own tokens never match, so it
always catches up on all tokens of a step (in one pass, with its first draft token); and both prompts are in
their KV caches before the clock starts, so these are tokens per second of decoding, prefill excluded.

    python benchmarks/gpu_steps.py --json gpu_steps.json      # at most 5 minutes on a GPU
    python benchmarks/gpu_steps.py --tiny                     # seconds on a CPU: tries the script, measures nothing
"""

from __future__ import annotations

import json
import random
import string
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config

from omnidraft.backends.huggingface import PRECISIONS, HuggingFaceSession, resolve_dtype
from omnidraft.control import Fixed
from omnidraft.decode import decode
from omnidraft.drafting import Drafter
from omnidraft.errors import OmniDraftError, OptionError
from omnidraft.provenance import provenance
from omnidraft.sampling import Sampler, Sampling
from omnidraft.session import feed
from omnidraft.stats import Stats
from omnidraft.translate import TextTranslator
from omnidraft.types import Draft, Proposal, Rows
from omnidraft.verify import Compare
from omnidraft.vocab import Alignment, Vocab

ACCEPTANCES = (0.0, 0.2, 0.4, 0.6, 0.8)
KS = (4, 3)
MAX_M = 16
_LIFT = 1e6  # above any logit


@dataclass(frozen=True, slots=True)
class Shapes:
    """The two models, and how many pieces each tokenizer has (the rest of the width only pads the logits)."""

    draft: PreTrainedConfig
    target: PreTrainedConfig
    draft_pieces: int
    target_pieces: int


def full_shapes() -> Shapes:
    """Llama-68M (JackFram/llama-68m) and Qwen2-7B."""
    draft = LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=2,
        num_attention_heads=12,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    target = Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
    )
    return Shapes(draft, target, draft_pieces=32000, target_pieces=151646)


def tiny_shapes() -> Shapes:
    """The same two architectures, small enough for any CPU."""
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    draft = LlamaConfig(vocab_size=600, max_position_embeddings=2048, **small)
    target = Qwen2Config(vocab_size=1024, num_key_value_heads=1, max_position_embeddings=32768, **small)
    return Shapes(draft, target, draft_pieces=600, target_pieces=1000)


def word_vocab(pieces: int, width: int) -> Vocab:
    """A byte-level vocabulary of all bytes and then words; smaller ones are prefixes of larger ones."""
    words = ("Ġ" + "".join(letters) for letters in product(string.ascii_lowercase, repeat=4))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [*alphabet, *islice(words, pieces - len(alphabet))]
    ids = {text: id for id, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Vocab(tokenizer, width=width)


class Scripted(HuggingFaceSession):
    """A session whose model greedily answers `script` (prompt and answer), whatever its weights say.

    The lift is outside the session's own clock, so the loop's `other` time has it.
    """

    def __init__(self, module: Any, script: Sequence[int]) -> None:
        super().__init__(module)
        self.script = script

    def extend(self, tokens: Sequence[int], rows: int) -> Rows:
        """See `omnidraft.session.Session`."""
        logits = super().extend(tokens, rows)
        end = len(self.tokens) + 1
        for row, scripted in zip(logits, self.script[end - rows : end], strict=False):
            row[scripted] = _LIFT
        return logits


class Controlled(TextTranslator):
    """Translates as always, then proposes as many tokens as were drafted, each right with a probability."""

    def __init__(self, alignment: Alignment) -> None:
        super().__init__(alignment)
        self.script: Sequence[int] = ()
        self.acceptance = 0.0
        self.random = random.Random()

    def translate(self, context: Sequence[int], draft: Draft) -> Proposal:
        """A proposal of the draft's length; only the time of the draft's own translation is kept."""
        super().translate(context, draft)
        ahead = self.script[len(context) : len(context) + len(draft.tokens)]
        return Proposal(tuple(t if self.random.random() < self.acceptance else _another(t) for t in ahead))


def _another(token: int) -> int:
    return token - 1 if token else 1


@dataclass(slots=True)
class Timing:
    """Times of one pass over m tokens behind the context; logits of all m are asked for."""

    model: str
    m: int
    samples: list[float] = field(default_factory=list)  # ms

    def as_dict(self) -> dict[str, Any]:
        """The JSON row; quartiles show how steady the machine was."""
        low, middle, high = torch.tensor(self.samples).quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
        row = {"model": self.model, "m": self.m, "samples": len(self.samples)}
        return row | {"ms": middle, "ms_quartile_1": low, "ms_quartile_3": high}


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the second table; k = 0 is plain decoding."""

    k: int
    acceptance: float = 0.0

    @property
    def expected_tokens_per_step(self) -> float:
        """What the acceptance makes of k tokens and the free one, before an answer's end cuts the last step."""
        return sum(self.acceptance**i for i in range(self.k + 1)) if self.k else 1.0


class Bench:
    """Two models, one prompt, one scripted answer."""

    def __init__(
        self,
        shapes: Shapes,
        *,
        device: str,
        dtype: torch.dtype,
        context: int,
        answer: int,
        seed: int,
    ) -> None:
        torch.manual_seed(seed)
        self.seed = seed
        draft_vocab = word_vocab(shapes.draft_pieces, shapes.draft.vocab_size)
        target_vocab = word_vocab(shapes.target_pieces, shapes.target.vocab_size)
        self.size = target_vocab.size
        # Words that both have keep the drafter's context as long as the target's.
        words = range(256, shapes.draft_pieces)
        self.script = random.Random(seed).choices(words, k=context + answer)
        self.prompt = self.script[:context]
        self.behind = random.Random(seed + 1).choices(words, k=MAX_M)
        self.draft_session = HuggingFaceSession(random_model(shapes.draft, device, dtype))
        self.target_session = Scripted(random_model(shapes.target, device, dtype), self.script)
        self.translator = Controlled(Alignment(draft_vocab, target_vocab))
        self.translator.script = self.script
        self.draft_context_length = shapes.draft.max_position_embeddings

    def time_pass(self, model: str, m: int) -> float:
        """Milliseconds of one pass over m tokens behind the prompt, by `feed`."""
        session = self.draft_session if model == "draft" else self.target_session
        before = session.seconds
        feed(session, [*self.prompt, *self.behind[:m]], rows=m)
        return 1000 * (session.seconds - before)

    def answer(self, setting: Setting, repeat: int) -> Stats:
        """One answer with the prompts already in the KV caches."""
        drafter = None
        if setting.k:
            self.translator.acceptance = setting.acceptance
            self.translator.random = random.Random(f"{self.seed} {setting.k} {setting.acceptance} {repeat}")
            drafter = Drafter(self.draft_session, self.translator, self.draft_context_length)
            drafter.propose(self.prompt, 1)
        feed(self.target_session, self.prompt, rows=1)
        stats = Stats()
        tokens: list[int] = []
        for step in decode(
            self.target_session,
            drafter,
            self.prompt,
            sampler=Sampler(Sampling(), self.prompt, self.size),
            rule=Compare(),
            control=Fixed(max(setting.k, 1)),
            max_tokens=len(self.script) - len(self.prompt),
            ends=(),
        ):
            stats.add(step)
            tokens += step.tokens
        if tokens != self.script[len(self.prompt) :]:
            raise RuntimeError(
                f"{setting} changed the target's answer; decoding is broken, its times mean nothing"
            )
        return stats


def random_model(config: PreTrainedConfig, device: str, dtype: torch.dtype) -> Any:
    """A causal language model made on the device, ready to run."""
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)


def until(deadline: float, what: str, stopped: list[str], items: Iterator[Any]) -> Iterator[Any]:
    """The items as long as there is time; else the reason goes to `stopped`."""
    for done, item in enumerate(items):
        if perf_counter() > deadline:
            stopped.append(f"{what}: out of budget after {done} measurements")
            return
        yield item


def step_times(
    bench: Bench, repeat: int, limit: Callable[[str, Iterator[Any]], Iterator[Any]]
) -> list[Timing]:
    """t_draft(1) and t_verify(1..16), interleaved; the first pass of each shape warms up and is not kept."""
    timings = [Timing("draft", 1), *(Timing("target", m) for m in range(1, MAX_M + 1))]
    for timing in timings:
        bench.time_pass(timing.model, timing.m)
    for timing in limit("step times", (timing for _ in range(repeat) for timing in timings)):
        timing.samples.append(bench.time_pass(timing.model, timing.m))
    return [timing for timing in timings if timing.samples]


def decode_speed(
    bench: Bench, repeat: int, limit: Callable[[str, Iterator[Any]], Iterator[Any]]
) -> list[dict[str, Any]]:
    """Plain and every (k, a), interleaved with the order rotated each round; medians over rounds."""
    settings = deque([Setting(0), *(Setting(k, a) for a in ACCEPTANCES for k in KS)])

    def rounds() -> Iterator[tuple[int, Setting]]:
        for i in range(repeat):
            yield from ((i, setting) for setting in tuple(settings))
            settings.rotate(-1)

    runs: dict[Setting, list[Stats]] = {}
    for i, setting in limit("decoding", rounds()):
        runs.setdefault(setting, []).append(bench.answer(setting, i))
    plain = median(stats.tokens_per_second or 0.0 for stats in runs[Setting(0)]) if runs else 0.0
    rows = []
    for setting, all_stats in runs.items():
        total = Stats()
        for stats in all_stats:
            total.merge(stats)
        speed = median(stats.tokens_per_second or 0.0 for stats in all_stats)
        rows.append(
            {
                "method": "controlled" if setting.k else "plain",
                "k": setting.k or None,
                "acceptance_set": setting.acceptance if setting.k else None,
                "answers": len(all_stats),
                "acceptance_rate": total.acceptance_rate,
                "tokens_per_step": total.tokens_per_step,
                "tokens_per_step_expected": setting.expected_tokens_per_step,
                "tokens_per_second": speed,
                "tokens_per_second_all": [stats.tokens_per_second for stats in all_stats],
                "speedup": speed / plain,
                "draft_ms_per_step": 1000 * total.draft_seconds / total.steps,
                "verify_ms_per_step": 1000 * total.verify_seconds / total.steps,
                "other_ms_per_step": 1000 * total.other_seconds / total.steps,
            }
        )
    return rows


def show(result: dict[str, Any]) -> None:
    """The result as two tables."""
    console = Console()
    passes = Table("model", "m", "ms", "quartiles", title=f"One pass over m tokens, {result['device_name']}")
    for row in result["steps"]:
        quartiles = f"{row['ms_quartile_1']:.2f} .. {row['ms_quartile_3']:.2f}"
        passes.add_row(row["model"], str(row["m"]), f"{row['ms']:.2f}", quartiles)
    console.print(passes)
    names = (
        "tokens_per_step",
        "tokens_per_step_expected",
        "tokens_per_second",
        "speedup",
        "draft_ms_per_step",
        "verify_ms_per_step",
        "other_ms_per_step",
    )
    columns = (
        "",
        "tokens\nper step",
        "expected",
        "tokens\nper s",
        "speedup",
        "draft\nms",
        "verify\nms",
        "other\nms",
    )
    speed = Table(*columns, title="Decoding by controlled acceptance a; ms per step")
    for row in result["decoding"]:
        label = "plain" if row["k"] is None else f"k={row['k']} a={row['acceptance_set']}"
        speed.add_row(label, *(f"{row[name]:.2f}" for name in names))
    console.print(speed)
    for reason in result["stopped_early"]:
        console.print(f"[yellow]stopped early[/]: {reason}")


def measure(
    device: Annotated[str, typer.Option(help="auto, cuda, cuda:1, cpu")] = "auto",
    precision: Annotated[str, typer.Option(help=", ".join(PRECISIONS))] = "auto",
    tiny: Annotated[
        bool, typer.Option(help="Tiny shapes and 64 + 24 tokens once, to try it on a CPU.")
    ] = False,
    context: Annotated[int | None, typer.Option(min=1, max=1536, help="Tokens of the prompt [512].")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, max=384, help="Tokens of an answer [128].")] = None,
    repeat: Annotated[
        int | None, typer.Option(min=1, help="Rounds; ten times as many of passes [3].")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights, script and proposals.")] = 0,
    budget: Annotated[float, typer.Option(help="Seconds in all; sweeps stop there and say so.")] = 270,
    out: Annotated[Path | None, typer.Option("--json", help="Where to write the result.")] = None,
) -> None:
    """Measure step times and decoding speed with random weights of 68M and 7B shape."""
    start = perf_counter()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu" and not tiny:
            raise OptionError("no CUDA device; use --tiny, or --device cpu to run 7B on the CPU")
    context = context or (64 if tiny else 512)
    max_tokens = max_tokens or (24 if tiny else 128)
    repeat = repeat or (1 if tiny else 3)
    chosen = resolve_dtype(precision, device)
    bench = Bench(
        tiny_shapes() if tiny else full_shapes(),
        device=device,
        dtype=chosen,
        context=context,
        answer=max_tokens,
        seed=seed,
    )
    setup_seconds = perf_counter() - start
    stopped: list[str] = []

    def limit(what: str, items: Iterator[Any]) -> Iterator[Any]:
        return until(start + budget, what, stopped, items)

    steps = step_times(bench, 10 * repeat, limit)
    decoding = decode_speed(bench, repeat, limit)
    birth = provenance()
    result = {
        "provenance": birth,
        "device": device,
        "device_name": torch.cuda.get_device_name(device) if "cuda" in device else birth["machine"]["cpu"],
        "dtype": str(chosen).removeprefix("torch."),
        "tiny": tiny,
        "context": context,
        "max_tokens": max_tokens,
        "repeat": repeat,
        "seed": seed,
        "budget": budget,
        "setup_seconds": setup_seconds,
        "seconds": perf_counter() - start,
        "stopped_early": stopped,
        "steps": [timing.as_dict() for timing in steps],
        "decoding": decoding,
    }
    show(result)
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    try:
        typer.run(measure)
    except OmniDraftError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
