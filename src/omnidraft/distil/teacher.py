"""What the parent says of the training text, recorded once: the likeliest tokens of each row, and the rest as one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omnidraft.distil.trim import first_pieces

KEPT = 32  # entries of a row


class TeacherRows:
    """The parent's rows for a number of sequences, in files that grow as training asks for them.

    Each row is pushed forward onto the drafter's vocabulary: a token that it lacks counts for its first piece.
    """

    def __init__(
        self,
        folder: Path,
        parent: Any,
        tokenizer: dict[str, Any],  # the parent's tokenizer.json
        kept: Sequence[int] | None,
        shape: tuple[int, int],  # sequences, length
    ) -> None:
        self._parent = parent
        width = parent.get_output_embeddings().weight.shape[0]
        self._kept: Tensor | None = None
        if kept is not None:
            pieces = torch.zeros(width, dtype=torch.long)
            own = torch.from_numpy(first_pieces(tokenizer, kept))
            pieces[: len(own)] = own  # ids that only pad the rows have no probability
            self._kept = torch.tensor(kept, device=parent.device)
            self._pieces = pieces.to(parent.device)
        entries = (*shape, min(KEPT, width if kept is None else len(kept)))
        self._symbols = _opened(folder / "symbols", np.int32, entries)
        self._chances = _opened(folder / "chances", np.float16, entries)
        self._known = _opened(folder / "known", np.bool_, shape[:1])

    def __len__(self) -> int:
        return len(self._known)

    def rows(self, indices: Sequence[int], tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and probabilities of the sequences `indices`, whose tokens are given. [n, length, KEPT] each"""
        missing = [i for i, index in enumerate(indices) if not self._known[index]]
        if missing:
            symbols, chances = self._look(tokens[missing])
            for i, one, other in zip(missing, symbols, chances, strict=True):
                self._symbols[indices[i]] = one
                self._chances[indices[i]] = other
                self._known[indices[i]] = True  # last: a kill in between leaves the row unknown
        device = tokens.device
        return (
            torch.from_numpy(self._symbols[indices].astype(np.int64)).to(device),
            torch.from_numpy(self._chances[indices].astype(np.float32)).to(device),
        )

    @torch.no_grad()
    def _look(self, tokens: Tensor) -> tuple[np.ndarray, np.ndarray]:
        logits = self._parent(tokens if self._kept is None else self._kept[tokens]).logits
        law = torch.softmax(logits.float(), -1)
        if self._kept is not None:
            law = law.new_zeros(*law.shape[:-1], len(self._kept)).index_add_(-1, self._pieces, law)
        best = law.topk(self._symbols.shape[-1])
        return best.indices.cpu().numpy(), best.values.cpu().numpy()


def _opened(file: Path, dtype: type, shape: tuple[int, ...]) -> np.memmap:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    with file.open("ab") as stream:
        stream.truncate(size)  # of zeros, which take no room on the disk
    return np.memmap(file, dtype, "r+", shape=shape)


def sparse_divergence(
    logits: Tensor,  # [n, V]
    symbols: Tensor,  # [n, KEPT]
    chances: Tensor,  # [n, KEPT] of the teacher; what they lack of 1 lies on all other tokens together
) -> Tensor:
    """KL(teacher || drafter) over the kept tokens and the rest as one outcome, in nats. [n]"""
    log_q = torch.log_softmax(logits, -1).gather(-1, symbols)
    rest_p = (1 - chances.sum(-1)).clamp_min(1e-6)
    rest_q = (1 - log_q.exp().sum(-1)).clamp_min(1e-6)
    inside = (chances * (chances.clamp_min(1e-8).log() - log_q)).sum(-1)
    return inside + rest_p * (rest_p / rest_q).log()
