"""docs/results.md: what every experiment measured, beside the paper's numbers; and the pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from omnidraft.experiments import experiment as experiments
from omnidraft.experiments import markdown
from omnidraft.experiments.draw import draw
from omnidraft.experiments.experiment import Experiment, all_cells
from omnidraft.experiments.results import Results
from omnidraft.experiments.runner import foretold
from omnidraft.experiments.scales import LAPTOP
from omnidraft.experiments.units import duration

PAGE = Path("docs/results.md")
PICTURES = Path("docs/pictures")
_HEAD = """# Results

The OmniDraft paper's tables and figures at the scale of a laptop, and some of our own. This page is written by
`omnidraft experiment render` from `results/*.json`, which say what made them; [experiments](experiments.md) says how
to run and to add one. Intervals are 95 %, by bootstrap over prompts, unless said otherwise.
"""


def page(folder: Path, results: Path) -> str:
    """The whole page. `folder`: of the experiments; `results`: of what they measured."""
    known = [
        (name, experiments.load(folder, name), Results(results / f"{name}.json"))
        for name in experiments.names(folder)
    ]
    parts = [
        _HEAD,
        "## Claims\n",
        markdown.table(("claim", "verdict", "numbers", "models", "from"), _claims(known)),
        "",
    ]
    for name, found, own in known:
        parts += [f"## {found.title}\n", *_section(name, found, own)]
    return "\n".join(parts)


def write(folder: Path, results: Path) -> list[Path]:
    """Write the page and the pictures; returns the files."""
    files = [PAGE]
    for name in experiments.names(folder):
        own = Results(results / f"{name}.json")
        found = experiments.load(folder, name)
        if len(own):
            files += draw(found, _pictured(found, own)[1], PICTURES / f"{name}.svg")
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(folder, results), encoding="utf-8")
    return files


def _claims(known: list[tuple[str, Experiment, Results]]) -> list[tuple[str, ...]]:
    """The paper's first, then ours."""
    rows = []
    for name, found, own in known:
        parts = list(own.parts(*found.apart))
        for claim in found.claims:
            judged = [(claim.judge(part), ", ".join(map(str, models.values()))) for models, part in parts]
            verdicts: list[tuple[str, str, str]] = [(*one, models) for one, models in judged if one]
            link = f"[{name}](#{_anchor(found.title)})"
            rows += [(claim.text, *one, link) for one in verdicts or [("not run yet", "", "")]]
    return sorted(rows, key=lambda row: row[0].startswith("(ours)"))


def told(found: Experiment, own: Results) -> str:
    """The report of each part that is reported alone."""
    return "\n\n".join(
        f"**{_named(models)}**\n\n{found.report(part)}" for models, part in own.parts(*found.apart)
    )


def _named(models: dict[str, str]) -> str:
    said = ", ".join(f"{name} {model}" for name, model in models.items())
    return f"{said[:1].upper()}{said[1:]}"


def _pictured(found: Experiment, own: Results) -> tuple[dict[str, str], Results]:
    """The part that a picture is of: the one with the most cells of the scale, else the latest."""
    cells = all_cells(found, LAPTOP, LAPTOP.seeds)
    return max(
        enumerate(own.parts(*found.apart)), key=lambda one: (sum(cell in one[1][1] for cell in cells), one[0])
    )[1]


def _section(name: str, found: Experiment, own: Results) -> Iterator[str]:
    if found.paper:
        yield f"The paper: {found.paper}\n"
    cells = all_cells(found, LAPTOP, LAPTOP.seeds)
    missing = [cell for cell in cells if cell not in own]
    if len(own):
        yield f"{told(found, own)}\n"
        if found.differs:
            yield f"Beside the paper's: {found.differs}\n"
        light, dark = (PICTURES / f"{name}-{page}.svg" for page in ("light", "dark"))
        if light.exists():
            yield (
                f'<picture><source media="(prefers-color-scheme: dark)" srcset="pictures/{dark.name}">'
                f'<img alt="{found.title}" src="pictures/{light.name}"></picture>\n'
            )
            yield f"The picture: {_named(_pictured(found, own)[0])}.\n"
    if missing:
        begun = (
            f"{len(cells) - len(missing)} of {len(cells)} cells are finished; the rest"
            if len(own)
            else "Not run yet; it"
        )
        flag = " --resume" if len(own) else ""
        yield (
            f"{begun} takes about {duration(foretold([(found, cell) for cell in missing], LAPTOP.times))}: "
            f"`omnidraft experiment {name}{flag}`.\n"
        )


def _anchor(title: str) -> str:
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -")
    return kept.replace(" ", "-")
