"""The command that shows the steps of an answer: explain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from omnidraft.catalog import DEFAULT_DRAFTER
from omnidraft.cli.common import check_writable, engines, load, out, read_prompt
from omnidraft.cli.options import (
    Device,
    DrafterEngine,
    DrafterName,
    DrafterPrecision,
    Engine,
    FixedK,
    MaxTokens,
    MethodName,
    Precision,
    Prompt,
    Raw,
    Seed,
    Settings,
    Splits,
    Target,
    Temperature,
    Verification,
)
from omnidraft.errors import OptionError


def explain(
    prompt: Prompt,
    target: Target,
    drafter: DrafterName = DEFAULT_DRAFTER,
    method: MethodName = "auto",
    verification: Verification = "auto",
    splits: Splits = None,
    k: FixedK = 4,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    max_tokens: MaxTokens = 32,
    only: Annotated[int | None, typer.Option("--step", help="This step only, counted from 1.")] = None,
    to_svg: Annotated[Path | None, typer.Option("--svg", help="Write the pictures here too.")] = None,
    raw: Raw = False,
    engine: Engine = "auto",
    drafter_engine: DrafterEngine = "auto",
    precision: Precision = "auto",
    drafter_precision: DrafterPrecision = "auto",
    device: Device = "auto",
    settings: Settings = None,
) -> None:
    """Show how an answer came about, step by step: what was drafted, proposed, accepted and corrected."""
    from omnidraft import picture

    prompt = read_prompt(prompt)
    if method == "plain":
        raise OptionError("plain decoding has no drafts to explain; choose another method")
    if only is not None and only < 1:
        raise OptionError(f"step is {only}; it must be 1 or more")
    if to_svg:
        check_writable(to_svg)
    options: dict[str, Any] = dict(
        method=method,
        verification=verification,
        splits=splits,
        k=k,
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens,
        raw=raw,
    )
    where = engines(engine, drafter_engine, precision, drafter_precision, device, settings)
    model = load(target, drafter, options, **where)
    shown = []
    steps = 0
    for drawn in picture.explain(model, prompt, **options):
        steps += 1
        if only in (None, steps):
            out.print(drawn.text())
            shown.append(drawn)
        if steps == only:
            break
    if not shown:
        raise OptionError(
            f"the answer has {steps} steps, and step {only} was asked for; choose a smaller one"
        )
    if to_svg:
        to_svg.write_text(picture.svg(shown), encoding="utf-8")
