"""Experiments run whole, with tiny models; what they are made of says what it should."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")

from tiny_architectures import checkpoint

from omnidraft import cli
from omnidraft.cache import MANIFEST, sha256_of
from omnidraft.experiments import experiment as experiments
from omnidraft.experiments.experiment import all_cells
from omnidraft.experiments.lab import Lab
from omnidraft.experiments.render import page
from omnidraft.experiments.results import Results
from omnidraft.experiments.runner import foretold, run
from omnidraft.experiments.scales import LAPTOP, PAPER, SCALES, Scale

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "experiments"
NAMES = experiments.names(FOLDER)
WORDS = "the lake was in the evening by the water then a stone and the bird were there"
TASKS = {
    "gsm8k_train.jsonl": lambda i, text: {"question": text, "answer": f"#### {i}"},
    "gsm8k_test.jsonl": lambda i, text: {"question": text, "answer": f"#### {i}"},
    "mbpp.jsonl": lambda i, text: {
        "text": text, "code": f"def f():\n    return {i}", "task_id": 500 + i, "test_list": [f"assert f() == {i}"]
    },
    "humaneval.jsonl": lambda i, text: {
        "task_id": f"HumanEval/{i}", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "    return 1",
        "test": "def check(candidate):\n    assert candidate() == 1\n",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder in which the scale's models are tiny ones of the true families."""
    home = tmp_path_factory.mktemp("home")
    kinds = {
        "smollm2-135m": "llama", "qwen2.5-coder-0.5b": "qwen2", "qwen2.5-coder-1.5b": "qwen2", "gemma3-270m": "gemma3",
    }  # fmt: skip
    for order, (name, kind) in enumerate(kinds.items()):
        folder = home / "models" / name / "checkpoint"
        vocabulary = min(order, 1)  # both of Qwen's have the same
        checkpoint(folder, kind, merges=25 + 20 * vocabulary, order=vocabulary, seed=order)
        manifest = dict.fromkeys(("source", "sha256", "upstream", "licence"), "tiny")
        files = {file.name: sha256_of(file) for file in folder.iterdir()}
        (folder / MANIFEST).write_text(
            json.dumps(manifest | {"name": name, "size": 0, "mtime_ns": 0, "files": files})
        )
    return home


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for file, row in TASKS.items():
        rows = [row(i, " ".join(WORDS.split()[i % 7 : 5 + i % 11])) for i in range(20)]
        (folder / file).write_text("".join(json.dumps(one) + "\n" for one in rows))
    return folder


@pytest.fixture
def at_home(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["omnidraft", "experiment", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_runs_quickly_and_keeps_nothing(
    name: str, at_home: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = command(monkeypatch, name, "--quick", "--folder", FOLDER, "--data", tasks)
    said = capsys.readouterr()
    assert code == 0, said.err
    assert said.out.startswith("## ")
    assert "|" in said.out
    assert "nan" not in said.out
    assert not list(at_home.iterdir())


def test_finished_cells_are_kept_and_not_run_again(
    at_home: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = experiments.load(FOLDER, "figure9")
    scale = replace(LAPTOP.quick(), tasks=("gsm8k", "mbpp"), train={"gsm8k": 4, "mbpp": 4})
    cells = all_cells(found, scale, 1)
    assert len(cells) == 2
    path = at_home / "results" / "figure9.json"
    lab = Lab(scale, tasks)
    run(found, lab, cells[:1], Results(path))
    before = path.read_text()
    calls: list[Any] = []
    run(found, lab, cells, Results(path), on_cell=lambda cell, seconds: calls.append(cell))
    assert calls == cells[1:]
    results = Results(path)
    assert [cell["setting"] for cell in results.cells] == cells
    assert results.cells[0] == json.loads(before)["cells"][0]
    assert {"argv", "git", "machine"} <= results.provenances[results.cells[1]["provenance"]].keys()
    # Without --resume the command does not touch what is there.
    assert command(monkeypatch, "figure9", "--folder", FOLDER, "--data", tasks) == 2
    assert "has 2 finished cells; add --resume" in capsys.readouterr().err
    path.write_text(before[:-20])
    assert command(monkeypatch, "figure9", "--resume", "--folder", FOLDER, "--data", tasks) == 2
    assert "does not hold an experiment's results" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("table0", "--folder", FOLDER), "unknown experiment 'table0'; use one of"),
        (("list", "--folder", "nowhere"), "nowhere does not exist; experiments are files of the repository"),
        (("figure9", "--folder", FOLDER, "--scale", "desk"), "unknown scale 'desk'; use one of laptop, paper"),
        (("figure9", "--folder", FOLDER, "--seeds", "0"), "seeds is 0; it must be 1 or more"),
        (("figure9", "--folder", FOLDER, "--only", "size=3"), "--only size=3 is not KEY=VALUE with a key of"),
        (("figure9", "--folder", FOLDER, "--only", "task=none"), "no cell is left by --only task=none"),
        (("figure9", "--folder", FOLDER, "--dry-run", "--step-times", "1,2"), "step-times is '1,2'; give four"),
        (("figure9", "--folder", FOLDER, "--data", "nowhere"), "which does not exist; pass its folder with --data"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    words: tuple[object, ...],
    message: str,
    at_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(monkeypatch, *words) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert message in said[-1]
    assert said[-1].startswith("error: ")


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_tells_what_and_how_long(
    name: str,
    scale: Scale,
    at_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(monkeypatch, name, "--scale", scale.name, "--dry-run", "--folder", FOLDER) == 0
    told = capsys.readouterr().out
    found = experiments.load(FOLDER, name)
    cells = all_cells(found, scale, scale.seeds)
    assert told.count("\nrun ") == len(cells)
    assert f"scale {scale.name}: {len(cells)} cells" in told
    assert len({json.dumps(cell) for cell in cells}) == len(cells), "two cells of one setting"
    slower = replace(scale.times, draft=2 * scale.times.draft, target=2 * scale.times.target)
    slower = replace(slower, record=2 * scale.times.record, train=2 * scale.times.train)
    assert (
        foretold(found, cells, scale.times)
        <= foretold(found, cells, slower)
        <= 2 * foretold(found, cells, scale.times)
    )


def test_the_page_of_results_is_what_the_results_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert (ROOT / "docs" / "results.md").read_text() == page(Path("experiments"), Path("results")), (
        "run `omnidraft experiment render`"
    )


def test_paper_scale_names_every_task() -> None:
    assert set(PAPER.train) == set(PAPER.test) == set(PAPER.tasks)
