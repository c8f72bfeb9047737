from __future__ import annotations

from pathlib import Path

import pytest

from omnidraft.errors import OptionError
from omnidraft.tasks import TASKS, load_task


def test_every_task_gives_prompts(data: Path) -> None:
    for task in TASKS:
        prompts = load_task(task, data, 20)
        assert len(set(prompts)) == 20
        assert all(prompt.strip() and "{" not in prompt.split("\n")[0] for prompt in prompts), task


def test_mbpp_is_its_test_split(data: Path) -> None:
    assert len(load_task("mbpp", data, 10_000)) == 500


def test_a_file_of_prompts(tmp_path: Path) -> None:
    lines = tmp_path / "p.txt"
    lines.write_text("one\n\ntwo\n")
    assert load_task(str(lines), tmp_path, 5) == ["one", "two"]
    records = tmp_path / "p.jsonl"
    records.write_text('{"prompt": "a\\nb"}\n')
    assert load_task(str(records), tmp_path, 5) == ["a\nb"]
    records.write_text('{"text": "a"}\n')
    with pytest.raises(OptionError, match="'prompt' field"):
        load_task(str(records), tmp_path, 5)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--data"):
        load_task("gsm8k", tmp_path, 5)
    with pytest.raises(OptionError, match="gsm8k, mbpp"):
        load_task("nope", tmp_path, 5)
