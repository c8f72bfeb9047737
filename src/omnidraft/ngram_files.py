"""Files of n-grams: checked, read, written, and exported for other programs."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

from omnidraft.errors import NGramFileError, is_count

FORMAT = "omnidraft n-grams"
VERSION = 1


def read_ngrams(path: Path) -> dict[str, Any]:
    """An n-gram file as it was saved; errors as in `Trie.load`."""
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NGramFileError(f"{path} does not exist; check the name") from error
    except (OSError, ValueError) as error:
        raise _not_whole(path) from error
    check(record, path)
    return record


def check(record: Any, source: str | Path) -> None:
    """Raise NGramFileError for what is not the record of a trie."""
    try:
        if record["format"] != FORMAT:
            raise KeyError("format")
        if record["version"] > VERSION:
            raise NGramFileError(
                f"{source} was written by a newer version of omnidraft; update this one, or choose another file"
            )
        for side in ("drafter", "target"):
            record[side]["name"], record[side]["fingerprint"]
        for entry in record["entries"]:
            if not all(is_count(n := entry[name]) and n >= 0 for name in ("token", "uses", "recency")):
                raise ValueError(entry)
            "".join([entry["text"], *entry["symbols"]])  # all of them texts
    except (ValueError, KeyError, TypeError) as error:
        raise _not_whole(source) from error


def _not_whole(source: str | Path) -> NGramFileError:
    return NGramFileError(f"{source} is not a whole n-gram file; choose another, or remove it if it was one")


def write_ngrams(record: dict[str, Any], path: Path) -> None:
    """Write a record to a file, replacing it in one step; errors as in `Trie.save`."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise NGramFileError(
            f"{path} cannot be written ({error.strerror or error}); choose another file"
        ) from error


def export_ngrams(record: dict[str, Any], path: Path) -> None:
    """Write a record's entries for other programs: CSV if `path` ends in .csv, else JSON lines.

    In CSV the symbols are one field, a JSON list.
    """
    names = ("token", "text", "symbols", "uses")
    rows = [{name: entry[name] for name in names} for entry in record["entries"]]
    # A lone surrogate, which only a file made by hand can hold, is escaped as JSON does.
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        if path.suffix.lower() == ".csv":
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            for row in rows:
                writer.writerow(row | {"symbols": json.dumps(row["symbols"], ensure_ascii=False)})
        else:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
