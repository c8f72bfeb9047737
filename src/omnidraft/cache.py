"""The folder that everything of ours is kept in.

    <cache_root>/locks/<slug>.lock            held while a model is fetched or removed
    <cache_root>/models/<slug>/parts/NNN      left by an interrupted download; the next one goes on from them
    <cache_root>/models/<slug>/model.gguf     the file as published; kept, for llama.cpp runs it as it is
    <cache_root>/models/<slug>/checkpoint/    config, safetensors, tokenizer, and omnidraft.json: where they
                                              came from, and the sha256 of each
    <cache_root>/lexicons/                    spelling tables of pairs of vocabularies

Everything is written under another name first and moved into place.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import platformdirs
from rich.progress import Progress

from omnidraft.catalog import is_known
from omnidraft.errors import CacheError, OmniDraftError

MANIFEST = "omnidraft.json"
_MANIFEST_KEYS = {"name", "source", "sha256", "size", "mtime_ns", "upstream", "licence"}
_HEADER_LIMIT = 100_000_000  # bytes of a safetensors header; the library's own bound


def cache_root() -> Path:
    """The one folder that everything of ours is kept in: OMNIDRAFT_HOME, or the platform's cache folder.

    Raises:
        CacheError: OMNIDRAFT_HOME is a file.
    """
    home = os.environ.get("OMNIDRAFT_HOME")
    if not home:
        return Path(platformdirs.user_cache_dir("omnidraft", appauthor=False))
    folder = Path(home).expanduser()
    if folder.is_file():
        raise CacheError(f"OMNIDRAFT_HOME is {folder}, which is a file; set it to a folder")
    return folder


def slug(name: str) -> str:
    """A folder name for `name`: legible, and different for different names."""
    if is_known(name):
        return name
    legible = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(name).stem)[:200]  # a file system's names end at 255
    return f"{legible}-{hashlib.sha256(os.fsencode(name)).hexdigest()[:10]}"


def home_of(name: str) -> Path:
    return cache_root() / "models" / slug(name)


def bytes_in(folder: Path) -> int:
    total = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(FileNotFoundError):  # another process may be at work in there
                total += os.lstat(os.path.join(parent, file)).st_size
    return total


def read_manifest(checkpoint: Path) -> dict[str, Any] | None:
    """What omnidraft.json says of a checkpoint of ours; None where it is missing or damaged."""
    try:
        manifest: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.keys() >= _MANIFEST_KEYS else None


def model_in(home: Path) -> str:
    """Whose conversion `home` holds, in whatever form; its own name where nothing says."""
    for file in sorted(home.glob(f"*/{MANIFEST}")):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            return str(json.loads(file.read_text(encoding="utf-8"))["name"])
    return home.name


def is_ready(checkpoint: Path) -> bool:
    """Whether a checkpoint of ours is there with all its files, as far as that shows without reading them."""
    manifest = read_manifest(checkpoint)
    if manifest is None or fault_of(checkpoint) is not None:
        return False
    return all((checkpoint / file).is_file() for file in manifest.get("files", ()))


def damaged_files(home: Path) -> list[Path]:
    """The files of a model that are not as they were written; reads all of them."""
    manifest = read_manifest(home / "checkpoint")
    if manifest is None:
        return []
    recorded = {home / "checkpoint" / file: sha256 for file, sha256 in manifest.get("files", {}).items()}
    recorded[home / "model.gguf"] = manifest["sha256"]
    return [file for file, sha256 in recorded.items() if file.is_file() and sha256_of(file) != sha256]


# Any of them is a tokenizer, or what transformers makes one of.
_TOKENIZER_FILES = ("tokenizer.json", "tekken.json", "vocab.json", "vocab.txt", "*.model", "*.tiktoken")


def fault_of(folder: Path) -> str | None:
    """What keeps `folder` from being a whole checkpoint, or None. Reads the headers of the weights only."""
    try:
        return _missing_or_cut(folder) or _weights_fault(folder)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"


def _missing_or_cut(folder: Path) -> str | None:
    if not (folder / "config.json").is_file():
        return "has no config.json"
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        return "has no tokenizer.json, nor another tokenizer's files"
    for file in ("config.json", "tokenizer.json", "tekken.json"):
        if not (folder / file).is_file():
            continue
        with (folder / file).open("rb") as stream:  # parsing a tokenizer of 150k tokens would take a while
            begin = stream.read(16).lstrip()
            stream.seek(max(0, os.path.getsize(folder / file) - 16))
            if not (begin.startswith(b"{") and stream.read().rstrip().endswith(b"}")):
                return f"has a damaged {file}"
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError:
        return "has a damaged config.json"
    return None


def shards_of(folder: Path) -> list[str]:
    """The files that a checkpoint's weights are in, as transformers finds them: an index beside the one file is left
    from an earlier save.

    Raises:
        ValueError, LookupError, AttributeError, TypeError: the index is damaged.
    """
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file() or not index.is_file():
        return ["model.safetensors"]
    return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))


def _weights_fault(folder: Path) -> str | None:
    if (folder / "openvino_model.xml").is_file():
        return None if (folder / "openvino_model.bin").is_file() else "has no openvino_model.bin"
    try:
        for shard in shards_of(folder):
            if not (folder / shard).is_file():
                return f"has no {shard}"
            with (folder / shard).open("rb") as weights:
                header_size = int.from_bytes(weights.read(8), "little")
                if header_size > _HEADER_LIMIT:
                    return f"has an unreadable {shard}"
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
def writing(folder: Path) -> Iterator[None]:
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
def replacing(folder: Path) -> Iterator[Path]:
    """A new, empty folder that takes the place of `folder` once the block has filled it; deleted if it fails."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a process that was killed
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(unfinished, folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


@contextlib.contextmanager
def locked(slug: str, progress: Progress) -> Iterator[None]:
    """Hold the model's lock; a second process waits here, and then finds the work done."""
    locks = cache_root() / "locks"
    with writing(locks):
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


def require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CacheError(
            f"{folder} needs {needed / 1e9:.1f} GB free and has {free / 1e9:.1f} GB; "
            "make room, or set OMNIDRAFT_HOME to a folder on another disk"
        )


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
