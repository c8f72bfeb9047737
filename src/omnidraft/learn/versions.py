"""The versions of a profile in its folder: written whole or not at all, checked when read."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import mmap
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from omnidraft.learn.arrays import parse
from omnidraft.learn.manifest import (
    MANIFEST,
    MANIFEST_LIMIT,
    Entry,
    Manifest,
    ProfileKey,
    Unsound,
    check_file,
)

Source = Iterable[bytes | memoryview] | Path  # a file's content, or a file that has it already

_UNFINISHED = ".tmp"  # after a version's name: not a version yet, or no more
_VERSION_NAME = re.compile(r"v(\d{6,})(\..*)?")


class Profile:
    """One version of a profile, all of it checked, and unchanged by later saves. A new one has no parts.

    `version` counts saves, 0 for none; `problem` says what was found damaged or foreign when it was opened,
    and what became of it.
    """

    def __init__(
        self,
        key: ProfileKey,
        version: int = 0,
        manifest: Manifest | None = None,
        maps: Mapping[str, mmap.mmap] | None = None,
        problem: str | None = None,
    ) -> None:
        """`maps`: the files of `manifest`, mapped into memory."""
        self.key = key
        self.version = version
        self.problem = problem
        self.manifest = manifest or Manifest(key)
        self._maps = maps or {}

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts."""
        return tuple(check_file(file) for file in self.manifest.files)

    def __contains__(self, part: str) -> bool:
        return part in self.parts

    def arrays(self, part: str) -> dict[str, NDArray[Any]]:
        """The arrays of a part: read-only views of the file, so that nothing is read before it is used.

        Raises:
            KeyError: the profile has no such part, or it is a document.
        """
        return self._parsed(part)[0]

    def metadata(self, part: str) -> dict[str, str]:
        """The text that was saved with the arrays of a part; errors as for `arrays`."""
        return self._parsed(part)[1]

    def _parsed(self, part: str) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
        return parse(memoryview(self._maps[f"{part}.safetensors"]))

    def document(self, part: str) -> Any:
        """The content of a part.

        Raises:
            KeyError: the profile has no such part, or it is one of arrays.
        """
        return json.loads(self._maps[f"{part}.json"][:])

    def content(self, file: str) -> memoryview:
        """The bytes of a file of the manifest."""
        return memoryview(self._maps[file])


class Fault(Unsound):
    """What is wrong with a version, whose it is as far as that is known, and its files that are whole."""

    def __init__(
        self,
        version: Path,
        file: str,
        why: Unsound,
        key: ProfileKey,
        sound: Mapping[str, Entry] | None = None,
    ) -> None:
        super().__init__(why.reason, f"{version / file} {why}")
        self.version = version
        self.key = key
        self.sound = sound or {}


def versions_in(folder: Path) -> list[Path]:
    """The folders of versions, newest first."""
    found = {int(match[1]): path for path, match in _numbered(folder) if match[2] is None}
    return [found[number] for number in sorted(found, reverse=True)]


def remains(folder: Path) -> list[Path]:
    """What was set aside."""
    return [path for path, match in _numbered(folder) if match[2] not in (None, _UNFINISHED)]


def _numbered(folder: Path) -> list[tuple[Path, re.Match[str]]]:
    """All that was once a version, or would have become one."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return [(folder / name, match) for name in names if (match := _VERSION_NAME.fullmatch(name))]


def number_of(version: Path) -> int:
    return int(version.name[1:])


def read_manifest(key: ProfileKey, version: Path) -> Manifest:
    """The manifest of a version, which must be the key's."""
    try:
        with (version / MANIFEST).open("rb") as file:
            manifest = Manifest.parse(file.read(MANIFEST_LIMIT))
        if conflict := key.conflict(manifest.key):
            raise Unsound("foreign", f"is of profile {manifest.key}, and here {conflict}")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Fault(version, MANIFEST, Unsound("damaged", "is missing"), key) from error
    except Unsound as why:
        raise Fault(version, MANIFEST, why, key) from why
    return manifest


def read_version(key: ProfileKey, version: Path) -> Profile:
    """Map a version's files into memory, and check each."""
    manifest = read_manifest(key, version)
    maps: dict[str, mmap.mmap] = {}
    faults: dict[str, Unsound] = {}
    for file, entry in manifest.files.items():
        try:
            maps[file] = _map(version / file, entry)
        except Unsound as why:
            faults[file] = why
    for file, fault in faults.items():
        raise Fault(version, file, fault, manifest.key, {sound: manifest.files[sound] for sound in maps})
    return Profile(key, number_of(version), manifest, maps)


def _map(path: Path, entry: Entry) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            # Read, not looked at through the map: there a bad sector would end the process.
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if (os.fstat(file.fileno()).st_size, digest) != (entry.size, entry.sha256):
                raise Unsound("damaged", "is not as it was saved")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise Unsound("damaged", "is missing") from error
    except PermissionError:
        raise
    except OSError as error:
        raise Unsound("damaged", f"cannot be read ({error.strerror})") from error
    return mapped


def commit(folder: Path, manifest: Manifest, sources: Mapping[str, Source]) -> Path:
    """Write a new version: under another name, to the disk, then renamed."""
    latest = max((int(match[1]) for _, match in _numbered(folder)), default=0)
    version = folder / f"v{latest + 1:06}"
    unfinished = _unfinished(version)
    try:
        unfinished.mkdir(mode=0o700)
        for file, source in sources.items():
            if isinstance(source, Path):
                _link(source, unfinished / file)
            else:
                _write(unfinished / file, source)
        _write(unfinished / MANIFEST, [manifest.render()])
        _sync(unfinished)
        unfinished.rename(version)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    _sync(folder)
    return version


def _link(source: Path, path: Path) -> None:
    try:
        os.link(source, path)
    except OSError:  # not every file system has hard links
        with source.open("rb") as file:
            _write(path, iter(functools.partial(file.read, 1 << 20), b""))


def _write(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    with open(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600), "wb"
    ) as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Have the disk know the names in a folder."""
    if os.name == "nt":  # which opens no folders, and keeps their names in a journal
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_aside(folder: Path, faults: Iterable[Fault]) -> list[str]:
    """Rename versions that cannot be used; say so of each."""
    notes = []
    for fault in faults:
        aside = fault.version.with_name(f"{fault.version.name}.{fault.reason}")
        fault.version.rename(aside)
        notes.append(f"{fault}; it was renamed to {aside.name}")
    _sync(folder)
    return notes


def prune(folder: Path, kept: int, *, everything: bool = False) -> None:
    """Delete all but the newest versions, and what crashes left; what was set aside only with `everything`."""
    # Windows keeps what is mapped, and a later save deletes it; but who wants everything gone must know.
    with contextlib.nullcontext() if everything else contextlib.suppress(PermissionError):
        for version in versions_in(folder)[kept:]:
            version.rename(_unfinished(version))  # so that no reader finds half of it
        for path, match in _numbered(folder):
            if match[2] == _UNFINISHED or (everything and match[2]):
                shutil.rmtree(path)


def _unfinished(version: Path) -> Path:
    return version.with_name(version.name + _UNFINISHED)
