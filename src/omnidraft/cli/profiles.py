"""The commands about what was learned: profile list, show, export, import, reset, rm."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from omnidraft.cli.common import check_writable, err, example, out
from omnidraft.errors import OptionError

if TYPE_CHECKING:
    from omnidraft.learn.profile import Profile, ProfileInfo

profile_app = typer.Typer(
    no_args_is_help=False,
    add_completion=False,
    rich_markup_mode=None,
    help="See, move and forget what was learned.",
)

Name = Annotated[str, typer.Argument(help="As `profile list` lists it.")]
OfDrafter = Annotated[str | None, typer.Option("--drafter", "-d", help="Of this drafter only.")]
OfTarget = Annotated[str | None, typer.Option("--target", "-t", help="Of this target only.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@profile_app.command("list", epilog=example("omnidraft profile list"))
def list_profiles(as_json: AsJson = False) -> None:
    """List the profiles: what was learned for which drafter and target."""
    from omnidraft.learn.profile import ProfileStore

    store = ProfileStore()
    infos = store.profiles()
    if as_json:
        print(json.dumps({"folder": str(store.root), "profiles": [_record(info) for info in infos]}))
        return
    table = Table(box=None)
    for title in ("name", "drafter", "target", "size", "saved", "set aside"):
        table.add_column(title, justify="right" if title == "size" else "left", overflow="fold")
    for info in infos:
        cells = (info.key.name, info.key.drafter, info.key.target, decimal(info.size), info.manifest.saved)
        table.add_row(*map(_text, cells), _text(", ".join(info.set_aside)))
    if infos:
        out.print(table)
    out.print(f"profiles folder: {store.root}", markup=False)


@profile_app.command(epilog=example("omnidraft profile show default"))
def show(name: Name, drafter: OfDrafter = None, target: OfTarget = None, as_json: AsJson = False) -> None:
    """Show a profile: its parts, what was counted, and how acceptance changed."""
    from omnidraft.learn.profile import ProfileStore

    info, profile = _open(ProfileStore(), name, drafter, target)
    statistics = profile.document("statistics") if "statistics" in profile else {}
    if as_json:
        record = _record(info) | {"statistics": statistics, "problem": profile.problem}
        print(json.dumps(record))
        return
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    key = info.key
    rows = {"name": key.name, "drafter": key.drafter, "target": key.target}
    rows |= {
        "folder": str(info.folder),
        "saved": f"{info.manifest.saved or 'never'} (version {profile.version})",
    }
    rows["on disk"] = decimal(info.size)
    for file, entry in profile.manifest.files.items():
        rows[f"  {file}"] = decimal(entry.size) + (", your text" if entry.text else "")
    for aside in info.set_aside:
        rows[f"  {aside}"] = "set aside"
    for field, value in (*rows.items(), *_flat(statistics)):
        table.add_row(_text(field), _text(value))
    out.print(table)


@profile_app.command("export", epilog=example("omnidraft profile export default OUT.zip"))
def export(
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The zip file to write.")],
    with_text: Annotated[
        bool, typer.Option("--with-text", help="Include the parts that hold your text.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
    drafter: OfDrafter = None,
    target: OfTarget = None,
) -> None:
    """Write a profile as one file, to take it to another machine."""
    from omnidraft.learn.exchange import export_profile
    from omnidraft.learn.profile import ProfileStore

    if file.exists() and not force:
        raise OptionError(f"{file} exists; add --force to replace it, or choose another name")
    check_writable(file)
    _, profile = _open(ProfileStore(), name, drafter, target)
    left_out = export_profile(profile, file, with_text=with_text)
    out.print(f"{profile.key} to {file}, {decimal(file.stat().st_size)}", markup=False)
    if left_out:
        out.print(
            f"left out, since it holds your text: {', '.join(left_out)}; --with-text includes it", style="dim"
        )


@profile_app.command("import", epilog=example("omnidraft profile import PROFILE.zip --name copy"))
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file written by `profile export`.")],
    name: Annotated[str | None, typer.Option(help="Import it under this name.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the profile of that name.")] = False,
    drafter: Annotated[
        str | None, typer.Option("--drafter", "-d", help="What the drafter is called here, if otherwise.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", "-t", help="What the target is called here, if otherwise.")
    ] = None,
) -> None:
    """Take in a profile that another machine exported."""
    from omnidraft.learn.exchange import import_profile
    from omnidraft.learn.profile import ProfileStore

    manifest = import_profile(
        ProfileStore(), file, name=name, drafter=drafter, target=target, replace=replace
    )
    out.print(_text(f"imported {manifest.key}, {decimal(manifest.size)}"))


@profile_app.command(epilog=example("omnidraft profile reset default --yes"))
def reset(name: Name, drafter: OfDrafter = None, target: OfTarget = None, yes: Yes = False) -> None:
    """Forget all that a profile learned, your text included."""
    from omnidraft.learn.profile import ProfileStore

    store = ProfileStore()
    info = store.find(name, drafter, target)
    _confirm(f"forget {decimal(info.size)} of profile {info.key}?", yes)
    store.reset(info.key)
    out.print(_text(f"reset {info.key}"))


@profile_app.command(epilog=example("omnidraft profile rm default --yes"))
def rm(name: Name, drafter: OfDrafter = None, target: OfTarget = None, yes: Yes = False) -> None:
    """Remove a profile from the disk."""
    from omnidraft.learn.profile import ProfileStore

    store = ProfileStore()
    info = store.find(name, drafter, target)
    _confirm(f"remove {decimal(info.size)} of profile {info.key}?", yes)
    store.remove(info.key)
    out.print(_text(f"removed {info.key}"))


def _open(store: Any, name: str, drafter: str | None, target: str | None) -> tuple[ProfileInfo, Profile]:
    """A profile, and how it lies on the disk; what was found wrong with it goes to stderr."""
    profile = store.open(store.find(name, drafter, target).key)
    if profile.problem:
        err.print(_text(profile.problem), style="yellow")
    return store.find(name, drafter, target), profile


def _confirm(question: str, yes: bool) -> None:
    if not yes and not typer.confirm(question, err=True):
        raise typer.Abort


def _record(info: ProfileInfo) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        **asdict(info.key),
        "version": info.version,
        "saved": info.manifest.saved,
        "size": info.size,
        "folder": str(info.folder),
        "files": {file: asdict(entry) for file, entry in info.manifest.files.items()},
        "set_aside": list(info.set_aside),
    }


def _flat(statistics: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The fields of a document, whatever they are: those of objects within it by their path."""
    if not isinstance(statistics, dict):
        yield prefix, json.dumps(statistics, ensure_ascii=False)
        return
    for field, value in statistics.items():
        path = f"{prefix}.{field}" if prefix else field
        if isinstance(value, dict):
            yield from _flat(value, path)
        else:
            yield path, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _text(value: str) -> Text:
    from omnidraft.picture import visible

    return Text(visible(value))
