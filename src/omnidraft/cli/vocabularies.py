"""The commands about how two vocabularies meet: align, and ngrams for the n-grams between them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from omnidraft.catalog import DEFAULT_DRAFTER
from omnidraft.cli.common import check_writable, example, out
from omnidraft.cli.options import DrafterName, Target
from omnidraft.errors import OptionError

if TYPE_CHECKING:
    from omnidraft.align import Report

ngrams_app = typer.Typer(
    no_args_is_help=False, add_completion=False, rich_markup_mode=None, help="Look into files of n-grams."
)

NGramFile = Annotated[Path, typer.Argument(help="A file written by --ngrams.")]


def align(
    target: Target,
    drafter: DrafterName = DEFAULT_DRAFTER,
    text: Annotated[
        Path | None, typer.Option(help="A text file to measure on; without one, a sample of our own.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say how well two vocabularies meet, from the tokenizers alone.

    The verdict: "good" if at least 95 % of the text's tokens cross on both sides and 80 % of the draft tokens
    directly; "poor" if less than 80 % cross; "fair" between.
    """
    from dataclasses import asdict

    from omnidraft import align as alignment
    from omnidraft import hub

    sample = alignment.read_text(text) if text else alignment.SAMPLE
    for name in (target, drafter):
        hub.check(name)
    report = alignment.report(
        alignment.load_vocab(drafter),
        alignment.load_vocab(target),
        drafter_name=drafter,
        target_name=target,
        text=sample,
    )
    if as_json:
        print(json.dumps(asdict(report), ensure_ascii=False))
    else:
        out.print(_report_table(report, str(text) if text else "our own sample"))
        out.print(report.verdict)


def _report_table(report: Report, text_name: str) -> Table:
    from omnidraft.align import share
    from omnidraft.picture import visible

    table = Table(box=None, show_header=False)
    text = report.text

    def add(name: str, value: str) -> None:
        table.add_row(Text(name), Text(visible(value)))

    def of(part: int, whole: int) -> str:
        return f"{part:,} ({share(part, whole):.1%})"

    add("drafter", f"{report.drafter}, {report.draft_vocabulary:,} tokens")
    add("  one target token each", of(report.shared, report.draft_vocabulary))
    add("  several target tokens", of(report.respelled, report.draft_vocabulary))
    add("  dropped: no spelling", of(report.dropped, report.draft_vocabulary))
    add("target", f"{report.target}, {report.target_vocabulary:,} tokens")
    add("same vocabulary", "yes" if report.same else "no")
    matched = [a if a == b else f"{a} = {b}" for a, b in report.specials.items()]
    more = f", and {len(matched) - 6} more" if len(matched) > 6 else ""
    add("special tokens matched", (", ".join(matched[:6]) + more) or "none")
    lost = f", {text.unspelled_bytes:,} of them not in the drafter's tokens" if text.unspelled_bytes else ""
    add("text", f"{text_name}, {text.bytes:,} bytes{lost}")
    add("  draft tokens", f"{text.draft_tokens:,}")
    add("    usable directly", of(text.direct, text.draft_tokens))
    add("    by splits", of(text.splits, text.draft_tokens))
    add("    not at all", of(text.unusable, text.draft_tokens))
    add("  target tokens", f"{text.target_tokens:,}")
    add("    base symbols", of(text.base, text.target_tokens))
    add("    n-grams", of(text.ngrams, text.target_tokens))
    add("    out of reach", of(text.unreachable, text.target_tokens))
    add("prefilled trie", f"{report.ngrams:,} n-grams, {report.trie_bytes / 1e6:.1f} MB")
    add("ready after", f"{report.seconds:.1f} s, {'built' if report.built else 'from the cache folder'}")
    return table


@ngrams_app.command("show", epilog=example("omnidraft ngrams show FILE --limit 10"))
def show_ngrams(
    file: NGramFile,
    limit: Annotated[int, typer.Option(help="Rows at most, the most used first.")] = 40,
) -> None:
    """Show the n-grams of a file."""
    from omnidraft.ngram_files import read_ngrams
    from omnidraft.picture import visible

    if limit < 1:
        raise OptionError(f"limit is {limit}; it must be 1 or more")
    record = read_ngrams(file)
    entries = sorted(record["entries"], key=lambda entry: -entry["uses"])
    uses = sum(entry["uses"] for entry in entries)
    names = (str(record["drafter"]["name"]), str(record["target"]["name"]))
    heading = f"{names[0]} drafting for {names[1]}: {len(entries):,} n-grams, {uses:,} accepted uses"
    out.print(visible(heading), style="bold", markup=False)
    table = Table("text", "pieces", box=None)
    table.add_column("uses", justify="right")
    table.add_column("token", justify="right")
    for entry in entries[:limit]:
        pieces = " ".join(_quoted(symbol) for symbol in entry["symbols"])
        table.add_row(Text(_quoted(entry["text"])), Text(pieces), str(entry["uses"]), str(entry["token"]))
    if entries:
        out.print(table)
    if len(entries) > limit:
        out.print(f"{len(entries) - limit:,} more; --limit shows them", style="dim")


def _quoted(text: str) -> str:
    from omnidraft.picture import visible

    return f"'{visible(text)}'"


@ngrams_app.command("export", epilog=example("omnidraft ngrams export FILE OUT.csv"))
def export(
    file: NGramFile,
    to: Annotated[Path, typer.Argument(metavar="OUT", help="CSV if it ends in .csv, else JSON lines.")],
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
) -> None:
    """Write the n-grams of a file as CSV or JSON lines."""
    from omnidraft.ngram_files import export_ngrams, read_ngrams

    record = read_ngrams(file)
    if to.exists() and to.samefile(file):
        raise OptionError(f"{to} is the n-gram file itself; choose another name")
    if to.exists() and not force:
        raise OptionError(f"{to} exists; add --force to replace it, or choose another name")
    check_writable(to)
    export_ngrams(record, to)
    out.print(f"{len(record['entries']):,} n-grams to {to}", markup=False)
