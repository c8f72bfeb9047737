"""The task data of the paper's scale, whole, from the hub."""

from __future__ import annotations

import json
from pathlib import Path

from omnidraft.errors import DownloadError, MissingExtraError

# file -> hub data set, its configuration, its splits; fields keep their names
SETS = {
    "gsm8k_train.jsonl": ("openai/gsm8k", "main", ("train",)),
    "gsm8k_test.jsonl": ("openai/gsm8k", "main", ("test",)),
    "mbpp.jsonl": ("google-research-datasets/mbpp", "full", ("prompt", "test", "validation", "train")),
    "humaneval.jsonl": ("openai/openai_humaneval", None, ("test",)),
    "alpaca.jsonl": ("tatsu-lab/alpaca", None, ("train",)),
    "xsum_train.jsonl": ("EdinburghNLP/xsum", None, ("train",)),
    "xsum_test.jsonl": ("EdinburghNLP/xsum", None, ("test",)),
}


def fetch(folder: Path) -> list[Path]:
    """Write the files that are missing; returns all of them.

    Raises:
        MissingExtraError: the library `datasets` is not there.
        DownloadError: the hub cannot be reached, or does not have a set.
    """
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "datasets", "paper") from error
    files = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, (repository, configuration, splits) in SETS.items():
        file = folder / name
        files.append(file)
        if file.exists():
            continue
        part = file.with_suffix(".part")
        try:
            with part.open("w", encoding="utf-8") as written:
                for split in splits:
                    for row in datasets.load_dataset(repository, configuration, split=split):
                        written.write(json.dumps(row, ensure_ascii=False) + "\n")
        except Exception as error:  # of many kinds: the hub's, the network's, the library's
            raise DownloadError(
                f"{repository} cannot be fetched ({error}); try again, or put {name} into {folder} yourself"
            ) from error
        part.replace(file)
    return files
