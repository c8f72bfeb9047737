"""What a profile says of itself: whose it is, and which files with which checksums make it up."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal
from urllib.parse import quote, unquote

from omnidraft import __version__
from omnidraft.errors import ProfileError

MANIFEST = "manifest.json"
MANIFEST_LIMIT = 1 << 20  # bytes; many times what any has

_FORMAT = "omnidraft profile"
_VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_FILE = re.compile(r"[a-z][a-z0-9_]{0,63}\.(safetensors|json)")
_FOLDER_LIMIT = 255  # bytes of a folder's name, on common file systems


def check_name(name: str) -> None:
    """Refuse what cannot be a profile's name; errors as in `ProfileKey`."""
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise ProfileError(
            f"{name!r} cannot be a profile's name; use letters, digits, - _ and . (not first), 64 at most"
        )


Reason = Literal["damaged", "foreign", "newer"]


class Unsound(Exception):
    """Why something on disk cannot be used; `reason` is one word of it."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class ProfileKey:
    """Whose profile it is. Fingerprints say what the names mean here; an empty one is not known, and fits any."""

    drafter: str
    target: str
    name: str = "default"
    drafter_fingerprint: str = ""  # of its vocabulary (`Vocab.fingerprint`)
    target_fingerprint: str = ""
    drafter_weights: str = ""  # `hub.weights_fingerprint`: what was learned is a change to these weights

    def __post_init__(self) -> None:
        """Refuse names that cannot be folders.

        Raises:
            ProfileError: the profile's name is not letters, digits, - _ and . (first no .), 64 at most; or a
                model's name is empty or too long.
        """
        check_name(self.name)
        for model in (self.drafter, self.target):
            if not model or len(folder_of(model)) > _FOLDER_LIMIT:
                raise ProfileError(
                    f"no profile can be kept for a model called {model!r}; name it by something shorter, "
                    "such as a link to its folder"
                    if model
                    else "a profile needs the names of drafter and target; give both"
                )

    def conflict(self, other: ProfileKey) -> str | None:
        """What keeps `other`'s profile from being this key's, or None. Folders may be renamed: models may not."""
        if self.drafter_weights and other.drafter_weights not in ("", self.drafter_weights):
            return "the drafter's weights are others"
        for side in ("drafter", "target"):
            ours, theirs = getattr(self, f"{side}_fingerprint"), getattr(other, f"{side}_fingerprint")
            if ours and theirs:
                if ours != theirs:
                    return f"the {side}'s vocabulary is another"
            elif getattr(self, side) != getattr(other, side):
                return f"the {side} is another"
        return None

    def completed(self, other: ProfileKey) -> ProfileKey:
        """This key, with `other`'s fingerprints where it has none."""
        return replace(
            self,
            drafter_fingerprint=self.drafter_fingerprint or other.drafter_fingerprint,
            target_fingerprint=self.target_fingerprint or other.target_fingerprint,
            drafter_weights=self.drafter_weights or other.drafter_weights,
        )

    def __str__(self) -> str:
        return f"{self.name} of drafter {self.drafter} and target {self.target}"


def folder_of(model: str) -> str:
    """A folder's name for a model's name: one component, never hidden, and reversible by `model_of`."""
    folder = quote(model, safe="", errors="surrogatepass")
    return f"%2E{folder[1:]}" if folder.startswith(".") else folder


def model_of(folder: str) -> str:
    """The model's name that `folder_of` made `folder` of."""
    return unquote(folder, errors="surrogatepass")


@dataclass(frozen=True)
class Entry:
    """One file of a profile."""

    size: int  # bytes
    sha256: str
    text: bool  # whether it holds the user's text


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json."""

    key: ProfileKey
    files: Mapping[str, Entry] = field(default_factory=dict)
    saved: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    omnidraft: str = __version__

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())

    def render(self) -> bytes:
        """The file: JSON that holds its own checksum, so that no byte of it can change unseen."""
        record = {
            "format": _FORMAT,
            "version": _VERSION,
            "saved": self.saved,
            "omnidraft": self.omnidraft,
            "key": asdict(self.key),
            "files": {file: asdict(entry) for file, entry in self.files.items()},
        }
        return _sealed(record)

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """Read what `render` wrote.

        Raises:
            Unsound: it is damaged, of another format, or of a newer version.
        """
        try:
            record = json.loads(data)
            seal = record.pop("sha256")
            if seal != hashlib.sha256(_rendered(record)).hexdigest() or data != _sealed(record):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Unsound("damaged", "is not a whole manifest of a profile") from error
        if record.get("format") != _FORMAT:
            raise Unsound("foreign", f"is of another format ({record.get('format')!r})")
        if record.get("version") != _VERSION:
            raise Unsound("newer", "was written by a newer version of omnidraft")
        try:
            key = ProfileKey(**record["key"])
            files = {file: Entry(**entry) for file, entry in record["files"].items()}
            manifest = cls(key, files, str(record["saved"]), str(record["omnidraft"]))
            stems = {check_file(file) for file in files}
            well_typed = all(
                type(entry.size) is int and entry.size >= 0 and type(entry.text) is bool
                for entry in files.values()
            ) and all(type(value) is str for value in asdict(key).values())
            if not well_typed or len(stems) < len(files):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError, ProfileError) as error:
            raise Unsound("foreign", "is not a manifest that omnidraft wrote") from error
        return manifest


def check_file(file: str) -> str:
    """The part that a file holds.

    Raises:
        ValueError: no part is kept in a file of this name.
    """
    if not _FILE.fullmatch(file) or file == MANIFEST:
        raise ValueError(f"{file!r} cannot be a part of a profile")
    return file.partition(".")[0]


def _sealed(record: dict[str, Any]) -> bytes:
    return _rendered(record | {"sha256": hashlib.sha256(_rendered(record)).hexdigest()})


def _rendered(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, indent=1, sort_keys=True) + "\n").encode()
