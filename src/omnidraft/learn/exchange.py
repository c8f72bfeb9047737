"""A profile as one file, to take to another machine: a zip of a version's files and their manifest."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import replace as changed
from pathlib import Path

from omnidraft.errors import ProfileError
from omnidraft.learn.arrays import parse
from omnidraft.learn.manifest import MANIFEST, MANIFEST_LIMIT, Entry, Manifest, Unsound
from omnidraft.learn.profile import Profile, ProfileStore

SIZE_LIMIT = 4 << 30  # bytes of an imported profile, unpacked


def export_profile(profile: Profile, file: Path, *, with_text: bool = False) -> list[str]:
    """Write a profile to `file`, replacing it in one step; return the parts left out.

    What holds the user's text is left out unless `with_text`.

    Raises:
        ProfileError: the profile has no parts, or `file` cannot be written.
    """
    files = {name: entry for name, entry in profile.manifest.files.items() if with_text or not entry.text}
    if not files:
        raise ProfileError(f"profile {profile.key} has nothing to export; let it learn first")
    unfinished = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        with (
            open(os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out,
            zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        ):
            archive.writestr(MANIFEST, changed(profile.manifest, files=files).render())
            for name in files:
                with archive.open(name, "w", force_zip64=True) as entry:
                    entry.write(profile.content(name))
        unfinished.replace(file)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise ProfileError(
            f"cannot write {file} ({error.strerror or error}); choose another place"
        ) from error
    return [part for part in profile.parts if part not in {name.partition(".")[0] for name in files}]


def import_profile(
    store: ProfileStore,
    file: Path,
    *,
    name: str | None = None,
    drafter: str | None = None,
    target: str | None = None,
    replace: bool = False,
) -> Manifest:
    """Make an exported file a profile of `store`; return its manifest.

    The names are the file's unless given here; its fingerprints stay, and `ProfileStore.open` compares them.
    Nothing of the store changes unless the whole file is sound.

    Raises:
        ProfileError: it is no such file, damaged, made by hand, of a newer omnidraft or too large; or a profile
            of that name is there and `replace` is not set; or the store cannot be written.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            manifest = _read_manifest(archive)
            key = changed(
                manifest.key,
                name=name or manifest.key.name,
                drafter=drafter or manifest.key.drafter,
                target=target or manifest.key.target,
            )
            manifest = changed(manifest, key=key)
            parts = {part: _read_part(archive, part, entry) for part, entry in manifest.files.items()}
            store.adopt(manifest, parts, replace=replace)
    except Unsound as why:
        raise ProfileError(f"{file} {why}; choose another file, or export the profile again") from why
    except OSError as error:
        raise ProfileError(f"{file} cannot be read ({error.strerror or error}); check its name") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError) as error:
        raise ProfileError(
            f"{file} is not a whole exported profile; choose another file, or export the profile again"
        ) from error
    return manifest


def _read_manifest(archive: zipfile.ZipFile) -> Manifest:
    manifest = Manifest.parse(_read(archive, MANIFEST, MANIFEST_LIMIT))
    if sorted(archive.namelist()) != sorted([MANIFEST, *manifest.files]):
        raise Unsound("damaged", "holds other files than its manifest says")
    if manifest.size > SIZE_LIMIT:
        raise Unsound("foreign", f"would take {manifest.size / 1e9:.1f} GB, more than a profile may")
    return manifest


def _read(archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    """A file of the archive, unpacked no further than `limit` bytes, whatever the archive says."""
    try:
        info = archive.getinfo(name)
    except KeyError as error:
        raise Unsound("foreign", f"is not an exported profile: it has no {name}") from error
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.file_size > limit:
        raise Unsound("damaged", f"has a {name} that is not as its manifest says")
    with archive.open(info) as stream:
        return stream.read(limit)


def _read_part(archive: zipfile.ZipFile, file: str, entry: Entry) -> Iterator[bytes]:
    data = _read(archive, file, entry.size)
    if (len(data), hashlib.sha256(data).hexdigest()) != (entry.size, entry.sha256):
        raise Unsound("damaged", f"has a {file} that is not as its manifest says")
    try:
        if file.endswith(".json"):
            json.loads(data)
        else:
            parse(memoryview(data))
    except (ValueError, RecursionError) as error:
        raise Unsound("foreign", f"has a {file} that cannot be read ({error})") from error
    yield data
