"""The training text of omnidraft-nano: each part from where its licence allows it, and a list that says so.

    python recipes/nano_text.py --data DIR --docs DIR --recordings FILE ... [--answers FILE ...] --out text

`--data`: the task data (GSM8K's training split, MBPP's training and validation splits; nothing else of it is read).
`--docs`: the sources of Python's documentation, .rst or .rst.txt. `--recordings`: answers of a target to training
prompts, as `omnidraft experiment` keeps them in the cache folder; `--answers`: more of them, by
`recipes/target_answers.py`. Python's standard library is taken from the running Python.
`text/SOURCES.json` says of each part what it is and its licence; `judge.jsonl` beside `text` holds answers kept out of
it, on which a drafter is judged while it is trained.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from omnidraft import hub
from omnidraft.backends.checkpoint import CheckpointModel
from omnidraft.learn import record

SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "",  # the drafter's own
)
JUDGED = 6  # one answer of so many is kept out
_TAKEN_APART = 4_000  # characters of documentation and source that stay together

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--docs", type=Path, required=True)
    parser.add_argument("--recordings", type=Path, nargs="+", required=True)
    parser.add_argument("--answers", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    answers = [row for file in given.recordings for row in recorded(file)]
    judges, taught = answers[::JUDGED], [row for i, row in enumerate(answers) if i % JUDGED]
    taught += [row for file in given.answers for row in lines(file)]
    targets = ", ".join(sorted({row["by"] for row in answers}))
    parts: list[tuple[str, str, str, int, Iterable[Row]]] = [
        ("gsm8k", "openai/grade-school-math, training split", "MIT", 1, gsm8k(given.data, draw)),
        (
            "mbpp",
            "google-research MBPP, training and validation splits",
            "CC-BY-4.0",
            2,
            mbpp(given.data, draw),
        ),
        ("answers", f"answers of {targets} to such prompts", "Apache-2.0", 10, conversations(taught, draw)),
        ("python-docs", "Python's documentation", "PSF-2.0", 1, documentation(given.docs, draw, 500_000)),
        ("python-source", "Python's standard library", "PSF-2.0", 1, sources(draw, 500_000)),
    ]
    listed = []
    for name, source, licence, repeats, rows in parts:
        rows = list(rows)
        file = given.out / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows) * repeats, encoding="utf-8")
        listed.append(
            {
                "file": file.name,
                "source": source,
                "licence": licence,
                "documents": len(rows),
                "repeats": repeats,
                "bytes": file.stat().st_size,
                "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            }
        )
        print(name, len(rows), file.stat().st_size)
    (given.out / "SOURCES.json").write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
    judge = given.out.with_name("judge.jsonl")
    judge.write_text("".join(json.dumps(row) + "\n" for row in conversations(judges, draw)), encoding="utf-8")


def lines(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def recorded(file: Path) -> Iterator[Row]:
    stream, about = record.load(file)
    tokenizer = CheckpointModel(hub.pull(about["target"]), about["target"]).tokenizer
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    for one in stream:
        prompt = tokenizer.decode(one.prompt).split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        ended = one.answer[-1] in ends
        answer = tokenizer.decode(one.answer[:-1] if ended else one.answer)
        yield {"prompt": prompt, "answer": answer, "ended": ended, "by": about["target"]}


def conversation(draw: random.Random, prompt: str, answer: str, *, ended: bool = True) -> Row:
    system = draw.choice(SYSTEM)
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return {"messages": messages} | ({} if ended else {"cut": True})


def conversations(rows: Sequence[Row], draw: random.Random) -> Iterator[Row]:
    return (conversation(draw, row["prompt"], row["answer"], ended=row["ended"]) for row in rows)


def gsm8k(data: Path, draw: random.Random) -> Iterator[Row]:
    for row in draw.sample(lines(data / "gsm8k_train.jsonl"), 4000):
        worked, _, result = re.sub(r"<<.*?>>", "", row["answer"]).partition("\n#### ")
        prompt = row["question"]
        if draw.random() < 0.5:
            prompt += "\nSolve this step by step and give the answer at the end."
        yield conversation(draw, prompt, f"{worked}\nThe answer is {result}.")


def mbpp(data: Path, draw: random.Random) -> Iterator[Row]:
    for row in lines(data / "mbpp.jsonl"):
        if row["task_id"] > 510:
            prompt = f"{row['text']}\nYour code should pass this test:\n{row['test_list'][0]}"
            code = row["code"].replace("\r\n", "\n").replace("\t", "    ")
            yield conversation(draw, prompt, f"```python\n{code}\n```")


def documentation(folder: Path, draw: random.Random, characters: int) -> Iterator[Row]:
    files = sorted(file for file in folder.rglob("*") if file.name.endswith((".rst", ".rst.txt")))
    return pieces(files, draw, characters)


def sources(draw: random.Random, characters: int) -> Iterator[Row]:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return pieces(files, draw, characters)


def pieces(files: list[Path], draw: random.Random, characters: int) -> Iterator[Row]:
    """Some of each file, from its beginning on, until there are that many characters."""
    draw.shuffle(files)
    for file in files:
        text = file.read_text(encoding="utf-8", errors="ignore")[:_TAKEN_APART]
        characters -= len(text)
        if characters < 0:
            return
        if text:
            yield {"text": text}


if __name__ == "__main__":
    main()
