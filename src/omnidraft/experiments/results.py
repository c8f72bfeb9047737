"""Finished cells of an experiment, in one JSON file that is written anew after each."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omnidraft.errors import OptionError
from omnidraft.experiments.experiment import Cell, Measured

_SIZES = ("test", "prompts")  # fields of a setting that say on how many prompts it is measured


class Results:
    """What an experiment has measured so far.

    The file: `provenances`, and `cells` of `setting`, `measured`, `seconds` and `provenance`, which is an index.

    Raises:
        OptionError: a file that is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.provenances: list[dict[str, Any]] = []
        self.cells: list[dict[str, Any]] = []
        if path.exists():
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
                self.provenances, self.cells = record["provenances"], record["cells"]
            except (ValueError, KeyError, TypeError) as error:
                raise OptionError(
                    f"{path} does not hold an experiment's results ({error}); move it away"
                ) from error

    def __len__(self) -> int:
        return len(self.cells)

    def __contains__(self, cell: Cell) -> bool:
        return any(done["setting"] == cell for done in self.cells)

    def add(self, cell: Cell, measured: Measured, seconds: float, provenance: dict[str, Any]) -> None:
        """Keep a finished cell, on disk at once. The provenance of a run is kept once."""
        if not self.provenances or self.provenances[-1] != provenance:
            self.provenances.append(provenance)
        self.cells.append(
            dict(
                setting=cell,
                measured=json.loads(json.dumps(measured)),  # as it will be read back
                seconds=round(seconds, 1),
                provenance=len(self.provenances) - 1,
            )
        )
        self.save()

    def save(self) -> None:
        """Write the file, replacing it in one step."""
        lines = ",\n".join(json.dumps(cell) for cell in self.cells)
        text = f'{{"provenances": {json.dumps(self.provenances, indent=1)},\n"cells": [\n{lines}\n]}}\n'
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(text, encoding="utf-8")
        part.replace(self.path)

    def find(self, **setting: Any) -> list[Measured]:
        """What was measured in the cells of this setting: one a seed, if all else is said."""
        return [done["measured"] for done in self.cells if setting.items() <= done["setting"].items()]

    def of(self, name: str) -> Results:
        """Another experiment's results, of the same folder."""
        return Results(self.path.with_name(f"{name}.json"))

    def parts(self, *names: str) -> Iterator[tuple[dict[str, Any], Results]]:
        """For each combination of these fields, in the order of the cells: their values, and its cells alone.

        Of cells that differ in the number of their prompts only, and in the seed, those with the most are left.
        """
        most: dict[str, int] = {}
        for done in self.cells:
            most[_kind(done)] = max(_size(done), most.get(_kind(done), 0))
        found: dict[str, list[dict[str, Any]]] = {}
        for done in self.cells:
            if _size(done) == most[_kind(done)]:
                key = json.dumps([done["setting"].get(name) for name in names])
                found.setdefault(key, []).append(done)
        for key, cells in found.items():
            part = copy.copy(self)
            part.cells = cells
            yield dict(zip(names, json.loads(key), strict=True)), part

    def groups(self, *names: str, **setting: Any) -> Iterator[tuple[tuple[Any, ...], list[Measured]]]:
        """For each combination of these fields, in the order of the cells: their values, and what was measured."""
        found: dict[tuple[Any, ...], list[Measured]] = {}
        for done in self.cells:
            if setting.items() <= done["setting"].items():
                key = tuple(done["setting"].get(name) for name in names)
                found.setdefault(key, []).append(done["measured"])
        return iter(found.items())


def _kind(done: dict[str, Any]) -> str:
    setting = {name: value for name, value in done["setting"].items() if name not in (*_SIZES, "seed")}
    return json.dumps(setting, sort_keys=True)


def _size(done: dict[str, Any]) -> int:
    return next((int(done["setting"][name]) for name in _SIZES if done["setting"].get(name)), 0)
