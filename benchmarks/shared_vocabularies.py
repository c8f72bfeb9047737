"""How many tokens two vocabularies share: by the strings they are stored as, as displayed, and byte for byte.

    PYTHONPATH=tests python benchmarks/shared_vocabularies.py results/shared_vocabularies.json

writes the counts and prints the table of docs/tokenizers.md. The tokenizers are those of the tests, fetched the
first time.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from real_tokenizers import ALL, tokenizer_of, vocab_of

from omnidraft.provenance import provenance

DRAFTERS = ("llama2", "smollm2-135m")
# Table 8 of the paper (arXiv 2507.02659): Llama-68M, which has Llama 2's vocabulary.
PAPER = {("llama2", "qwen2.5"): 22_275, ("llama2", "llama3"): 22_416}


def count(drafter: str, target: str) -> dict[str, Any]:
    """The tokens that both have, without special tokens."""
    strings = [ordinary_strings(name) for name in (drafter, target)]
    displayed = [{string.replace("\u2581", "\u0120") for string in side} for side in strings]
    pieces = [set(vocab_of(name).pieces) - {b""} for name in (drafter, target)]
    return {
        "drafter": drafter,
        "target": target,
        "string": len(strings[0] & strings[1]),
        "display": len(displayed[0] & displayed[1]),
        "bytes": len(pieces[0] & pieces[1]),
        "of": len(pieces[0]),
    }


def ordinary_strings(name: str) -> set[str]:
    """A vocabulary as the tokenizer stores it."""
    vocab, tokenizer = vocab_of(name), tokenizer_of(name).backend_tokenizer
    return {string for string, id in tokenizer.get_vocab().items() if id not in vocab.special_text}


def table(counts: list[dict[str, Any]]) -> str:
    """The counts as Markdown."""
    lines = [
        "| drafter | target | stored string | displayed string | the paper | bytes | of the drafter's |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in counts:
        pair = (row["drafter"], row["target"])
        paper = f"{PAPER[pair]:,}" if pair in PAPER else ""
        lines.append(
            f"| {pair[0]} | {pair[1]} | {row['string']:,} | {row['display']:,} | {paper} | {row['bytes']:,} "
            f"| {row['bytes'] / row['of']:.0%} of {row['of']:,} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path, help="file to write")
    arguments = parser.parse_args()
    counts = [count(drafter, target) for drafter in DRAFTERS for target in ALL if target != drafter]
    arguments.json.write_text(json.dumps({"provenance": provenance(), "counts": counts}, indent=1) + "\n")
    print(table(counts))


if __name__ == "__main__":
    main()
