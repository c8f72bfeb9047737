"""What a drafter is made of, and how: the options of `omnidraft drafter build`, which a TOML file may hold."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omnidraft.errors import OptionError, is_count, is_number


@dataclass(frozen=True)
class Recipe:
    """`parent`: a model by name. `layers`: how many of its layers, evenly spaced, or which.

    `trim`: tokens kept of its vocabulary, None all (see `omnidraft.distil.trim`). Training takes `steps` steps or
    `minutes`, each step `batch` sequences of `length` tokens; the rate rises over `warmup` steps and falls to nothing
    along a cosine. `teacher`: the share of the sequences on which the parent's rows are learned too, recorded once.

    Raises:
        OptionError: a value outside its range, or neither or both of `steps` and `minutes`.
    """

    parent: str = "smollm2-135m"
    layers: int | tuple[int, ...] = 4
    trim: int | None = None
    steps: int | None = None
    minutes: float | None = None
    length: int = 256
    batch: int = 4
    learning_rate: float = 1e-3
    warmup: int = 30
    teacher: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise OptionError("how long to train is missing or said twice; give either steps or minutes")
        at_least = {"steps": 1, "length": 8, "batch": 1, "warmup": 0, "seed": 0}
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is not None and not (is_count(value) and value >= least):
                raise OptionError(f"{name} is {value!r}; it must be an integer, {least} or more")
        for name in ("minutes", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and value > 0):
                raise OptionError(f"{name} is {value!r}; it must be a number above 0")
        if not (is_number(self.teacher) and 0 <= self.teacher <= 1):
            raise OptionError(f"teacher is {self.teacher!r}; it is a share, from 0 to 1")
        if not (self.trim is None or is_count(self.trim)):
            raise OptionError(f"trim is {self.trim!r}; it must be a number of tokens")
        chosen = self.layers if isinstance(self.layers, tuple) else (self.layers,)
        if not chosen or not all(is_count(layer) and layer >= 0 for layer in chosen):
            raise OptionError(
                f"layers is {self.layers!r}; give a number of layers, or a list such as 0,9,19,29"
            )

    def chosen_layers(self, available: int) -> list[int]:
        """Which of the parent's layers are kept.

        Raises:
            OptionError: layers that the parent does not have.
        """
        if isinstance(self.layers, tuple):
            layers = list(self.layers)
            if sorted(set(layers)) != layers or layers[-1] >= available:
                raise OptionError(f"layers is {layers}; give rising numbers below {available}")
            return layers
        if not 1 <= self.layers <= available:
            raise OptionError(f"layers is {self.layers}; {self.parent} has {available}")
        last = max(self.layers - 1, 1)
        return [round(i * (available - 1) / last) for i in range(self.layers)]


def read_recipe(file: Path) -> dict[str, Any]:
    """The options in a TOML file, by the names of `Recipe`'s fields.

    Raises:
        OptionError: a file that is missing or not TOML, or an unknown name in it.
    """
    try:
        options = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise OptionError(f"{file} is not a recipe ({error}); name a TOML file") from error
    known = [field.name for field in fields(Recipe)]
    if unknown := sorted(options.keys() - set(known)):
        raise OptionError(f"{file} has the unknown option {unknown[0]!r}; options are {', '.join(known)}")
    if isinstance(options.get("layers"), list):
        options["layers"] = tuple(options["layers"])
    return options
