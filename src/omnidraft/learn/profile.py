"""Profiles on disk: what was learned for one drafter, one target and one name, saved so that no crash loses it.

    <root>/<drafter>/<target>/<name>/v000012/    the last save: manifest.json and one file a part
    <root>/<drafter>/<target>/<name>/v000011/    the one before it
    <root>/<drafter>/<target>/<name>/v000009.damaged    set aside; never read again
    <root>/<drafter>/<target>/.<name>.lock       held while a profile is written

A save writes a folder under another name and renames it: that is the moment it counts. The newest version
that is whole is the profile. A part that did not change is a hard link to the version before. Everything is
readable by its owner only, since replay buffers hold what the user wrote.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import filelock
from numpy.typing import NDArray

from omnidraft.errors import ProfileError
from omnidraft.hub import cache_root
from omnidraft.learn.arrays import serialise
from omnidraft.learn.manifest import Entry, Manifest, ProfileKey, check_file, folder_of, model_of
from omnidraft.learn.versions import (
    Fault,
    Profile,
    Source,
    commit,
    number_of,
    prune,
    read_manifest,
    read_version,
    remains,
    set_aside,
    versions_in,
)

__all__ = ["Arrays", "Document", "Profile", "ProfileInfo", "ProfileKey", "ProfileStore"]

_PATIENCE = 10.0  # seconds that a save waits for another process's save
_KEPT = 2  # versions: the last save and the one before it

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Arrays:
    """A part kept as safetensors; PEFT's adapter is one, called adapter_model."""

    arrays: Mapping[str, NDArray[Any]]  # bfloat16 as `learn.arrays.BFLOAT16`, or by ml_dtypes
    metadata: Mapping[str, str] = field(default_factory=dict)
    text: bool = False  # whether it holds the user's text: then it is exported only when asked for


@dataclass(frozen=True, eq=False)
class Document:
    """A part kept as JSON."""

    content: Any
    text: bool = False  # as for `Arrays`


Part = Arrays | Document


@dataclass(frozen=True)
class ProfileInfo:
    """A profile as `ProfileStore.profiles` finds it; its files are not read."""

    key: ProfileKey
    version: int  # 0: nothing saved, or nothing that can be used
    manifest: Manifest
    size: int  # bytes on disk, the version before and what was set aside included
    folder: Path
    set_aside: tuple[str, ...]  # names in `folder`


class ProfileStore:
    """All profiles below one folder. May be used from several threads; any number of profiles open at once."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or cache_root() / "profiles"
        self._writer = threading.RLock()
        self._locks: dict[Path, filelock.BaseFileLock] = {}

    def folder(self, key: ProfileKey) -> Path:
        """Where a profile is kept, there or not."""
        return self.root / folder_of(key.drafter) / folder_of(key.target) / key.name

    # Reading

    def open(self, key: ProfileKey) -> Profile:
        """The last good version of a profile; one without parts where there is none.

        What is damaged, of another pair, of another format or of a newer omnidraft is renamed, and the profile's
        `problem` says so; the version before it is opened instead. Where that shares the damaged file, the
        newest is opened without the damaged parts: a caller must expect any part to be missing.

        Raises:
            ProfileError: the folder cannot be read.
        """
        folder = self.folder(key)
        with _reading(folder):
            profile, faults = self._newest(key, folder)
            if not faults:
                return profile
        try:
            with self._writing(key):
                profile, faults = self._newest(key, folder)  # as it is now that nobody else writes
                ending = "the version before it is used" if profile.version else "learning starts anew"
                if not profile.version and (rest := next((fault for fault in faults if fault.sound), None)):
                    profile, ending = self._salvage(key, rest), "its other parts are used"
                notes = set_aside(folder, faults)
                if faults:
                    notes.append(ending)
        except ProfileError as error:
            notes = [*map(str, faults), f"it stays where it is: {error}"]
        profile.problem = "; ".join(notes) or None
        return profile

    def profiles(self) -> list[ProfileInfo]:
        """All profiles, by drafter, target and name.

        Raises:
            ProfileError: a folder cannot be read.
        """
        infos = []
        with _reading(self.root):
            for folder in sorted(self.root.glob("*/*/*")):
                with contextlib.suppress(ProfileError):  # no name of ours: not ours
                    key = ProfileKey(model_of(folder.parts[-3]), model_of(folder.parts[-2]), folder.name)
                    if folder.is_dir() and folder == self.folder(key):
                        infos.append(_info(key, folder))
        return infos

    def find(self, name: str, drafter: str | None = None, target: str | None = None) -> ProfileInfo:
        """The one profile of this name, drafter and target; None stands for any.

        Raises:
            ProfileError: there is none, or there are several.
        """
        every = self.profiles()
        found = [
            info
            for info in every
            if info.key.name == name
            and drafter in (None, info.key.drafter)
            and target in (None, info.key.target)
        ]
        if len(found) == 1:
            return found[0]
        if found:
            pairs = ", ".join(f"{info.key.drafter} with {info.key.target}" for info in found)
            raise ProfileError(
                f"{name} is the name of {len(found)} profiles ({pairs}); say which --drafter, --target"
            )
        close = difflib.get_close_matches(name, {info.key.name for info in every}, n=1, cutoff=0.6)
        guess = f"did you mean {close[0]}? " if close else ""
        raise ProfileError(f"no such profile: {name}; {guess}`omnidraft profile list` lists them")

    def _newest(self, key: ProfileKey, folder: Path) -> tuple[Profile, list[Fault]]:
        """The newest version that is whole, and what is wrong with each that is newer."""
        faults: list[Fault] = []
        for version in versions_in(folder):
            try:
                return read_version(key, version), faults
            except Fault as fault:
                if not version.exists():  # another process has saved twice in between, and removed it
                    return self._newest(key, folder)
                faults.append(fault)
        return Profile(key), faults

    def _salvage(self, key: ProfileKey, fault: Fault) -> Profile:
        """A new version of what is whole of a damaged one; the parts of different versions are never mixed."""
        key = key.completed(fault.key)
        sources = {file: fault.version / file for file in fault.sound}
        return read_version(key, commit(fault.version.parent, Manifest(key, fault.sound), sources))

    # Writing

    def save(self, key: ProfileKey, parts: Mapping[str, Part | None]) -> int:
        """Keep `parts`, and the other parts of the last version; None drops a part. Returns the version.

        Whatever happens, the next `open` finds this save whole or the one before. Arrays must not change
        meanwhile.

        Raises:
            ProfileError: another process holds the profile; the folder cannot be written; the disk is full; or
                a part is not what can be kept.
        """
        contents = {name: _content(name, part) for name, part in parts.items() if part is not None}
        with self._writing(key) as folder:
            before, last = self._before(key, folder)
            files: dict[str, Entry] = {}
            sources: dict[str, Source] = {}
            for file, entry in last.files.items():
                if check_file(file) not in parts:
                    files[file], sources[file] = entry, before / file
            for file, entry, pieces in contents.values():
                same = file in last.files and last.files[file].sha256 == entry.sha256
                files[file], sources[file] = entry, before / file if same else pieces
            version = commit(folder, Manifest(key.completed(last.key), files), sources)
            prune(folder, _KEPT)
        return number_of(version)

    @contextlib.contextmanager
    def claim(self, key: ProfileKey) -> Iterator[None]:
        """Be the only process that writes a profile, for as long as it learns.

        Raises:
            ProfileError: another process has claimed it, or is saving it; or the folder cannot be written.
        """
        with contextlib.ExitStack() as held:
            with self._refusals(key):
                held.enter_context(self._locked(key, patience=0))
            yield

    def reset(self, key: ProfileKey) -> None:
        """Forget all that was learned, what was set aside included; the profile stays, without parts.

        Raises:
            ProfileError: there is no such profile; or as for `save`.
        """
        self._require(key)
        with self._writing(key) as folder:
            _, last = self._before(key, folder)
            commit(folder, Manifest(key.completed(last.key)), {})
            prune(folder, 1, everything=True)

    def remove(self, key: ProfileKey) -> None:
        """Delete a profile from the disk. Errors as for `reset`."""
        self._require(key)
        with self._writing(key) as folder:
            folder.rename(_removed(folder))
            shutil.rmtree(_removed(folder))

    def adopt(self, manifest: Manifest, sources: Mapping[str, Source], *, replace: bool = False) -> None:
        """Make what comes from elsewhere a profile of its own; `learn.exchange` reads such files.

        Raises:
            ProfileError: there is one of that name and `replace` is not set; or as for `save`.
        """
        with self._writing(manifest.key) as folder:
            if versions_in(folder) and not replace:
                raise ProfileError(
                    f"there is a profile {manifest.key}; import under another --name, or with --replace"
                )
            commit(folder, manifest, sources)
            prune(folder, 1)

    def _require(self, key: ProfileKey) -> None:
        if not self.folder(key).is_dir():
            raise ProfileError(f"no such profile: {key}; `omnidraft profile list` lists them")

    def _before(self, key: ProfileKey, folder: Path) -> tuple[Path, Manifest]:
        """The version that a save goes on from, its missing files left out; what is unsound is set aside."""
        for version in versions_in(folder):
            try:
                manifest = read_manifest(key, version)
            except Fault as fault:
                for note in set_aside(folder, [fault]):
                    _log.warning(note)
                continue
            files = {
                file: entry for file, entry in manifest.files.items() if _is_there(version / file, entry)
            }
            for file in manifest.files.keys() - files.keys():
                _log.warning("%s is damaged, and not carried on", version / file)
            return version, replace(manifest, files=files)
        return folder, Manifest(key)

    @contextlib.contextmanager
    def _writing(self, key: ProfileKey) -> Iterator[Path]:
        """The profile's folder, for this thread of this process alone."""
        folder = self.folder(key)
        with self._refusals(key), self._writer, self._locked(key, _PATIENCE):
            shutil.rmtree(_removed(folder), ignore_errors=True)  # left by a crash
            folder.mkdir(mode=0o700, exist_ok=True)
            yield folder

    @contextlib.contextmanager
    def _refusals(self, key: ProfileKey) -> Iterator[None]:
        """Turn the file system's refusals into a ProfileError."""
        try:
            yield
        except OSError as error:
            raise ProfileError(
                f"cannot write profile {key} in {self.folder(key)} ({error.strerror or error}); what was saved "
                "before stays: make room there, or set OMNIDRAFT_HOME to a folder that you can write"
            ) from error

    @contextlib.contextmanager
    def _locked(self, key: ProfileKey, patience: float) -> Iterator[None]:
        folder = self.folder(key)
        path = folder.with_name(f".{folder.name}.lock")
        with self._writer:
            lock = self._locks.get(path)
            if lock is None:  # one object, so that a save within a claim does not wait for itself
                lock = self._locks[path] = filelock.FileLock(path, mode=0o600, thread_local=False)
            try:
                for parent in (self.root, folder.parents[1], folder.parents[0]):
                    parent.mkdir(mode=0o700, parents=parent == self.root, exist_ok=True)
                lock.acquire(timeout=patience)
            except filelock.Timeout as error:
                raise ProfileError(
                    f"profile {key} is in use by another process; wait until it is done, or choose another profile"
                ) from error
        try:
            yield
        finally:
            with self._writer:
                lock.release()


def _removed(folder: Path) -> Path:
    """What a profile is called while it is deleted."""
    return folder.with_name(f".{folder.name}.removed")


def _is_there(path: Path, entry: Entry) -> bool:
    return path.is_file() and path.stat().st_size == entry.size


def _content(name: str, part: Part) -> tuple[str, Entry, list[bytes | memoryview]]:
    """(file, entry, pieces) of a part."""
    file = f"{name}.{'json' if isinstance(part, Document) else 'safetensors'}"
    try:
        check_file(file)
        pieces: list[bytes | memoryview] = (
            [json.dumps(part.content, allow_nan=False).encode()]
            if isinstance(part, Document)
            else serialise(part.arrays, part.metadata)
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise ProfileError(f"part {name!r} cannot be kept in a profile ({error}); leave it out") from error
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    size = sum(len(piece) for piece in pieces)
    return file, Entry(size, digest.hexdigest(), part.text), pieces


def _info(key: ProfileKey, folder: Path) -> ProfileInfo:
    for version in versions_in(folder):
        try:
            manifest = read_manifest(key, version)
        except Fault:  # `open` will say so
            continue
        break
    else:
        version, manifest = None, Manifest(key, saved="")
    inodes = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # another process may be at work in there
                stat = os.lstat(os.path.join(parent, name))
                inodes[stat.st_dev, stat.st_ino] = stat.st_size
    return ProfileInfo(
        key=key.completed(manifest.key),
        version=number_of(version) if version else 0,
        manifest=manifest,
        size=sum(inodes.values()),
        folder=folder,
        set_aside=tuple(sorted(path.name for path in remains(folder))),
    )


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ProfileError(
            f"cannot read {folder} ({error.strerror or error}); make it yours, or set OMNIDRAFT_HOME to another folder"
        ) from error
