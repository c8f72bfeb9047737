"""The command line.

What needs numpy, torch or transformers is imported inside the commands, and a command's module when the command is
asked for: help and usage errors come at once.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command

from omnidraft import __version__
from omnidraft.cli.common import example
from omnidraft.errors import OmniDraftError

__all__ = ["app", "main"]

_NAME = "omnidraft"
_INTERRUPTED = 130  # as a shell has it: 128 + SIGINT
_UsageError: Any = typer.BadParameter.__base__

# In the order of --help: the module that has a command, or an app of several, and an example of a single one.
_COMMANDS = {
    "pull": ("models", "pull", "omnidraft pull smollm2-135m"),
    "generate": ("answer", "generate", 'omnidraft generate --target qwen2.5-coder-0.5b "What is 12 * 12?"'),
    "chat": ("answer", "chat", 'omnidraft chat --target qwen2.5-coder-0.5b --system "Be brief."'),
    "serve": ("server", "serve", "omnidraft serve --target qwen2.5-coder-0.5b --learn idle"),
    "bench": (
        "compare",
        "bench",
        "omnidraft bench --target qwen2.5-coder-0.5b --task mbpp --data DIR --limit 3",
    ),
    "demo": ("compare", "demo", "omnidraft demo --target qwen2.5-coder-1.5b"),
    "adapt": (
        "learning",
        "adapt",
        "omnidraft adapt --target qwen2.5-coder-0.5b --task mbpp --data DIR --limit 20 --held-out 5",
    ),
    "experiment": ("experiment", "experiment", "omnidraft experiment list"),
    "align": (
        "vocabularies",
        "align",
        "omnidraft align --target qwen2.5-coder-0.5b --drafter smollm2-135m",
    ),
    "explain": (
        "steps",
        "explain",
        'omnidraft explain --target qwen2.5-coder-0.5b --method prefill "Write a haiku."',
    ),
    "curve": (
        "costs",
        "curve",
        "omnidraft curve --model qwen2.5-coder-0.5b --longest 8 --json curve.json",
    ),
    "drafter": ("drafters", "drafter_app", ""),
    "models": ("models", "models_app", ""),
    "ngrams": ("vocabularies", "ngrams_app", ""),
    "profile": ("profiles", "profile_app", ""),
}


class _Commands(TyperGroup):
    """The commands, each made when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            return None
        module, name, epilog = _COMMANDS[cmd_name]
        found = getattr(import_module(f"omnidraft.cli.{module}"), name)
        if isinstance(found, typer.Typer):
            group = get_command(found)
            group.name = cmd_name
            return group
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(cmd_name, epilog=example(epilog))(found)
        return get_command(single)

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option:
            option.default = (
                False  # typer would load pydantic, which takes longer than all the rest, to read None
            )
        return option


app = typer.Typer(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
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
        code = app(sys.argv[1:] or ["--help"], prog_name=_NAME, standalone_mode=False)
    except OmniDraftError as error:
        _fail(str(error))
    except _UsageError as error:
        command = error.ctx.command_path if error.ctx else _NAME
        _fail(f"{error.format_message().rstrip('.')}; see `{command} --help`")
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        what = error.filename or "a file"
        _fail(f"{what} cannot be read or written ({error.strerror or error}); check its place and the disk")
    if code == _INTERRUPTED:  # typer turns a Ctrl-C inside a command into this code, and says nothing
        print("error: interrupted; what was finished is kept, so run it again to go on", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> NoReturn:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
