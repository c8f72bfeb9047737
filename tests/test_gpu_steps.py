"""benchmarks/gpu_steps.py with tiny shapes: it runs, says what it did, and its acceptance is what was set."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from omnidraft.errors import OptionError


@pytest.fixture(scope="module")
def gpu_steps() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "gpu_steps.py"
    spec = importlib.util.spec_from_file_location("gpu_steps", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bench(gpu_steps: ModuleType) -> Any:
    return gpu_steps.Bench(
        gpu_steps.tiny_shapes(), device="cpu", dtype=torch.float32, context=520, answer=150, seed=0
    )


def test_result_has_every_row_and_its_provenance(gpu_steps: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    gpu_steps.measure(device="cpu", tiny=True, out=out)
    result = json.loads(out.read_text())
    assert {"argv", "git", "versions", "machine", "date"} <= result["provenance"].keys()
    assert result["seed"] == 0
    assert result["stopped_early"] == []
    assert [(row["model"], row["m"]) for row in result["steps"]] == [
        ("draft", 1),
        *(("target", m) for m in range(1, 17)),
    ]
    assert all(row["ms"] > 0 for row in result["steps"])
    plain, *others = result["decoding"]
    assert plain["method"] == "plain"
    assert plain["speedup"] == 1
    assert plain["tokens_per_step"] == 1
    assert [(row["k"], row["acceptance_set"]) for row in others] == [
        (k, a) for a in (0.0, 0.2, 0.4, 0.6, 0.8) for k in (4, 3)
    ]
    assert all(row["tokens_per_second"] > 0 for row in others)


def test_out_of_budget_is_said(
    gpu_steps: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    gpu_steps.measure(device="cpu", tiny=True, budget=0, out=out)
    result = json.loads(out.read_text())
    assert result["decoding"] == []
    assert len(result["stopped_early"]) == 2
    assert "stopped early" in capsys.readouterr().out


def test_no_gpu_is_an_error_that_names_the_way_out(
    gpu_steps: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match="--tiny"):
        gpu_steps.measure()


@pytest.mark.parametrize(("acceptance", "tokens_per_step"), [(0.0, 1), (1.0, 5)])
def test_sure_acceptance_is_exact(
    gpu_steps: ModuleType, bench: Any, acceptance: float, tokens_per_step: float
) -> None:
    stats = bench.answer(gpu_steps.Setting(4, acceptance), 0)
    assert stats.tokens == 150
    assert stats.tokens_per_step == tokens_per_step


def test_acceptance_gives_the_expected_tokens_per_step(gpu_steps: ModuleType, bench: Any) -> None:
    setting = gpu_steps.Setting(3, 0.6)
    stats = bench.answer(setting, 0)
    assert stats.tokens_per_step == pytest.approx(setting.expected_tokens_per_step, rel=0.15)


def test_passes_keep_the_context(bench: Any) -> None:
    for m in (1, 16, 2):
        assert bench.time_pass("target", m) > 0
        assert bench.target_session.tokens.tolist() == [*bench.prompt, *bench.behind[:m]]
