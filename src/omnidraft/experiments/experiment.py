"""What an experiment is, and how its file is found."""

from __future__ import annotations

import importlib.util
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from omnidraft.errors import OptionError
from omnidraft.experiments.scales import Scale, StepTimes

if TYPE_CHECKING:
    from omnidraft.experiments.lab import Lab
    from omnidraft.experiments.results import Results

Cell = dict[str, Any]  # one setting with one seed: JSON, and all that a result depends on
Measured = dict[str, Any]  # what came out: JSON
Verdict = Literal["confirmed", "refuted", "undecided"]
TOKENS_A_STEP = 2.5  # for foretelling only


@dataclass(frozen=True, slots=True)
class Stream:
    """A target's answers to a task's prompts, with what verification knows of them for this drafter."""

    target: str
    drafter: str
    task: str
    split: Literal["train", "test"]
    answers: int
    tokens: int  # of an answer at most
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence of the paper and what the results say of it.

    `judge` gives the verdict and the numbers behind it, or None while they are missing.
    """

    text: str
    judge: Callable[[Results], tuple[Verdict, str] | None]


class Experiment(ABC):
    """A table or a figure. A file in the folder of experiments defines one subclass; the file's name is its name."""

    title: str
    paper: str = ""  # what the paper found, in Markdown; empty for our own experiments
    differs: str = ""  # where ours cannot be the paper's, and why
    apart: Sequence[str] = ("drafter", "target")  # cells that differ in these are reported and judged apart

    @property
    def claims(self) -> Sequence[Claim]:
        """What the paper says, or we do, that the results can confirm or refute."""
        return ()

    @abstractmethod
    def cells(self, scale: Scale) -> Iterator[Cell]:
        """The settings of seed 0, cheapest to have first. A cell with `seed` is run for every seed."""

    @abstractmethod
    def run(self, lab: Lab, cell: Cell) -> Measured:
        """Measure one cell."""

    @abstractmethod
    def report(self, results: Results) -> str:
        """The results in Markdown, and a sentence where they differ from the paper's."""

    def draw(self, results: Results, axes: Any) -> bool:
        """Draw the results on axes of matplotlib; False when this experiment has no picture."""
        return False

    def streams(self, cell: Cell) -> Iterator[Stream]:
        """The recorded answers that a cell needs: of `task` (several by commas), as many as `train` and `test` say."""
        for task in cell.get("task", "").split(","):
            for split in ("train", "test"):
                if task and cell.get(split):
                    yield Stream(
                        cell["target"], cell["drafter"], task, cast(Any, split), cell[split], cell["tokens"],
                        cell.get("temperature", 0.0),
                    )  # fmt: skip

    def seconds(self, cell: Cell, times: StepTimes) -> float:
        """About how long a cell takes that learns from its streams and replays their tests; without its recordings."""
        answers = cell.get("train", 0) * len(cell.get("task", "").split(","))
        trained = answers if cell.get("loss") else 0
        decoded = cell.get("test", 0) + answers * cell.get("watch", 0) / cell.get("batch", 1)
        drafted = decoded * cell["tokens"] / TOKENS_A_STEP * cell.get("k", 0)
        return float(trained * times.train + drafted * times.draft) / 1000


def of_seed(cell: Cell, seed: int) -> Cell:
    """The cell for one more seed."""
    return cell | {"seed": seed}


def all_cells(experiment: Experiment, scale: Scale, seeds: int) -> list[Cell]:
    """Every cell, seed by seed; a cell without `seed` does not depend on one."""
    first = list(experiment.cells(scale))
    return first + [of_seed(cell, seed) for seed in range(1, seeds) for cell in first if "seed" in cell]


def names(folder: Path) -> list[str]:
    """The experiments of a folder.

    Raises:
        OptionError: there is no such folder.
    """
    if not folder.is_dir():
        raise OptionError(
            f"{folder} does not exist; experiments are files of the repository, so run this in a checkout, "
            "or name their folder with --folder"
        )
    return sorted((file.stem for file in folder.glob("*.py")), key=_numbered)


def load(folder: Path, name: str) -> Experiment:
    """The experiment of a file.

    Raises:
        OptionError: there is no such file, or none or several in it.
    """
    known = names(folder)
    if name not in known:
        raise OptionError(f"unknown experiment {name!r}; use one of {', '.join(known)}, list, render or data")
    spec = importlib.util.spec_from_file_location(f"experiments.{name}", folder / f"{name}.py")
    if spec is None or spec.loader is None:
        raise OptionError(f"{folder / name}.py is not a Python file; write an Experiment in it")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Experiment) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise OptionError(f"{folder / name}.py holds {len(found)} experiments; a file holds one")
    experiment: Experiment = found[0]()
    return experiment


def _numbered(name: str) -> tuple[int, int, str]:
    """Tables, then figures, each by number, then our own."""
    kind = name.rstrip("0123456789")
    number = int(name[len(kind) :] or 0)
    return {"table": 0, "figure": 1}.get(kind, 2), number, name
