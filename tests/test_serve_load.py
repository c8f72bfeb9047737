"""Many clients at once: the benchmark's load, on toy models. `benchmarks/serve_load.py` runs all of it."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("fastapi")

from serving import plain, served


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "serve_load.py"
    spec = importlib.util.spec_from_file_location("serve_load", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["serve_load"] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_nothing_is_lost_or_mixed_up(benchmark: ModuleType) -> None:
    asks = benchmark.plan(80, seed=0)
    for ask in asks:
        if ask.kind == "whole":
            ask.expected = plain(ask.prompt, **ask.options)
    with served(slots=4, queue=8) as up:
        load = benchmark.Load(int(up.url.rpartition(":")[2]), os.getpid(), asks)
        load.run(32)
        up.settled(lambda: up.server.worker._reserved == 0)
        assert len(up.server.targets.get("").slots) <= 4
    kinds = [ask.kind for ask in asks]
    assert not load.faults
    assert load.outcomes["answered"] == kinds.count("whole") > 50
    assert load.outcomes["left"] == kinds.count("leaves") > 2
    assert load.outcomes["refused"] == kinds.count("malformed") > 2
    assert load.outcomes["asked again"] > 0
