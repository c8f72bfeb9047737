"""The commands about models on disk: pull, models, models rm."""

from __future__ import annotations

from typing import Annotated

import typer

from omnidraft.cli.common import err, example, out
from omnidraft.errors import DamagedFileError

models_app = typer.Typer(
    no_args_is_help=False, invoke_without_command=True, add_completion=False, rich_markup_mode=None
)


def pull(name: Annotated[str, typer.Argument(help="A known name, hub id or GGUF file.")]) -> None:
    """Fetch a model now, which the first use does otherwise; check and mend one that is here."""
    from omnidraft import hub

    if any(info.name == name and info.on_disk for info in hub.list_models()):
        try:
            hub.verify(name)
        except DamagedFileError as error:
            err.print(str(error), markup=False)
    out.print(str(hub.pull(name)), markup=False)


@models_app.callback()
def models(
    context: typer.Context,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every file and compare it with its checksum.")
    ] = False,
) -> None:
    """List the models that are known or on disk."""
    if context.invoked_subcommand:
        return
    from rich.table import Table
    from rich.text import Text

    from omnidraft import hub

    table = Table("name", "on disk", "size", "licence", "from", box=None)
    if verify:
        table.add_column("whole")
    damaged: list[str] = []
    for info in hub.list_models():
        size = f"{info.size / 1e6:,.0f} MB" if info.size else ""
        row = [info.name, "yes" if info.on_disk else "no", size, info.licence, info.upstream]
        if verify and info.on_disk:
            try:
                row.append("yes" if hub.verify(info.name) else "no checksums")
            except DamagedFileError as error:
                row.append("no")
                damaged.append(str(error))
        table.add_row(*map(Text, row))
    out.print(table)
    out.print(f"cache folder: {hub.cache_root()}", markup=False)
    if damaged:
        raise DamagedFileError(" ".join(damaged))


@models_app.command(epilog=example("omnidraft models rm smollm2-135m"))
def rm(name: Annotated[str, typer.Argument(help="As `models` lists it.")]) -> None:
    """Remove a model from the disk."""
    from omnidraft import hub

    out.print(f"removed {name}, {hub.remove(name) / 1e6:,.0f} MB", markup=False)
