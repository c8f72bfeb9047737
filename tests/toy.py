"""Small adversarial fakes: models with known laws over small vocabularies of real bytes."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from omnidraft.pieces import CHAR_OF
from omnidraft.session import Engine, Session
from omnidraft.types import Row, Rows, as_tokens
from omnidraft.vocab import Vocab

CORPUS = (
    "the flake fell; the lake was still. then the flake fell in the lake, and the lake was still there\n"
    "a stone lay by the water, and a bird stood on the stone until the evening came over the hills\n"
)


def toy_tokenizer(merges: int, *, order: int = 0) -> Tokenizer:
    """A byte-level BPE with all 256 bytes, `merges` merges learnt from CORPUS, `<bos>`, `<eos>`, `<sep>`; ids
    shuffled by `order`, so that no two vocabularies agree on any."""
    words = [
        list(word) for word, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(CORPUS)
    ]
    learnt: list[tuple[str, str]] = []
    while len(learnt) < merges:
        counts: dict[tuple[str, str], int] = {}
        for word in words:
            for pair in pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        best = max(sorted(counts), key=lambda pair: counts[pair])
        learnt.append(best)
        for word in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = ["".join(best)]
                i += 1
    texts = [*CHAR_OF.values(), *dict.fromkeys(a + b for a, b in learnt)]
    random.Random(order).shuffle(texts)
    tokenizer = Tokenizer(models.BPE(vocab={text: id for id, text in enumerate(texts)}, merges=learnt))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<sep>"])
    return tokenizer


def toy_vocab(merges: int, *, order: int = 0, padding: int = 0) -> Vocab:
    tokenizer = toy_tokenizer(merges, order=order)
    bos, eos = tokenizer.token_to_id("<bos>"), tokenizer.token_to_id("<eos>")
    return Vocab(tokenizer, width=tokenizer.get_vocab_size() + padding, bos=bos, eos=[eos])


class ToySession(Session):
    def __init__(self, model: ToyModel) -> None:
        self.tokens = as_tokens()
        self.seconds = 0.0
        self.passes: list[int] = []  # tokens of each pass
        self._model = model

    def truncate(self, length: int) -> None:
        del self.tokens[length:]

    def extend(self, tokens: Sequence[int], rows: int) -> Rows:
        self.passes.append(len(tokens))
        self.tokens.extend(tokens)
        ends = range(len(self.tokens) - rows + 1, len(self.tokens) + 1)
        return np.stack([self._model.row(self.tokens[:end]) for end in ends]) if rows else np.empty((0, 0))


class ToyModel:
    """A model whose logits are a fixed random function of the last two tokens, sharp enough to agree often
    with another toy on the same text: likely bytes follow CORPUS."""

    def __init__(self, vocab: Vocab, *, name: str = "toy", seed: int = 0, scale: float = 1.0) -> None:
        self.name = name
        self.engine = Engine("toy", "float64", "cpu")
        self._vocab = vocab
        self.seed = seed
        self.scale = scale
        self.context_length = 4096
        self._rows: dict[bytes, Row] = {}

    @property
    def vocab(self) -> Vocab:
        return self._vocab

    def session(self) -> ToySession:
        return ToySession(self)

    def chat(self, messages: Sequence[dict[str, str]], tools: object = None) -> list[int]:
        return self.encode("\n".join(message["content"] for message in messages))

    def encode(self, text: str) -> list[int]:
        return self._vocab.encode_bytes(text.encode())

    def row(self, context: Sequence[int]) -> Row:
        """Logits after `context`. [V] float32"""
        tail = self._vocab.decode(context[-4:])[-3:]
        if tail not in self._rows:
            self._rows[tail] = self._new_row(tail)
        return self._rows[tail]

    def _new_row(self, tail: bytes) -> Row:
        digest = hashlib.blake2b(f"{self.seed}:{tail!r}".encode(), digest_size=8).digest()
        generator = np.random.default_rng(int.from_bytes(digest, "little"))
        logits = self.scale * generator.standard_normal(self._vocab.width, dtype=np.float32)
        text = CORPUS.encode() * 2
        for id, piece in enumerate(self._vocab.pieces):
            if piece and tail and tail + piece in text:
                logits[id] += 5 + len(piece)
        return logits
