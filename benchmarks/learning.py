"""What a drafter learns from a recorded stream, by loss, rate, rank and seed, without running the target.

    python benchmarks/learning.py record GSM8K.train --task gsm8k --split train --limit 400
    python benchmarks/learning.py record GSM8K.test --task gsm8k --split test --limit 100
    python benchmarks/learning.py run OUT.jsonl --train GSM8K.train --test GSM8K.test --losses pushforward,hybrid
    python benchmarks/learning.py table OUT.jsonl
    python benchmarks/learning.py pack results/learning.json OUT.jsonl

At temperature 0 the target's answers do not depend on the drafter, so training on a recording is training on the
stream, and decoding a recorded answer is decoding: tokens per step are the real ones. `run` writes a line for each
setting that is finished; the same command goes on with what is missing.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from omnidraft import load_model
from omnidraft.control import Fixed
from omnidraft.decode import decode
from omnidraft.drafting import Drafter
from omnidraft.engine import OmniDraft
from omnidraft.learn import record as recording
from omnidraft.learn.record import Recorded, RecordedSession
from omnidraft.learn.trainer import Trainer, Training
from omnidraft.provenance import provenance
from omnidraft.sampling import Sampler, Sampling
from omnidraft.spellings import Lexicon
from omnidraft.stats import Stats
from omnidraft.tasks import load_task
from omnidraft.translate import TextTranslator
from omnidraft.verify import Compare

app = typer.Typer(add_completion=False)


@app.command()
def record(
    out: Path,
    task: str = "gsm8k",
    split: str = "train",
    limit: int = 400,
    max_tokens: int = 64,
    target: str = "qwen2.5-coder-0.5b",
    drafter: str = "smollm2-135m",
    data: Path = Path("../shared/data"),
    batch: int = 16,
) -> None:
    """Record a target's answers at temperature 0; goes on where it stopped."""
    model = OmniDraft(
        load_model(target, engine="transformers", precision="float32"),
        load_model(drafter, engine="transformers", precision="mixed", drafts=True),
    )
    prompts = [model.prompt_tokens(p) for p in load_task(task, data, limit, split=split)]  # type: ignore[arg-type]
    about = dict(target=target, drafter=drafter, task=task, split=split, max_tokens=max_tokens)
    done: list[Recorded] = []
    if out.exists():
        done, before = recording.load(out)
        if {name: before.get(name) for name in about} != about:
            raise typer.BadParameter(f"{out} is another recording: {before}")
    while len(done) < len(prompts):
        done += recording.record(
            model.target,
            model.trie("prefill"),
            prompts[len(done) : len(done) + batch],
            max_tokens=max_tokens,
            batch=batch,
        )
        recording.save(out, done, about | {"provenance": provenance()})
        print(f"{len(done)} of {len(prompts)}", flush=True)


@app.command()
def run(
    out: Path,
    train: Annotated[str, typer.Option(help="Recordings, trained on one after the other.")],
    test: Annotated[Path, typer.Option(help="A recording that is never trained on.")],
    losses: str = "pushforward,hybrid",
    rates: str = "1e-4",
    ranks: str = "32",
    seeds: str = "0",
    batch: int = 8,
    k: int = 4,
    limit: Annotated[int, typer.Option(help="Training answers at most.")] = 10_000,
    every: Annotated[int, typer.Option(help="Updates between two looks at the test answers.")] = 10,
    decoded: Annotated[int, typer.Option(help="Test answers decoded before and after.")] = 100,
    adapters: Annotated[Path | None, typer.Option(help="Folder for the adapters.")] = None,
) -> None:
    """Train by every combination of the settings."""
    stream = [one for name in train.split(",") for one in recording.load(Path(name))[0]][:limit]
    held, about = recording.load(test)
    drafter: Any = load_model(about["drafter"], engine="transformers", precision="mixed", drafts=True)
    target: Any = load_model(about["target"], engine="transformers", precision="float32")
    lexicon = OmniDraft(target, drafter).lexicon
    traces = [one.trace for one in stream if one.trace]
    judges = [one.trace for one in held if one.trace]
    done = {json.dumps(json.loads(line)["setting"]) for line in _lines(out)}
    before = None
    for loss, rate, rank, seed in itertools.product(
        losses.split(","),
        map(float, rates.split(",")),
        map(int, ranks.split(",")),
        map(int, seeds.split(",")),
    ):
        training = Training(loss=loss, learning_rate=rate, rank=rank, seed=seed, batch=batch)
        setting = dict(
            train=train, test=str(test), answers=len(traces), loss=loss, rate=rate, rank=rank, seed=seed,
            batch=batch, k=k,
        )  # fmt: skip
        if json.dumps(setting) in done:
            continue
        trainer = Trainer(drafter.folder, lexicon, training)
        order = np.random.default_rng(seed).permutation(len(traces)) if seed else np.arange(len(traces))
        before = before or _decode(target, drafter, lexicon, held[:decoded], k)
        curve = [dict(answers=0, agreement=_agreement(trainer, judges), loss=None, seconds=0.0)]
        spent = 0.0
        for i, start in enumerate(range(0, len(order) - batch + 1, batch)):
            begin = perf_counter()
            update = trainer.update([traces[j] for j in order[start : start + batch]])
            spent += perf_counter() - begin
            if (i + 1) % every == 0 or start + 2 * batch > len(order):
                curve.append(
                    dict(
                        answers=start + batch,
                        agreement=_agreement(trainer, judges),
                        loss=update.loss,
                        seconds=spent,
                    )
                )
                print(loss, rate, rank, seed, curve[-1], flush=True)
        weights = trainer.weights()
        if adapters:
            adapters.mkdir(exist_ok=True)
            np.savez(adapters / f"{loss}-{rate}-{rank}-{seed}.npz", **weights)  # type: ignore[arg-type]
        after = _decode(target, drafter.adapted(weights), lexicon, held[:decoded], k)
        line = dict(setting=setting, curve=curve, before=before, after=after, provenance=provenance())
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _agreement(trainer: Trainer, traces: Sequence[Any]) -> float:
    return float(np.mean([trainer.look(trace).agreement for trace in traces]))


def _decode(
    target: Any, drafter: Any, lexicon: Lexicon, held: Sequence[Recorded], k: int
) -> list[dict[str, Any]]:
    """Each recorded answer decoded with a drafter: what it took."""
    session, draft_session = RecordedSession(target.vocab.width), drafter.session()
    results = []
    for one in held:
        session.begin(one.prompt, one.answer)
        writer = Drafter(draft_session, TextTranslator(lexicon.alignment), drafter.context_length)
        sampler = Sampler(Sampling(), one.prompt, target.vocab.size)
        stats = Stats()
        for step in decode(
            session, writer, one.prompt, sampler=sampler, rule=Compare(), control=Fixed(k),
            max_tokens=len(one.answer), ends=target.vocab.eos,
        ):  # fmt: skip
            stats.add(step)
        results.append(dict(tokens=stats.tokens, steps=stats.steps, acceptance=stats.acceptance_rate))
    return results


@app.command()
def pack(out: Path, files: list[Path]) -> None:
    """Make one JSON file of results, for keeping: files by their names, folders left out."""

    def names(value: Any) -> Any:
        return ",".join(Path(part).name for part in value.split(",")) if isinstance(value, str) else value

    lines = [json.loads(line) for file in files for line in _lines(file)]
    for line in lines:
        line["setting"] = {key: names(value) for key, value in line["setting"].items()}
        line["provenance"]["argv"] = [names(argument) for argument in line["provenance"]["argv"]]
    out.write_text("[\n" + ",\n".join(map(json.dumps, lines)) + "\n]\n")


@app.command()
def table(files: list[Path]) -> None:
    """Before and after, with paired bootstrap intervals of the gain in tokens per step; of `run`'s or packed files."""
    shown = Table(
        "stream", "loss", "rate", "rank", "seed", "answers", "agreement", "tokens/step", "gain", box=None
    )
    for file in files:
        packed = file.read_text().startswith("[\n")
        for line in json.loads(file.read_text()) if packed else map(json.loads, _lines(file)):
            s, curve = line["setting"], line["curve"]
            gain, low, high = gain_of(line["before"], line["after"])
            shown.add_row(
                Path(s["train"]).name, s["loss"], f"{s['rate']:g}", str(s["rank"]), str(s["seed"]), str(s["answers"]),
                f"{curve[0]['agreement']:.3f} to {curve[-1]['agreement']:.3f}",
                f"{_per_step(line['before']):.2f} to {_per_step(line['after']):.2f}",
                f"{gain - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%})",
            )  # fmt: skip
    Console().print(shown)


def gain_of(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Ratio of tokens per step, and its 95 % interval over prompts, paired."""
    steps = np.array([[b["steps"], a["steps"]] for b, a in zip(before, after, strict=True)], float)
    generator = np.random.default_rng(0)
    drawn = steps[generator.integers(0, len(steps), (2000, len(steps)))].sum(1)
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], [0.025, 0.975])
    whole = steps.sum(0)
    return float(whole[0] / whole[1]), float(low), float(high)


def _per_step(results: list[dict[str, Any]]) -> float:
    return sum(one["tokens"] for one in results) / sum(one["steps"] for one in results)


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


if __name__ == "__main__":
    app()
