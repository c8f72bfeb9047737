"""The command that makes a drafter: drafter build."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from omnidraft.cli.common import example, out
from omnidraft.cli.options import Device
from omnidraft.errors import MissingExtraError, OptionError

drafter_app = typer.Typer(no_args_is_help=False, add_completion=False, rich_markup_mode=None)


@drafter_app.callback()
def drafter() -> None:
    """Make a drafter of your own."""


@drafter_app.command(
    epilog=example("omnidraft drafter build --from PARENT --layers 2 --steps 20 --text TEXT --out OUT")
)
def build(
    out_folder: Annotated[Path, typer.Option("--out", help="The drafter's folder, new or empty.")],
    text: Annotated[
        list[Path], typer.Option(help="Training text: a file or folder; may be repeated (docs/drafters.md).")
    ],
    recipe: Annotated[
        Path | None, typer.Option(help="A TOML file with the options below; those given here come first.")
    ] = None,
    parent: Annotated[
        str | None, typer.Option("--from", help="The model whose layers it gets; smollm2-135m.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="How many layers, evenly spaced, or which: 0,1,2.")
    ] = None,
    trim: Annotated[int | None, typer.Option(help="Tokens kept of the vocabulary; all.")] = None,
    steps: Annotated[int | None, typer.Option(help="Train so many steps.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Train so long instead.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a sequence; 256.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences a step; 4.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Highest rate of AdamW; 1e-3.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps until it is reached; 30.")] = None,
    teacher: Annotated[
        float | None, typer.Option(help="Share of the text on which the parent's rows are learned too; 0.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the order of the text; 0.")] = None,
    judge: Annotated[
        list[Path] | None,
        typer.Option(
            help="A target's answers to measure acceptance on, not trained on; a fiftieth of the text."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what was begun there.")] = False,
    save_every: Annotated[float, typer.Option(help="Seconds of training between two saves.")] = 120.0,
    device: Device = "auto",
) -> None:
    """Make a small drafter from a larger model: some of its layers, trained on text."""
    from omnidraft.distil.recipe import Recipe, read_recipe

    given: dict[str, Any] = dict(
        parent=parent, layers=_layers(layers), trim=trim, steps=steps, minutes=minutes, length=length, batch=batch,
        learning_rate=learning_rate, warmup=warmup, teacher=teacher, seed=seed,
    )  # fmt: skip
    options = read_recipe(recipe) if recipe else {}
    if steps is not None or minutes is not None:
        options.pop("steps", None)
        options.pop("minutes", None)
    wanted = Recipe(**options | {name: value for name, value in given.items() if value is not None})
    try:
        from omnidraft.distil.train import Progress, build_drafter
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "hf") from error

    def show(progress: Progress) -> None:
        out.print(
            f"{progress.share:4.0%}  step {progress.step}, {progress.tokens:,} tokens, {progress.seconds:,.0f} s: "
            f"loss {progress.loss:.3f}; held out: acceptance {progress.acceptance:.3f}, "
            f"{progress.tokens_per_step:.2f} tokens/step",
            markup=False,
        )

    folder = build_drafter(
        wanted, text, out_folder, judge=judge or (), resume=resume, device=device, save_every=save_every,
        on_progress=show,
    )  # fmt: skip
    out.print(str(folder), markup=False)


def _layers(text: str | None) -> int | tuple[int, ...] | None:
    if text is None:
        return None
    try:
        numbers = tuple(int(number) for number in text.split(","))
    except ValueError as error:
        raise OptionError(
            f"layers is {text!r}; give a number of layers, or a list such as 0,9,19,29"
        ) from error
    return numbers if "," in text else numbers[0]
