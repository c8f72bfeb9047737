"""A smaller vocabulary out of a BPE tokenizer's own tokens.

A part of the tokens that holds, with each, the two that it is merged from is again a BPE vocabulary: the other tokens
are spelled by their pieces. So a drafter with fewer tokens is an ordinary model with an ordinary tokenizer, which no
engine has to know about, and its output layer, two thirds of a small model's pass, shrinks with it.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnidraft.errors import OptionError


def choose_tokens(
    tokenizer: dict[str, Any],  # the contents of tokenizer.json
    counts: Counter[int],  # token id -> how often the training text has it
    size: int,
) -> list[int]:
    """The `size` tokens to keep, as ids in their order: single bytes and special tokens, then the most frequent.

    Raises:
        OptionError: not a BPE tokenizer, or `size` outside of what it has.
    """
    vocabulary, parts = _parts(tokenizer)
    kept = {token for token in vocabulary if token not in parts}
    if not len(kept) < size <= len(vocabulary):
        raise OptionError(f"trim is {size}; it must be between {len(kept) + 1} and {len(vocabulary)} tokens")
    # Unseen tokens come last, the tokenizer's own most frequent, which have the lowest ids, first.
    for token in sorted(vocabulary, key=lambda token: (-counts[vocabulary[token]], vocabulary[token])):
        needed: set[str] = set()
        open_ones = [token]
        while open_ones:
            piece = open_ones.pop()
            if piece not in kept and piece not in needed:
                needed.add(piece)
                open_ones += parts[piece]
        if len(kept) + len(needed) <= size:
            kept |= needed
    return sorted(vocabulary[token] for token in kept)


def trimmed(tokenizer: dict[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """The contents of tokenizer.json with those tokens only; the i-th of them gets the id i.

    Raises:
        OptionError: not a BPE tokenizer.
    """
    vocabulary, _ = _parts(tokenizer)
    names = {old: token for token, old in vocabulary.items()}
    smaller = {names[old]: new for new, old in enumerate(kept)}
    result = copy.deepcopy(tokenizer)
    result["model"]["vocab"] = smaller
    result["model"]["merges"] = [
        [left, right]
        for left, right in _merges(tokenizer)
        if left in smaller and right in smaller and left + right in smaller
    ]
    for special in result["added_tokens"]:
        special["id"] = smaller[special["content"]]
    return result


def first_pieces(tokenizer: dict[str, Any], kept: Sequence[int]) -> NDArray[np.int64]:
    """What each of the tokenizer's tokens begins with among the kept ones. [V], indices into `kept`

    Adding a row's probabilities up by it gives the law of the next kept token.
    """
    vocabulary, parts = _parts(tokenizer)
    new = {old: i for i, old in enumerate(kept)}
    pieces = np.zeros(max(vocabulary.values()) + 1, np.int64)
    for token, old in vocabulary.items():
        piece = token
        while vocabulary[piece] not in new:
            piece = parts[piece][0]
        pieces[old] = new[vocabulary[piece]]
    return pieces


def _parts(tokenizer: dict[str, Any]) -> tuple[dict[str, int], dict[str, tuple[str, str]]]:
    """Token -> id, and token -> the two that its first merge makes it from."""
    model = tokenizer["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise OptionError(
            f"a {model['type']} vocabulary cannot be trimmed, only byte-level BPE can; leave trim out"
        )
    vocabulary: dict[str, int] = model["vocab"]
    known = {special["content"] for special in tokenizer["added_tokens"]}
    if not known <= vocabulary.keys():
        vocabulary = vocabulary | {special["content"]: special["id"] for special in tokenizer["added_tokens"]}
    parts = {left + right: (left, right) for left, right in reversed(_merges(tokenizer))}
    return vocabulary, {token: parts[token] for token in vocabulary if token in parts}


def _merges(tokenizer: dict[str, Any]) -> list[tuple[str, str]]:
    """Older files write a merge as one string."""
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in tokenizer["model"]["merges"])
    return [(left, right) for left, right in pairs]
