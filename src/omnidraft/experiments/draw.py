"""Pictures: one for light pages and one for dark, told apart by hue, lightness, dashes and marks alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from omnidraft.errors import MissingExtraError
from omnidraft.experiments.experiment import Experiment
from omnidraft.experiments.results import Results

# Okabe and Ito's, without the yellow that is lost on white or the black that is lost on black.
_COLOURS = {
    "light": ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#e69f00", "#56b4e9"),
    "dark": ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#ffffff", "#d55e00", "#f0e442"),
}
_INKS = {"light": "#24292f", "dark": "#d0d7de"}
_MARKS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))


def draw(experiment: Experiment, results: Results, path: Path) -> list[Path]:
    """Draw twice: NAME-light.svg and NAME-dark.svg beside `path`. Nothing where there is nothing to draw.

    Raises:
        MissingExtraError: matplotlib is not there.
    """
    try:
        from cycler import cycler
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "matplotlib", "plot") from error
    files = []
    for page, ink in _INKS.items():
        cycle = cycler(color=_COLOURS[page], marker=_MARKS, linestyle=_DASHES)
        inks = dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink
        )
        style = inks | {
            "axes.prop_cycle": cycle, "lines.markersize": 4, "svg.hashsalt": "omnidraft", "svg.fonttype": "none",
            "axes.facecolor": "none", "figure.facecolor": "none", "legend.facecolor": "none", "font.size": 9,
            "axes.spines.top": False, "axes.spines.right": False,
        }  # fmt: skip
        with rc_context(style):
            figure = Figure(figsize=(7, 3.8), layout="constrained")
            axes = figure.subplots()
            if not experiment.draw(results, axes):
                return []
            for line in axes.lines:  # a mark at every point would hide the line
                line.set_markevery(max(1, len(np.atleast_1d(line.get_xdata())) // 8))
            axes.set_title(experiment.title, fontsize=10)
            axes.grid(alpha=0.25)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=8, framealpha=0)
            file = path.with_name(f"{path.stem}-{page}.svg")
            file.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(file, metadata={"Date": None})
            files.append(file)
    return files
