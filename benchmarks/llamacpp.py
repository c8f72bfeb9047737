"""The llama.cpp engine: what a pass costs by its number of tokens, and plain decoding against llama-cpp-python's own.

python benchmarks/llamacpp.py passes --json results/llamacpp_passes.json
python benchmarks/llamacpp.py plain --json results/llamacpp_plain.json
python benchmarks/llamacpp.py long --json results/llamacpp_long.json
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter, process_time
from typing import Annotated, Any

import typer
from llama_cpp import Llama

from omnidraft import OmniDraft, hub
from omnidraft.backends.llamacpp import LlamaCppModel, Settings
from omnidraft.demo import PROMPTS
from omnidraft.errors import OmniDraftError
from omnidraft.provenance import provenance
from omnidraft.session import feed

app = typer.Typer(help=__doc__, add_completion=False)
Models = Annotated[str, typer.Option(help="Comma-separated.")]
Out = Annotated[Path | None, typer.Option("--json", help="Where to write the result.")]
LONGEST = 16


def load(name: str, **settings: Any) -> LlamaCppModel:
    return LlamaCppModel(hub.pull_gguf(name), name=name, settings=Settings(**settings))


def write(out: Path | None, **result: Any) -> None:
    if out:
        out.write_text(json.dumps({"provenance": provenance()} | result, indent=1) + "\n")


@app.command()
def passes(
    models: Models = "smollm2-135m,qwen2.5-coder-0.5b,qwen2.5-coder-1.5b",
    contexts: Annotated[str, typer.Option(help="Tokens before the pass, comma-separated.")] = "128,1024",
    flash_attn: Annotated[str, typer.Option(help="Comma-separated: auto, on, off.")] = "auto,off",
    repeat: int = 15,
    out: Out = None,
) -> None:
    """Median milliseconds of a pass over m = 1..16 tokens, a row of logits each; every m once before any twice."""
    rows = []
    for name in models.split(","):
        for attention in flash_attn.split(","):
            model = load(name, flash_attn=attention)
            session = model.session()
            draw = Random(0)
            for context in map(int, contexts.split(",")):
                tokens = [draw.randrange(1000, 20000) for _ in range(context + LONGEST)]
                costs: dict[int, list[tuple[float, float]]] = {m: [] for m in range(1, LONGEST + 1)}
                for turn in range(repeat + 1):
                    for m in draw.sample(range(1, LONGEST + 1), LONGEST):
                        feed(session, tokens[:context], 1)
                        start, cpu = perf_counter(), process_time()
                        session.extend(tokens[context : context + m], m)
                        if turn:  # the first warms up
                            costs[m].append((perf_counter() - start, process_time() - cpu))
                wall, cpu_ms = (
                    [round(1000 * median(cost[i] for cost in costs[m]), 2) for m in costs] for i in (0, 1)
                )
                rows.append(
                    {
                        "model": name,
                        "precision": model.engine.precision,
                        "flash_attn": attention,
                        "context": context,
                        "threads": model.settings.threads,
                        "ms": wall,
                        "cpu_ms": cpu_ms,
                    }
                )
                print(
                    name,
                    model.engine.precision,
                    f"flash_attn {attention}, context {context}, CPU ms:",
                    *cpu_ms,
                )
                write(out, repeat=repeat, rows=rows)


@app.command()
def plain(
    models: Models = "smollm2-135m,qwen2.5-coder-0.5b,qwen2.5-coder-1.5b",
    max_tokens: int = 48,
    repeat: int = 3,
    out: Out = None,
) -> None:
    """Greedy tokens per processor second by our session and by llama-cpp-python's `generate`, in turns."""
    rows = []
    for name in models.split(","):
        model = load(name)
        ours = OmniDraft(model, None)
        theirs = Llama(
            str(hub.pull_gguf(name)), n_ctx=4096, n_threads=model.settings.threads, verbose=False,
            n_threads_batch=model.settings.threads, n_batch=512, flash_attn=True,
        )  # fmt: skip

        def by_us(prompt: str, ours: OmniDraft = ours) -> tuple[list[int], float]:
            ours.reset()
            start = process_time()
            tokens = list(ours.generate(prompt, max_tokens=max_tokens).tokens)
            return tokens, len(tokens) / (process_time() - start)

        def by_them(prompt: str, theirs: Llama = theirs, ours: OmniDraft = ours) -> tuple[list[int], float]:
            theirs.reset()
            start = process_time()
            tokens: list[int] = []
            for token in theirs.generate(ours.prompt_tokens(prompt), temp=0, repeat_penalty=1):
                tokens.append(token)
                if token in ours.target.vocab.eos or len(tokens) == max_tokens:
                    break
            return tokens, len(tokens) / (process_time() - start)

        ratios, speeds, equal = [], [], 0
        by_us(PROMPTS[0])
        by_them(PROMPTS[0])
        for i in range(repeat):
            for j, prompt in enumerate(PROMPTS):
                if (i + j) % 2:
                    (own, fast), (other, slow) = by_us(prompt), by_them(prompt)
                else:
                    (other, slow), (own, fast) = by_them(prompt), by_us(prompt)
                ratios.append(fast / slow)
                speeds.append(fast)
                equal += own == other
        rows.append(
            {
                "model": name,
                "answers": len(ratios),
                "equal": equal,
                "median_tokens_per_cpu_second": median(speeds),
                "median_ratio": median(ratios),
                "quartiles": [sorted(ratios)[len(ratios) // 4], sorted(ratios)[3 * len(ratios) // 4]],
            }
        )
        print(rows[-1])
        write(out, max_tokens=max_tokens, repeat=repeat, rows=rows)


@app.command()
def long(model: str = "qwen2.5-coder-0.5b", tokens: int = 4000, out: Out = None) -> None:
    """A long prompt: seconds, and the process's largest resident memory before and after."""
    loaded = load(model)
    session = loaded.session()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    draw = Random(0)
    start = perf_counter()
    feed(session, [draw.randrange(1000, 20000) for _ in range(tokens)], 1)
    row = {
        "model": model,
        "tokens": tokens,
        "seconds": perf_counter() - start,
        "megabytes_before": before / 1024,
        "megabytes_after": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(row)
    write(out, rows=[row])


if __name__ == "__main__":
    try:
        app()
    except OmniDraftError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
