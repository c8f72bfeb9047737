"""Mistral's own tokenizer file, tekken.json, as a tokenizer: byte-level BPE by rank, special tokens first."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from omnidraft.errors import DamagedFileError
from omnidraft.pieces import CHAR_OF

# Files up to version 3 do not name their special tokens (mistral-common, DEPRECATED_SPECIAL_TOKENS).
_UNNAMED = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
]
BOS, EOS = "<s>", "</s>"


def read_tekken(file: Path) -> Tokenizer:
    """The tokenizer of a tekken.json; an encoding begins with `<s>`.

    Raises:
        DamagedFileError: it is no such file, or is cut short.
    """
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        config = record["config"]
        reserved: int = config["default_num_special_tokens"]
        count: int = config["default_vocab_size"] - reserved
        pieces = [base64.b64decode(entry["token_bytes"]) for entry in record["vocab"][:count]]
        named = {entry["rank"]: entry["token_str"] for entry in record.get("special_tokens") or ()}
        pattern: str = config["pattern"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(
            f"{file} cannot be read as a Tekken tokenizer ({error}); fetch it again"
        ) from error
    named = named or dict(enumerate(_UNNAMED))
    specials = [named.get(id, f"<SPECIAL_{id}>") for id in range(reserved)]
    text_of = {piece: "".join(CHAR_OF[byte] for byte in piece) for piece in pieces}
    vocab = dict(zip(specials, range(reserved), strict=True))
    vocab |= {text_of[piece]: reserved + rank for rank, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=_merges(pieces, text_of), ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in specials])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, specials.index(BOS))]
    )
    return tokenizer


def _merges(pieces: list[bytes], text_of: dict[bytes, str]) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, in the order of the third's rank: what a rank says."""
    rank_of = {piece: rank for rank, piece in enumerate(pieces)}
    merges = []
    for piece in pieces:
        halves = [
            (piece[:at], piece[at:])
            for at in range(1, len(piece))
            if piece[:at] in rank_of and piece[at:] in rank_of
        ]
        halves.sort(key=lambda pair: (rank_of[pair[0]], rank_of[pair[1]]))
        merges += [(text_of[left], text_of[right]) for left, right in halves]
    return merges
