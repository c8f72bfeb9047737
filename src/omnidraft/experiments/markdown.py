"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from omnidraft.experiments import statistics
from omnidraft.experiments.results import Results
from omnidraft.experiments.steptimes import costs, speedup


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; what is None stays empty."""
    lines = [list(head), ["---"] * len(head), *([_text(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def decoding(
    results: Results,
    fields: Sequence[str],
    paper: Callable[[dict[str, Any]], str] | None = None,
    *,
    hits: bool = False,
    drafted: bool = False,
    **setting: Any,
) -> str:
    """A row for each combination of these fields: acceptance, tokens a step and speedup, beside the paper's words.

    `hits`, `drafted`: n-gram hits and drafted tokens a step too.
    """
    names = tuple(dict.fromkeys((*fields, "target", "drafter")))
    table8 = results.of("table8")
    more = ["ngram_hits"] * hits + ["drafted"] * drafted
    rows = []
    for values, runs in results.groups(*names, **setting):
        said = dict(zip(names, values, strict=True))
        its = costs(table8, said["target"], said["drafter"])
        faster = speedup(runs, its).text(unit="x") if its and "drafted" in runs[0] else None
        row = [said[name] for name in fields] + [
            len(runs), statistics.prompts(runs), statistics.acceptance(runs).text(".3f"),
            statistics.tokens_per_step(runs).text(), faster,
        ]  # fmt: skip
        row += [statistics.per_step(runs, name).text() for name in more]
        rows.append(row + [paper(said) for _ in [0] if paper])
    head = [*fields, "seeds", "prompts", "acceptance", "tokens a step", "speedup"]
    head += [f"{name.replace('_', ' ')} a step" for name in more]
    return table(head + ["the paper's"] * bool(paper), rows)


def _text(value: object) -> str:
    return "" if value is None else str(value).replace("|", "\\|")
