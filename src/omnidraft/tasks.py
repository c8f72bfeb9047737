"""The tasks of the paper as user prompts: one template per task, for its test and its training split alike."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, Literal

from omnidraft.errors import OptionError

Row = dict[str, Any]
Split = Literal["test", "train"]
_ALPACA_TEST = 500  # rows


def _alpaca(row: Row) -> str:
    return f"{row['instruction']}\n\n{row['input']}" if row["input"] else str(row["instruction"])


def _all(row: Row) -> bool:
    return True


# task -> (file, which of its rows, by split; template)
_Part = tuple[str, Callable[[Row], bool]]
_TASKS: dict[str, tuple[dict[Split, _Part], Callable[[Row], str]]] = {
    "gsm8k": (
        {"test": ("gsm8k_test.jsonl", _all), "train": ("gsm8k_train.jsonl", _all)},
        lambda row: f"{row['question']}\nSolve this step by step and give the answer at the end.",
    ),
    "mbpp": (  # the paper's split; its validation part trains too
        {
            "test": ("mbpp.jsonl", lambda row: 11 <= row["task_id"] <= 510),
            "train": ("mbpp.jsonl", lambda row: row["task_id"] > 510),
        },
        lambda row: f"{row['text']}\nYour code should pass this test:\n{row['test_list'][0]}",
    ),
    "humaneval": (
        {"test": ("humaneval.jsonl", _all)},
        lambda row: f"Complete this Python function:\n```python\n{row['prompt']}```",
    ),
    "alpaca": (  # has no split of its own
        {
            "test": ("alpaca.jsonl", lambda row: row["row"] < _ALPACA_TEST),
            "train": ("alpaca.jsonl", lambda row: row["row"] >= _ALPACA_TEST),
        },
        _alpaca,
    ),
    "xsum": (
        {"test": ("xsum_test.jsonl", _all), "train": ("xsum_train.jsonl", _all)},
        lambda row: f"Summarize this article in one sentence.\n\n{row['document']}",
    ),
    "spec_bench": ({"test": ("spec_bench.jsonl", _all)}, lambda row: str(row["turns"][0])),
}
TASKS = tuple(_TASKS)


def load_task(name: str, data: Path, limit: int, *, split: Split = "test") -> list[str]:
    """The first `limit` prompts of a task's split; Spec-Bench's are taken from its categories in turn.

    `name` is one of TASKS, read from the folder `data`, or a file of the user's own: JSON lines, each with a
    `prompt` field, or plain text with a prompt a line.

    Raises:
        OptionError: an unknown task or one without such a split, or a file that is missing or not of this form.
    """
    if limit < 1:
        raise OptionError(f"limit is {limit}; it must be 1 or more")
    if name not in _TASKS:
        file = Path(name)
        if not file.is_file():
            raise OptionError(f"unknown task {name!r}; use one of {', '.join(TASKS)}, or a file of prompts")
        return _own_prompts(file)[:limit]
    try:
        return [prompt_of(name, row) for row in load_rows(name, data, limit, split=split)]
    except (LookupError, TypeError) as error:  # rows, but of something else
        raise OptionError(
            f"{data} holds no rows of task {name} ({error!r}); get the task's data again"
        ) from error


def prompt_of(name: str, row: Row) -> str:
    """The prompt of a row of a task."""
    return _TASKS[name][1](row)


def load_rows(name: str, data: Path, limit: int, *, split: Split = "test") -> list[Row]:
    """The rows behind the prompts of `load_task`, whole: with what an answer is checked by. Errors as there."""
    if name not in _TASKS:
        raise OptionError(f"unknown task {name!r}; use one of {', '.join(TASKS)}")
    parts, _ = _TASKS[name]
    if split not in parts:
        raise OptionError(f"task {name} has no {split} split; use its {' or '.join(parts)} split")
    filename, belongs = parts[split]
    rows = [row | {"row": i} for i, row in enumerate(_read(data / filename, name))]
    rows = [row for row in rows if belongs(row)]
    if not rows:
        raise OptionError(f"{data / filename} holds nothing of the {split} split; get the task's data again")
    if name == "spec_bench":
        rows = list(_in_turn(rows, key="category"))
    return list(islice(rows, limit))


def _read(file: Path, task: str) -> list[Row]:
    if not file.is_file():
        raise OptionError(f"task {task} needs {file}, which does not exist; pass its folder with --data")
    try:
        return [json.loads(line) for line in _lines(file)]
    except ValueError as error:
        raise OptionError(f"{file} is damaged ({error}); get the task's data again") from error


def _lines(file: Path) -> list[str]:
    try:
        # Not `splitlines`: JSON strings may hold a line separator, U+2028.
        return [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    except UnicodeDecodeError as error:
        raise OptionError(f"{file} is not UTF-8 text; convert it, or name another file") from error
    except OSError as error:
        raise OptionError(
            f"{file} cannot be read ({error.strerror or error}); change its permissions, or name another file"
        ) from error


def _own_prompts(file: Path) -> list[str]:
    lines = _lines(file)
    if not lines:
        raise OptionError(f"{file} holds no prompts; write one a line")
    if file.suffix != ".jsonl":
        return lines
    try:
        return [str(json.loads(line)["prompt"]) for line in lines]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise OptionError(
            f"{file} is not JSON lines with a 'prompt' field ({error}); mend the line"
        ) from error


def _in_turn(rows: list[Row], key: str) -> Iterator[Row]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return (row for row in chain.from_iterable(zip_longest(*groups.values())) if row is not None)
