"""The tasks of the paper as user prompts: one template per task, test splits only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from omnidraft.errors import OptionError

Row = dict[str, Any]


def _alpaca(row: Row) -> str:
    return f"{row['instruction']}\n\n{row['input']}" if row["input"] else str(row["instruction"])


_MBPP_TEST = range(11, 511)  # task ids of the paper's test split

# task -> (file, which of its rows are the test split, template)
_TASKS: dict[str, tuple[str, Callable[[Row], bool], Callable[[Row], str]]] = {
    "gsm8k": (
        "gsm8k_test.jsonl",
        lambda row: True,
        lambda row: f"{row['question']}\nSolve this step by step and give the answer at the end.",
    ),
    "mbpp": (
        "mbpp.jsonl",
        lambda row: row["task_id"] in _MBPP_TEST,
        lambda row: f"{row['text']}\nYour code should pass this test:\n{row['test_list'][0]}",
    ),
    "humaneval": (
        "humaneval.jsonl",
        lambda row: True,
        lambda row: f"Complete this Python function:\n```python\n{row['prompt']}```",
    ),
    "alpaca": ("alpaca.jsonl", lambda row: True, _alpaca),
    "xsum": (
        "xsum_test.jsonl",
        lambda row: True,
        lambda row: f"Summarize this article in one sentence.\n\n{row['document']}",
    ),
    "spec_bench": ("spec_bench.jsonl", lambda row: True, lambda row: str(row["turns"][0])),
}
TASKS = tuple(_TASKS)


def load_task(name: str, data: Path, limit: int) -> list[str]:
    """The first `limit` test prompts of a task; Spec-Bench's are taken from its categories in turn.

    `name` is one of TASKS, read from the folder `data`, or a file of the user's own: JSON lines, each with a
    `prompt` field, or plain text with a prompt a line.

    Raises:
        OptionError: an unknown task, or a file that is missing or not of this form.
    """
    if limit < 1:
        raise OptionError(f"limit is {limit}; it must be 1 or more")
    if name not in _TASKS:
        file = Path(name)
        if not file.is_file():
            raise OptionError(f"unknown task {name!r}; use one of {', '.join(TASKS)}, or a file of prompts")
        return _own_prompts(file)[:limit]
    filename, in_test_split, template = _TASKS[name]
    rows = [row for row in _read(data / filename, name) if in_test_split(row)]
    if name == "spec_bench":
        rows = list(_in_turn(rows, key="category"))
    return [template(row) for row in islice(rows, limit)]


def _read(file: Path, task: str) -> list[Row]:
    if not file.is_file():
        raise OptionError(f"task {task} needs {file}, which does not exist; pass its folder with --data")
    try:
        return [json.loads(line) for line in _lines(file)]
    except ValueError as error:
        raise OptionError(f"{file} is damaged ({error}); get the task's data again") from error


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
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
