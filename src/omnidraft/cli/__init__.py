"""The command line.

What needs numpy, torch or transformers is imported inside the commands: help and usage errors come at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from omnidraft import __version__
from omnidraft.cli.answer import chat, generate
from omnidraft.cli.common import example, out
from omnidraft.cli.compare import bench, demo
from omnidraft.cli.models import models_app, pull
from omnidraft.cli.profiles import profile_app
from omnidraft.cli.steps import explain
from omnidraft.cli.vocabularies import align, ngrams_app
from omnidraft.errors import OmniDraftError

__all__ = ["app", "main"]

_INTERRUPTED = 130  # as a shell has it: 128 + SIGINT
_UsageError: Any = typer.BadParameter.__base__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_EXAMPLES: dict[Callable[..., None], str] = {  # in the order of --help
    pull: "omnidraft pull smollm2-135m",
    generate: 'omnidraft generate --target qwen2.5-coder-0.5b "What is 12 * 12?"',
    chat: 'omnidraft chat --target qwen2.5-coder-0.5b --system "Be brief."',
    bench: "omnidraft bench --target qwen2.5-coder-0.5b --task mbpp --data DIR --limit 3",
    demo: "omnidraft demo --target qwen2.5-coder-1.5b",
    align: "omnidraft align --drafter smollm2-135m --target qwen2.5-coder-0.5b",
    explain: 'omnidraft explain --target qwen2.5-coder-0.5b --method prefill "Write a haiku."',
}
for _command, _example in _EXAMPLES.items():
    app.command(epilog=example(_example))(_command)
app.add_typer(models_app, name="models")
app.add_typer(ngrams_app, name="ngrams")
app.add_typer(profile_app, name="profile")


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
        code = _INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    if code == _INTERRUPTED:  # typer turns a Ctrl-C inside a command into this code, and says nothing
        print("error: interrupted; what was finished is kept, so run it again to go on", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> NoReturn:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
