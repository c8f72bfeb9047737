"""What several commands do: print, read a prompt, check, load, keep n-grams."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from omnidraft.errors import OptionError

if TYPE_CHECKING:
    from omnidraft.engine import OmniDraft

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def example(command: str) -> str:
    """A command's epilog in --help."""
    return f"\b\nExample:\n  {command}"  # after \b lines are kept as they are


def read_prompt(prompt: str) -> str:
    """The prompt of the command line; - stands for standard input."""
    from omnidraft.options import check_text

    try:
        prompt = sys.stdin.read() if prompt == "-" else prompt
    except UnicodeDecodeError as error:
        raise OptionError("standard input is not UTF-8 text; convert it first") from error
    if not prompt:
        raise OptionError("the prompt is empty; give some text")
    check_text(prompt)
    return prompt


def check_options(options: dict[str, Any]) -> None:
    """Refuse bad options before a model is loaded."""
    from omnidraft.options import make_options

    make_options(**options)


def check_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before the work that would fill it."""
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise OptionError(f"{path} cannot be written; create its folder or choose another")


def load(target: str, drafter: str, options: dict[str, Any], **loading: Any) -> OmniDraft:
    """Load a target, and the drafter if the method has one; bad options are refused before."""
    from omnidraft import loading as by_name

    check_options(options)
    alone = options.get("method") in ("plain", "lookup")
    return by_name.load(target, None if alone else drafter, **loading)


def engines(
    engine: str,
    drafter_engine: str,
    precision: str,
    drafter_precision: str,
    device: str,
    settings: list[str] | None,
) -> dict[str, Any]:
    """The options of `omnidraft.load` that say what runs the models."""
    own: dict[str, dict[str, str]] = {}
    for setting in settings or ():
        name, equals, value = setting.partition("=")
        of, dot, name = name.partition(".")
        if not (equals and dot):
            raise OptionError(f"setting {setting!r} is not of the form ENGINE.NAME=VALUE; write it so")
        own.setdefault(of, {})[name] = value
    return dict(
        engine=engine,
        drafter_engine=drafter_engine,
        precision=precision,
        drafter_precision=drafter_precision,
        device=device,
        settings=own,
    )


@contextmanager
def ngrams_kept(path: Path | None, options: dict[str, Any]) -> Iterator[Callable[[OmniDraft], None]]:
    """Begin with the n-grams of a file, if it exists, and write them back at the end, however it ends."""
    if path is None:
        yield lambda model: None
        return
    from omnidraft.ngram_files import read_ngrams
    from omnidraft.options import make_options

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
