"""The command about what passes cost: curve."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from omnidraft.catalog import DEFAULT_DRAFTER
from omnidraft.cli.common import check_writable, engines, load, out
from omnidraft.cli.options import (
    Device,
    DrafterEngine,
    DrafterName,
    DrafterPrecision,
    Engine,
    Precision,
    Settings,
)
from omnidraft.errors import OptionError


def curve(
    model: Annotated[
        str, typer.Option("--model", "-m", help="The target: a name, hub id, folder or GGUF file.")
    ],
    drafter: DrafterName = DEFAULT_DRAFTER,
    longest: Annotated[int, typer.Option(help="Most tokens of a pass.")] = 16,
    context: Annotated[int, typer.Option(help="Tokens that the cache holds before a pass.")] = 64,
    repeat: Annotated[int, typer.Option(help="Passes of each size; the median counts.")] = 9,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    to_svg: Annotated[Path | None, typer.Option("--svg", help="Draw the curve here.")] = None,
    engine: Engine = "auto",
    drafter_engine: DrafterEngine = "auto",
    precision: Precision = "auto",
    drafter_precision: DrafterPrecision = "auto",
    device: Device = "auto",
    settings: Settings = None,
) -> None:
    """Measure what checking m tokens costs, and say how much a drafter could gain.

    Where the curve is flat, several tokens are checked for the price of one. The table of gains is what speculation
    makes at best of these costs, if each draft token is accepted with the same probability.
    """
    from omnidraft import curve as costs
    from omnidraft.provenance import provenance

    for name, value, least in (("longest", longest, 1), ("context", context, 1), ("repeat", repeat, 1)):
        if value < least:
            raise OptionError(f"{name} is {value}; it must be {least} or more")
    for path in (as_json, to_svg):
        if path:
            check_writable(path)
    where = engines(engine, drafter_engine, precision, drafter_precision, device, settings)
    loaded = load(model, drafter, {}, **where)
    if loaded.drafter is None:
        raise OptionError("a curve needs a drafter; name one with --drafter")
    for its in (loaded.target, loaded.drafter):
        if context + longest > its.context_length:
            raise OptionError(
                f"context and longest come to {context + longest} tokens and {its.name} holds {its.context_length}; "
                "choose less"
            )
    sizes = range(1, longest + 1)
    target_curve = costs.measure(loaded.target, sizes, context=context, repeat=repeat)
    draft_curve = costs.measure(loaded.drafter, sizes, context=context, repeat=repeat)
    gains = [costs.best(target_curve, draft_curve[1], rate) for rate in costs.ACCEPTANCE_RATES]
    _print(target_curve, draft_curve, gains, loaded.engines)
    if as_json:
        record = {
            "provenance": provenance() | {"model": model, "drafter": drafter, "engines": loaded.engines},
            "context": context,
            "curve": target_curve,
            "drafter_curve": draft_curve,
            "best": [asdict(gain) for gain in gains],
        }
        as_json.write_text(json.dumps(record, indent=1) + "\n")
    if to_svg:
        used = zip((model, drafter), loaded.engines.values(), strict=True)
        labels = [f"{name}, {its['name']} {its['precision']}" for name, its in used]
        to_svg.write_text(costs.svg(target_curve, draft_curve, labels), encoding="utf-8")


def _print(
    target_curve: dict[int, float], draft_curve: dict[int, float], gains: list[Any], used: dict[str, Any]
) -> None:
    from rich.table import Table

    for role, its in used.items():
        out.print(f"{role}: {its['name']}, {its['precision']}, {its['device']}", markup=False)
    table = Table("tokens of a pass", box=None)
    for title in ("target ms", "of one token's", "drafter ms"):
        table.add_column(title, justify="right")
    for m, ms in target_curve.items():
        table.add_row(str(m), f"{ms:.1f}", f"{ms / target_curve[1]:.2f}", f"{draft_curve[m]:.1f}")
    out.print(table)
    table = Table("accepted", box=None)
    for title in ("best k", "tokens/step", "speedup at best"):
        table.add_column(title, justify="right")
    for gain in gains:
        table.add_row(
            f"{gain.acceptance_rate:.0%}", str(gain.k), f"{gain.tokens_per_step:.2f}", f"{gain.speedup:.2f}x"
        )
    out.print(table)
