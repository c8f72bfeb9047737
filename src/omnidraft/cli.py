"""The command line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from omnidraft import __version__
from omnidraft.errors import OmniDraftError, OptionError

if TYPE_CHECKING:
    from omnidraft.align import Report
    from omnidraft.decode import Chunk
    from omnidraft.engine import OmniDraft, Stream
    from omnidraft.stats import Stats

# What needs numpy, torch or transformers is imported inside the commands: help and usage errors come at once.

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
models_app = typer.Typer(no_args_is_help=False, invoke_without_command=True, rich_markup_mode=None)
app.add_typer(models_app, name="models")
ngrams_app = typer.Typer(no_args_is_help=False, rich_markup_mode=None, help="Look into files of n-grams.")
app.add_typer(ngrams_app, name="ngrams")

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

_UsageError: Any = typer.BadParameter.__base__
_COLOURS = {"drafted": "green", "correction": "yellow", "free": "cyan"}

Target = Annotated[
    str,
    typer.Option("--target", "-t", help="A known name (see `models`), hub id, local folder or GGUF file."),
]
DrafterName = Annotated[str, typer.Option("--drafter", "-d", help="The drafter, named like a target.")]
K = Annotated[int, typer.Option("-k", help="Draft tokens a step.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.")]
TopK = Annotated[int, typer.Option(help="Keep this many of the likeliest tokens; 0 keeps all.")]
MinP = Annotated[float, typer.Option(help="Keep tokens at least this likely, relative to the likeliest.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Divide the logits of tokens seen before; 1 is off.")]
PresencePenalty = Annotated[float, typer.Option(help="Subtract from the logits of tokens in the answer.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the draws; the same seed gives the same answer.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens of an answer.")]
MethodName = Annotated[str, typer.Option(help="plain, direct, ngram, prefill, text or auto.")]
Verification = Annotated[
    str, typer.Option(help="compare, trie, auto (all exact), or paper (the paper's approximation).")
]
Splits = Annotated[
    bool | None, typer.Option("--splits/--no-splits", help="Take draft tokens apart that the target lacks.")
]
NGrams = Annotated[
    Path | None, typer.Option("--ngrams", help="With method ngram: carry the n-grams on in this file.")
]
NGramCapacity = Annotated[int | None, typer.Option(help="N-grams kept at most.")]
NGramEviction = Annotated[str, typer.Option(help="Which n-grams go first: lfu or lru.")]
Dtype = Annotated[
    str, typer.Option(help="auto, float32, bfloat16 or float16; under auto a drafter is mixed.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Engine = Annotated[str, typer.Option(help="auto or transformers.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        out.print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Any local language model, answering faster and never differently, through one small drafter."""


@app.command()
def pull(name: Annotated[str, typer.Argument(help="A known name, hub id or GGUF file.")]) -> None:
    """Fetch a model now; otherwise the first use does."""
    from omnidraft import hub

    out.print(str(hub.pull(name)))


@models_app.callback()
def models(context: typer.Context) -> None:
    """List the models that are known or on disk."""
    if context.invoked_subcommand:
        return
    from omnidraft import hub

    table = Table("name", "on disk", "size", "licence", "from", box=None)
    for info in hub.list_models():
        size = f"{info.size / 1e6:,.0f} MB" if info.size else ""
        table.add_row(info.name, "yes" if info.on_disk else "no", size, info.licence, info.upstream)
    out.print(table)
    out.print(f"cache folder: {hub.cache_root()}")


@models_app.command()
def rm(name: Annotated[str, typer.Argument(help="As `models` lists it.")]) -> None:
    """Remove a model from the disk."""
    from omnidraft import hub

    out.print(f"removed {name}, {hub.remove(name) / 1e6:,.0f} MB")


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    target: Target,
    drafter: DrafterName = "smollm2-135m",
    method: MethodName = "auto",
    verification: Verification = "auto",
    splits: Splits = None,
    k: K = 4,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    seed: Seed = 0,
    max_tokens: MaxTokens = 512,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the answer before this text; may be repeated.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Do not put the prompt through the chat template.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the text.")
    ] = False,
    json_schema: Annotated[
        Path | None, typer.Option(help="A file with a JSON schema: the answer is a document of it.")
    ] = None,
    ngrams: NGrams = None,
    ngram_capacity: NGramCapacity = None,
    ngram_eviction: NGramEviction = "lfu",
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Answer one prompt."""
    prompt = sys.stdin.read() if prompt == "-" else prompt
    if not prompt:
        raise OptionError("the prompt is empty; give some text")
    options: dict[str, Any] = dict(
        method=method,
        verification=verification,
        splits=splits,
        k=k,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        seed=seed,
        max_tokens=max_tokens,
        stop=stop or (),
        raw=raw,
        json_schema=_schema(json_schema),
    )
    limits = {"ngram_capacity": ngram_capacity, "ngram_eviction": ngram_eviction}
    with _ngrams_kept(ngrams, options) as ready:
        model = _load(target, drafter, dtype, device, options, **limits)
        ready(model)
        _answer(model, prompt, options, as_json)


def _schema(path: Path | None) -> Any:
    if path is None:
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"{path} cannot be read ({error.strerror}); check its name") from error
    except ValueError as error:
        raise OptionError(f"{path} is not JSON ({error}); give a file with a JSON schema") from error


def _answer(model: OmniDraft, prompt: str, options: dict[str, Any], as_json: bool) -> None:
    if as_json:
        answer = model.generate(prompt, **options)
        record = {
            "text": answer.text,
            "tokens": list(answer.tokens),
            "finish_reason": answer.finish_reason,
            "stats": answer.stats.as_dict(),
        }
        print(json.dumps(record, ensure_ascii=False))
        return
    stream = model.stream(prompt, **options)
    for text in stream:
        print(text, end="", flush=True)
    print()
    err.print(summary(stream.stats), style="dim")


@app.command()
def chat(
    target: Target,
    drafter: DrafterName = "smollm2-135m",
    method: MethodName = "auto",
    verification: Verification = "auto",
    splits: Splits = None,
    k: K = 4,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    max_tokens: MaxTokens = 1024,
    system: Annotated[str, typer.Option(help="A system message.")] = "",
    ngrams: NGrams = None,
    ngram_capacity: NGramCapacity = None,
    ngram_eviction: NGramEviction = "lfu",
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Talk with a model. /stats shows the counts, /reset forgets the conversation, Ctrl-C stops an answer."""
    options: dict[str, Any] = dict(
        method=method,
        verification=verification,
        splits=splits,
        k=k,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        max_tokens=max_tokens,
    )
    limits = {"ngram_capacity": ngram_capacity, "ngram_eviction": ngram_eviction}
    with _ngrams_kept(ngrams, options) as ready:
        model = _load(target, drafter, dtype, device, options, **limits)
        ready(model)
        _converse(model, system, options)


def _converse(model: OmniDraft, system: str, options: dict[str, Any]) -> None:
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    err.print("/stats, /reset, /quit; Ctrl-C stops an answer", style="dim")
    while (line := _ask()) is not None:
        command = line.strip()
        if command == "/quit":
            break
        if command == "/reset":
            messages = list(opening)
            err.print("forgotten", style="dim")
        elif command == "/stats":
            err.print(summary(model.stats), style="dim")
        elif command.startswith("/"):
            err.print(f"unknown command {command}; there are /stats, /reset and /quit", style="red")
        elif command:
            messages.append({"role": "user", "content": line})
            try:
                stream = model.stream(messages, **options)
            except OmniDraftError as error:  # too long a conversation, say: the program goes on
                messages.pop()
                err.print(f"error: {error}", style="red", markup=False)
                continue
            messages.append({"role": "assistant", "content": _show(stream)})
            err.print(summary(stream.stats), style="dim")


def _ask() -> str | None:
    """One line from the user, or None when there is no more."""
    while True:
        try:
            return input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            return None


def _show(stream: Stream) -> str:
    """Print an answer as it comes, until its end or a Ctrl-C; return what was shown."""
    shown = []
    try:
        for text in stream:
            print(text, end="", flush=True)
            shown.append(text)
    except KeyboardInterrupt:
        err.print(" [stopped]", style="dim", markup=False)
    print()
    return "".join(shown)


@app.command()
def bench(
    target: Target,
    task: Annotated[str, typer.Option(help="Tasks or files of prompts, separated by commas.")],
    drafter: DrafterName = "smollm2-135m",
    data: Annotated[Path, typer.Option(help="Folder of the task data.")] = Path("../shared/data"),
    limit: Annotated[int, typer.Option(help="Prompts per task.")] = 10,
    methods: Annotated[
        str,
        typer.Option(
            help="Methods, separated by commas, with verification and splits if wanted: plain,ngram,prefill:trie,"
            "direct:compare:splits. Speedup is against plain."
        ),
    ] = ("plain,direct,text"),
    k: K = 4,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    max_tokens: MaxTokens = 64,
    repeat: Annotated[int, typer.Option(help="Repeats of everything; speeds are medians.")] = 1,
    engine: Engine = "auto",
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Compare methods on the same prompts, interleaved in one run."""
    from omnidraft import bench as benchmark
    from omnidraft.provenance import provenance
    from omnidraft.tasks import load_task

    chosen = list(dict.fromkeys(methods.split(",")))
    options: dict[str, Any] = dict(
        k=k, temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens
    )
    prompts = {name: load_task(name, data, limit) for name in task.split(",")}
    if repeat < 1:
        raise OptionError(f"repeat is {repeat}; it must be 1 or more")
    if as_json and not os.access(as_json.absolute().parent, os.W_OK):
        raise OptionError(f"{as_json} cannot be written; create its folder or choose another")
    for method in chosen:
        _check(options | benchmark.method_options(method))
    model = _load(target, drafter, dtype, device, options, engine=engine)
    with _progress(len(chosen) * repeat * sum(map(len, prompts.values()))) as advance:
        runs = benchmark.run(
            model.target,
            model.drafter,
            prompts,
            chosen,
            repeat=repeat,
            on_run=lambda run: advance(),
            **options,
        )
    rows = benchmark.rows(runs, k=k, temperature=temperature, seed=seed)
    out.print(results_table(rows))
    if as_json:
        record = {
            "provenance": provenance()
            | {"target": target, "drafter": drafter, "dtype": _dtype(model), **options},
            "rows": rows,
            "answers": benchmark.answers(runs),
        }
        as_json.write_text(json.dumps(record, indent=1) + "\n")


@app.command()
def demo(
    target: Target = "qwen2.5-coder-0.5b",
    drafter: DrafterName = "smollm2-135m",
    k: K = 4,
    max_tokens: MaxTokens = 48,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Answer ten prompts, coloured by where each piece came from, and compare the methods."""
    from omnidraft import bench as benchmark
    from omnidraft.demo import PROMPTS

    options: dict[str, Any] = dict(k=k, max_tokens=max_tokens)
    model = _load(target, drafter, dtype, device, options)
    legend = "  ".join(f"[{colour}]{name}[/]" for name, colour in _COLOURS.items())
    out.print(f"[bold]{target}[/] with drafter [bold]{drafter}[/], {_dtype(model)}, k = {k}: {legend}")
    out.print("[dim]Each prompt is answered by every method in turn; what you see is `text`.[/]")
    shown: set[str] = set()

    def show(method: str, prompt: str, chunk: Chunk) -> None:
        if method != "text":
            return
        if prompt not in shown:
            shown.add(prompt)
            out.print(f"\n\n[bold]> {prompt.splitlines()[0]}[/]")
        for text, source in chunk.pieces:
            out.print(text, style=_COLOURS[source], end="", markup=False)

    methods = ["plain", "direct", "text"]
    runs = benchmark.run(model.target, model.drafter, {"demo": PROMPTS}, methods, on_chunk=show, **options)
    out.print("\n")
    out.print(results_table(benchmark.rows(runs, k=k, temperature=0.0, seed=None)))


@app.command()
def align(
    target: Target,
    drafter: DrafterName = "smollm2-135m",
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
    from rich.text import Text

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


@ngrams_app.command("show")
def show_ngrams(
    file: Annotated[Path, typer.Argument(help="A file written by --ngrams.")],
    limit: Annotated[int, typer.Option(help="Rows at most, the most used first.")] = 40,
) -> None:
    """Show the n-grams of a file."""
    from rich.text import Text

    from omnidraft.ngrams import read_ngrams
    from omnidraft.picture import visible

    if limit < 1:
        raise OptionError(f"limit is {limit}; it must be 1 or more")
    record = read_ngrams(file)
    entries = sorted(record["entries"], key=lambda entry: -int(entry["uses"]))
    uses = sum(int(entry["uses"]) for entry in entries)
    names = (str(record["drafter"]["name"]), str(record["target"]["name"]))
    heading = f"{names[0]} drafting for {names[1]}: {len(entries):,} n-grams, {uses:,} accepted uses"
    out.print(visible(heading), style="bold", markup=False)
    table = Table("text", "pieces", box=None)
    table.add_column("uses", justify="right")
    table.add_column("token", justify="right")
    for entry in entries[:limit]:
        pieces = " ".join(_quoted(symbol) for symbol in entry["symbols"])
        table.add_row(
            Text(_quoted(entry["text"])), Text(pieces), str(int(entry["uses"])), str(int(entry["token"]))
        )
    if entries:
        out.print(table)
    if len(entries) > limit:
        out.print(f"{len(entries) - limit:,} more; --limit shows them", style="dim")


def _quoted(text: str) -> str:
    from omnidraft.picture import visible

    return f"'{visible(text)}'"


@ngrams_app.command("export")
def export(
    file: Annotated[Path, typer.Argument(help="A file written by --ngrams.")],
    to: Annotated[Path, typer.Argument(metavar="OUT", help="CSV if it ends in .csv, else JSON lines.")],
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
) -> None:
    """Write the n-grams of a file as CSV or JSON lines."""
    from omnidraft.ngrams import export_ngrams, read_ngrams

    record = read_ngrams(file)
    if to.exists() and to.samefile(file):
        raise OptionError(f"{to} is the n-gram file itself; choose another name")
    if to.exists() and not force:
        raise OptionError(f"{to} exists; add --force to replace it, or choose another name")
    _check_writable(to)
    export_ngrams(record, to)
    out.print(f"{len(record['entries']):,} n-grams to {to}", markup=False)


@app.command()
def explain(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    target: Target,
    drafter: DrafterName = "smollm2-135m",
    method: MethodName = "auto",
    verification: Verification = "auto",
    splits: Splits = None,
    k: K = 4,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    max_tokens: MaxTokens = 32,
    only: Annotated[int | None, typer.Option("--step", help="This step only, counted from 1.")] = None,
    to_svg: Annotated[Path | None, typer.Option("--svg", help="Write the pictures here too.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Do not put the prompt through the chat template.")
    ] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Show how an answer came about, step by step: what was drafted, proposed, accepted and corrected."""
    from omnidraft import picture

    prompt = sys.stdin.read() if prompt == "-" else prompt
    if not prompt:
        raise OptionError("the prompt is empty; give some text")
    if method == "plain":
        raise OptionError("plain decoding has no drafts to explain; choose another method")
    if only is not None and only < 1:
        raise OptionError(f"step is {only}; it must be 1 or more")
    if to_svg:
        _check_writable(to_svg)
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
    model = _load(target, drafter, dtype, device, options)
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


def _check_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before the work that would fill it."""
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise OptionError(f"{path} cannot be written; create its folder or choose another")


def results_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows of a benchmark, for the terminal."""
    table = Table("task", "method", box=None)
    for name in ("acceptance", "tokens/step", "tokens/s", "speedup", "other ms/step", "same answers"):
        table.add_column(name, justify="right")

    def number(value: float | None, form: str = ".2f") -> str:
        return "" if value is None else format(value, form)

    for row in rows:
        same = "" if row["identical"] is None else f"{row['identical']}/{row['prompts']}"
        table.add_row(
            row["task"],
            row["method"],
            number(row["acceptance_rate"], ".3f"),
            number(row["tokens_per_step"]),
            number(row["tokens_per_second"]),
            number(row["speedup"]) + ("x" if row["speedup"] else ""),
            number(row["other_ms_per_step"]),
            same,
        )
    return table


def summary(stats: Stats) -> str:
    """One line about the Steps counted."""
    if not stats.steps:
        return "nothing yet"
    accepted = "" if stats.acceptance_rate is None else f", {stats.acceptance_rate:.0%} of proposals accepted"
    return (
        f"{stats.tokens} tokens, {stats.tokens_per_second:.1f} tokens/s, "
        f"{stats.tokens_per_step:.2f} tokens a step{accepted}"
    )


def _check(options: dict[str, Any]) -> None:
    """Refuse bad options before a model is loaded."""
    from omnidraft.engine import make_options

    make_options(**options)


def _load(
    target: str, drafter: str, dtype: str, device: str, options: dict[str, Any], **loading: Any
) -> OmniDraft:
    _check(options)
    from omnidraft.engine import load

    plain = options.get("method") == "plain"
    return load(target, None if plain else drafter, dtype=dtype, device=device, **loading)


@contextmanager
def _ngrams_kept(path: Path | None, options: dict[str, Any]) -> Iterator[Callable[[OmniDraft], None]]:
    """Begin with the n-grams of a file, if it exists, and write them back at the end, however it ends."""
    if path is None:
        yield lambda model: None
        return
    from omnidraft.engine import make_options
    from omnidraft.ngrams import read_ngrams

    strategy = make_options(**options).strategy
    if strategy.method != "ngram":
        raise OptionError("--ngrams is for method ngram; add --method ngram, or leave it out")
    if not os.access(path.absolute().parent, os.W_OK):
        raise OptionError(f"{path} cannot be written; create its folder or choose another")
    if path.exists():
        read_ngrams(path)  # refuse a damaged file before the models are loaded
    models: list[OmniDraft] = []

    def ready(model: OmniDraft) -> None:
        if path.exists():
            model.load_ngrams(path, splits=strategy.splits)
        models.append(model)

    try:
        yield ready
    finally:
        for model in models:
            model.save_ngrams(path, splits=strategy.splits)


def _dtype(model: OmniDraft) -> str:
    return str(getattr(model.target, "dtype", "")).removeprefix("torch.")


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    with Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    ) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)


def main() -> NoReturn:
    """Run the command line; every expected failure is one line on stderr and exit code 2."""
    # A thread that waits by spinning keeps the other from its core when the machine is shared: a pass over 5
    # tokens was 5 times slower beside one busy process. Read once, when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Progress bars of libraries would mix with ours.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        code = app(standalone_mode=False)
    except OmniDraftError as error:
        _fail(str(error))
    except _UsageError as error:
        _fail(f"{error.format_message().rstrip('.')}; see `omnidraft --help`")
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> NoReturn:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
