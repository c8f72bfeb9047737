"""The page of `benchmarks/peers.py`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from omnidraft.experiments.results import Results

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "peers.py"


def test_runs_of_other_drafters_and_profiles_have_their_own_sections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("peers", BENCHMARK)
    assert spec
    assert spec.loader
    peers = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "peers", peers)  # where its dataclasses look for their module
    spec.loader.exec_module(peers)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    results = Results(Path("peers.json"))
    runs = [("one", None, 10), ("two", None, 20), ("two", "mine", 40)]
    for drafter, profile, tokens in runs:
        setting = dict(target="t", drafter=drafter, max_tokens=64, threads=1, profile=profile)
        born = dict(versions={"torch": drafter}, machine={"cpu": "a cpu"})
        measured = dict(tokens=tokens, steps=10, seconds=1.0, first_seconds=0.1, peak_mb=1.0, answer="a")
        for name in ("transformers", "omnidraft on transformers"):
            results.add(setting | dict(contender=name, task="mbpp", prompt=0), measured, 1.0, born)
    peers.render(Path("peers.json"))
    _, *sections = Path("docs/benchmarks.md").read_text().split("\n## ")
    assert len(sections) == len(runs)
    pictures = set()
    for section, (drafter, profile, tokens) in zip(sections, runs, strict=True):
        assert f"Drafter {drafter}{', profile mine' if profile else ''}, up to 64 tokens" in section
        assert f"torch {drafter}" in section
        assert f"| transformers | float32 | {tokens}.0 |" in section
        pictures.add(section.partition('src="')[2].partition('"')[0])
    assert len(pictures) == len(runs)
    assert all((tmp_path / "docs" / picture).exists() for picture in pictures)
