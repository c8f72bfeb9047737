from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

DATA = Path(__file__).parents[2] / "shared" / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run what needs every model or much time")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    for item in items:
        if "full" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="runs under `make test-full`"))


@pytest.fixture(scope="session")
def data() -> Path:
    if not DATA.is_dir():
        pytest.skip(f"the task data is missing: {DATA} does not exist")
    return DATA


@pytest.fixture(scope="session")
def drafter():
    from omnidraft import load_model

    return load_model("smollm2-135m", engine="transformers", precision="float32")


@pytest.fixture(scope="session")
def qwen():
    from omnidraft import load_model

    return load_model("qwen2.5-coder-0.5b", engine="transformers", precision="float32")


@pytest.fixture(scope="session")
def gemma():
    from omnidraft import load_model

    return load_model("gemma3-270m", engine="transformers", precision="float32")
