"""The commands about models on disk: pull, models, models rm."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from omnidraft.cli.common import out

models_app = typer.Typer(no_args_is_help=False, invoke_without_command=True, rich_markup_mode=None)


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
