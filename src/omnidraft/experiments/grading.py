"""Whether an answer is right: GSM8K by its number, MBPP and HumanEval by their tests."""

from __future__ import annotations

import re
from typing import Any

from omnidraft.errors import OptionError
from omnidraft.experiments.sandbox import passes

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_FENCE = re.compile(r"```(?:python|py)?\n(.*?)(?:```|\Z)", re.DOTALL)


def right(task: str, row: dict[str, Any], answer: str) -> bool:
    """Whether `answer` solves a row of a task.

    Raises:
        OptionError: a task whose answers cannot be checked.
    """
    if task == "gsm8k":
        return last_number(answer) == last_number(row["answer"])
    if task == "mbpp":
        return passes("\n".join([code_of(answer), *row["test_list"]]))
    if task == "humaneval":
        code = code_of(answer)
        if f"def {row['entry_point']}" not in code:  # the body alone
            code = row["prompt"] + code
        return passes("\n".join([code, row["test"], f"check({row['entry_point']})"]))
    raise OptionError(f"answers of {task} cannot be checked; use gsm8k, mbpp or humaneval")


def last_number(text: str) -> float | None:
    """The last number that a text names."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def code_of(answer: str) -> str:
    """The program in an answer: its first fenced block, or all of it."""
    found = _FENCE.search(answer)
    return found[1] if found else answer
