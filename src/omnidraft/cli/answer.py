"""The commands that answer: generate and chat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnidraft.catalog import DEFAULT_DRAFTER
from omnidraft.cli.common import engines, err, load, ngrams_kept, read_prompt
from omnidraft.cli.options import (
    Device,
    DrafterEngine,
    DrafterName,
    DrafterPrecision,
    Engine,
    FrequencyPenalty,
    K,
    MaxTokens,
    MethodName,
    MinP,
    NGramCapacity,
    NGramEviction,
    NGrams,
    Precision,
    PresencePenalty,
    Prompt,
    Raw,
    RepetitionPenalty,
    Seed,
    Settings,
    Splits,
    Target,
    Temperature,
    TopK,
    TopP,
    Verification,
)
from omnidraft.errors import OmniDraftError, OptionError

if TYPE_CHECKING:
    from omnidraft.cli.remote import Counts, Remote
    from omnidraft.engine import OmniDraft
    from omnidraft.stats import Stats


def generate(
    prompt: Prompt,
    target: Target,
    drafter: DrafterName = DEFAULT_DRAFTER,
    method: MethodName = "auto",
    verification: Verification = "auto",
    splits: Splits = None,
    k: K = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    seed: Seed = 0,
    max_tokens: MaxTokens = 512,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the answer before this text; may be repeated.")
    ] = None,
    raw: Raw = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the text.")
    ] = False,
    json_schema: Annotated[
        Path | None, typer.Option(help="A file with a JSON schema: the answer is a document of it.")
    ] = None,
    ngrams: NGrams = None,
    ngram_capacity: NGramCapacity = None,
    ngram_eviction: NGramEviction = "lfu",
    engine: Engine = "auto",
    drafter_engine: DrafterEngine = "auto",
    precision: Precision = "auto",
    drafter_precision: DrafterPrecision = "auto",
    device: Device = "auto",
    settings: Settings = None,
) -> None:
    """Answer one prompt."""
    prompt = read_prompt(prompt)
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
        frequency_penalty=frequency_penalty,
        seed=seed,
        max_tokens=max_tokens,
        stop=stop or (),
        raw=raw,
        json_schema=_schema(json_schema),
    )
    limits = {"ngram_capacity": ngram_capacity, "ngram_eviction": ngram_eviction}
    where = engines(engine, drafter_engine, precision, drafter_precision, device, settings)
    with ngrams_kept(ngrams, options) as ready:
        model = load(target, drafter, options, **where, **limits)
        ready(model)
        _answer(model, prompt, options, as_json)


def _schema(path: Path | None) -> Any:
    if path is None:
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"{path} cannot be read ({error.strerror}); check its name") from error
    except ValueError as error:  # UnicodeDecodeError is one too
        raise OptionError(f"{path} is not JSON ({error}); give a file with a JSON schema") from error


def _answer(model: OmniDraft, prompt: str, options: dict[str, Any], as_json: bool) -> None:
    if as_json:
        answer = model.generate(prompt, **options)
        record = {
            "text": answer.text,
            "tokens": list(answer.tokens),
            "finish_reason": answer.finish_reason,
            "stats": answer.stats.as_dict() | {"engines": model.engines, "control": model.control},
        }
        print(json.dumps(record, ensure_ascii=False))
        return
    stream = model.stream(prompt, **options)
    for text in stream:
        print(text, end="", flush=True)
    print()
    err.print(_summary(stream.stats), style="dim")


def chat(
    ctx: typer.Context,
    target: Annotated[
        str | None,
        typer.Option("--target", "-t", help="As for generate; with --server one of its models."),
    ] = None,
    server: Annotated[
        str | None, typer.Option(help="Talk with a model of `omnidraft serve` at this address.")
    ] = None,
    api_key: Annotated[
        str, typer.Option(envvar="OMNIDRAFT_API_KEY", help="The server's.", show_default=False)
    ] = "",
    drafter: DrafterName = DEFAULT_DRAFTER,
    method: MethodName = "auto",
    verification: Verification = "auto",
    splits: Splits = None,
    k: K = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    max_tokens: MaxTokens = 1024,
    system: Annotated[str, typer.Option(help="A system message.")] = "",
    ngrams: NGrams = None,
    ngram_capacity: NGramCapacity = None,
    ngram_eviction: NGramEviction = "lfu",
    engine: Engine = "auto",
    drafter_engine: DrafterEngine = "auto",
    precision: Precision = "auto",
    drafter_precision: DrafterPrecision = "auto",
    device: Device = "auto",
    settings: Settings = None,
) -> None:
    """Talk with a model. /stats shows the counts, /reset forgets the conversation, Ctrl-C stops an answer."""
    drawing: dict[str, Any] = dict(temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens)
    if server is not None:
        _refuse_own_options(ctx)
        from omnidraft.cli.remote import Remote

        _converse(Remote(server, target, api_key), system, drawing)
        return
    if target is None:
        raise OptionError("there is nobody to talk with; name a --target, or a --server")
    options = drawing | dict(method=method, verification=verification, splits=splits, k=k)
    limits = {"ngram_capacity": ngram_capacity, "ngram_eviction": ngram_eviction}
    where = engines(engine, drafter_engine, precision, drafter_precision, device, settings)
    with ngrams_kept(ngrams, options) as ready:
        model = load(target, drafter, options, **where, **limits)
        ready(model)
        _converse(model, system, options)


_REMOTE = ("server", "target", "api_key", "system", "temperature", "top_p", "seed", "max_tokens")


def _refuse_own_options(ctx: typer.Context) -> None:
    """The server has its own models, engines and ways to draft."""
    for name in ctx.params:
        source = ctx.get_parameter_source(name)
        if name not in _REMOTE and source is not None and source.name == "COMMANDLINE":
            dashes = "-" if len(name) == 1 else "--"
            raise OptionError(f"{dashes}{name.replace('_', '-')} is the server's to choose; leave it out")


def _converse(model: OmniDraft | Remote, system: str, options: dict[str, Any]) -> None:
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
            err.print(_summary(model.stats), style="dim")
        elif command.startswith("/"):
            err.print(
                f"unknown command {command}; there are /stats, /reset and /quit", style="red", markup=False
            )
        elif command:
            messages.append({"role": "user", "content": line})
            try:
                stream = model.stream(messages, **options)
                shown = _show(stream)
            except OmniDraftError as error:  # too long a conversation, say: the program goes on
                messages.pop()
                err.print(f"error: {error}", style="red", markup=False)
                continue
            messages.append({"role": "assistant", "content": shown})
            err.print(_summary(stream.stats), style="dim")


def _ask() -> str | None:
    """One line from the user, or None when there is no more."""
    while True:
        try:
            return input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            return None


def _show(stream: Iterator[str]) -> str:
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


def _summary(stats: Stats | Counts) -> str:
    """One line about the Steps counted."""
    counts = stats.as_dict()
    if not counts["steps"]:
        return "nothing yet"
    rate = counts["acceptance_rate"]
    accepted = "" if rate is None else f", {rate:.0%} of proposals accepted"
    if counts.get("lookup_tokens"):  # an older server does not count them
        accepted += f", {counts['lookup_tokens']} tokens looked up"
    speed = counts["tokens_per_second"]
    return (
        f"{counts['tokens']} tokens, {f'{speed:.1f} tokens/s, ' if speed else ''}"
        f"{counts['tokens_per_step']:.2f} tokens a step{accepted}"
    )
