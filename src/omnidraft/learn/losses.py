"""The losses: what a drafter's logits are worth against a Trace's teachers. Pure functions, one number a position.

A teacher knows the likeliest entries of a law and, as one more outcome, what is left of it; the drafter's law is
summed up the same way. So a divergence is over KEPT + 1 outcomes, and its gradient reaches every logit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omnidraft.errors import OptionError
from omnidraft.learn.traces import Trace
from omnidraft.spellings import Lexicon, Node

_TINY = 1e-9  # a probability below it counts as this: sums of float32 know no less

Divergence = Callable[
    [
        Tensor,  # [T, n] log q, the drafter's
        Tensor,  # [T, n] p, the teacher's
    ],
    Tensor,  # [T] nats
]
Loss = Callable[
    [
        Tensor,  # [n - prompt, V_draft] the drafter's logits of each token of the answer
        Trace,
        "Pushed",
    ],
    Tensor,  # one number for each position with a teacher, nats
]


def forward_kl(log_q: Tensor, p: Tensor) -> Tensor:
    """D(p || q): the drafter must cover all that the target may say."""
    return (p * (p.clamp_min(_TINY).log() - log_q)).sum(-1)


def reverse_kl(log_q: Tensor, p: Tensor) -> Tensor:
    """D(q || p): the drafter must say nothing that the target would not (paper equation 4)."""
    return (log_q.exp() * (log_q - p.clamp_min(_TINY).log())).sum(-1)


class Pushed:
    """The drafter's laws over base symbols, from its logits."""

    def __init__(self, lexicon: Lexicon) -> None:
        self._table = table = lexicon.draft
        self.vocab = lexicon.alignment.draft
        self.usable = torch.from_numpy(lexicon.usable(splits=True))  # [V_draft] what can be drafted
        self._base = len(lexicon.token_of)
        self._ids = _index(table.ids)
        self._first = _index(table.symbols[table.offsets[:-1]])
        alone = torch.from_numpy(~table.split)
        self._direct_ids, self._direct_symbols = self._ids[alone], self._first[alone]

    def direct(self, logits: Tensor) -> Tensor:  # [T, V_draft] -> [T, base]
        """log q with all suppressed but the tokens that both vocabularies have (paper 3.1)."""
        law = logits.new_full((len(logits), self._base), -torch.inf)
        return law.index_copy(1, self._direct_symbols, logits[:, self._direct_ids]).log_softmax(-1)

    def symbols(self, logits: Tensor) -> Tensor:  # [T, V_draft] -> [T, base]
        """log q of the first symbol. A token counts for what its spelling begins with; one without is lost."""
        return _log(self.masses(logits.softmax(-1)))

    def masses(self, q: Tensor) -> Tensor:  # [T, V_draft] -> [T, base]
        """The probability of the first symbol, from that of tokens."""
        return q.new_zeros(len(q), self._base).index_add(1, self._first, q[:, self._ids])

    def inside(self, logits: Tensor, node: Node) -> Tensor:  # [V_draft] -> [base]
        """log q of the next symbol of a token that is known to be among the rows `node` of the spelling table."""
        nexts = self._table.symbols[self._table.offsets[node.low : node.high] + node.depth]
        q = logits[self._ids[node.low : node.high]].softmax(-1)
        return _log(q.new_zeros(self._base).index_add(0, _index(nexts), q))

    def symbol_of(self, token: int) -> int | None:
        """The base symbol that a draft token is."""
        row = self._table.row(token)
        return None if row < 0 or self._table.split[row] else self._table.spelling(row)[0]


def outcomes(
    log_q: Tensor,  # [T, base] the drafter's law over base symbols
    symbols: NDArray[np.int32],  # [T, K], -1 where there are fewer
    chances: NDArray[np.float32],  # [T, K] the teacher's
) -> tuple[Tensor, Tensor]:
    """log q and p, each [T, K + 1], over the teacher's entries and, last, everything else."""
    index = _index(symbols)
    picked = log_q.gather(1, index.clamp_min(0)).masked_fill(index < 0, math.log(_TINY))
    p = torch.from_numpy(chances).to(log_q.dtype)
    rest_q = _log(1 - picked.exp().sum(-1, keepdim=True))
    rest_p = (1 - p.sum(-1, keepdim=True)).clamp_min(0)
    return torch.cat([picked, rest_q], -1).clamp_min(math.log(_TINY)), torch.cat([p, rest_p], -1)


def pushforward(
    logits: Tensor, trace: Trace, pushed: Pushed, *, divergence: Divergence = forward_kl
) -> Tensor:
    """Push-forward KL (DESIGN 4): the target's law of the next base symbol against the drafter's.

    Every position has a teacher, at a target token's beginning or inside it, and no weight has to be chosen.
    """
    at = _index(trace.positions - trace.prompt)
    nodes = [Node(*node) for node in trace.nodes.tolist()]
    begins = [i for i, node in enumerate(nodes) if not node.depth]
    inside = [i for i, node in enumerate(nodes) if node.depth]
    laws = torch.cat(
        [pushed.symbols(logits[at[begins]])] + [pushed.inside(logits[at[i]], nodes[i])[None] for i in inside]
    )
    order = begins + inside
    return divergence(*outcomes(laws, trace.symbols[order], trace.chances[order]))


def hybrid(
    logits: Tensor,
    trace: Trace,
    pushed: Pushed,
    *,
    divergence: Divergence = reverse_kl,
    weight: float | None = 0.2,
) -> Tensor:
    """The paper's loss (equations 3 and 4): a divergence on direct tokens, lambda times the NLL of n-grams.

    `weight`: lambda; None is p(n-gram), the paper's point-wise KL.
    """
    chances = torch.from_numpy(trace.ngram_chances).to(logits.dtype)
    nll = ngram(logits, trace, pushed) * (chances if weight is None else weight)
    return torch.cat([_direct(logits, trace, pushed, divergence), nll])


def ngram(logits: Tensor, trace: Trace, pushed: Pushed) -> Tensor:
    """The negative log-likelihood of each draft token of an n-gram (paper equation 3), and nothing else."""
    return _unlikelihood(logits, trace, trace.ngram_positions)


def likelihood(logits: Tensor, trace: Trace, pushed: Pushed, *, weight: float = 0.2) -> Tensor:
    """The paper's variant with a likelihood on direct tokens too, instead of a divergence."""
    alone = trace.direct_positions[~np.isin(trace.direct_positions, trace.ngram_positions)]
    return torch.cat([_unlikelihood(logits, trace, alone), weight * ngram(logits, trace, pushed)])


def hybrid_kl(logits: Tensor, trace: Trace, pushed: Pushed, *, weight: float = 0.2) -> Tensor:
    """The paper's variant with a KL on n-grams too, over the row of its equation 2.

    There q'(n-gram) is the product of its parts, and its first part loses as much.
    """
    row_of = {position: row for row, position in enumerate(trace.direct_positions.tolist())}
    terms = [_direct(logits, trace, pushed, reverse_kl)]
    begins = np.flatnonzero(trace.ngram_begins)
    for low, parts in zip(begins, np.split(trace.ngram_positions, begins)[1:], strict=True):
        symbols = [pushed.symbol_of(token) for token in trace.tokens[parts].tolist()]
        if None in symbols:
            continue
        row = row_of[int(parts[0])]
        laws = pushed.direct(logits[_index(parts - trace.prompt)])
        log_product = laws[range(len(parts)), symbols].sum()
        left = _log(laws[0, symbols[0]].exp() - log_product.exp())
        first = laws[:1].index_put((torch.tensor([0]), torch.tensor(symbols[:1])), left)
        log_q, p = outcomes(first, trace.direct_symbols[[row]], trace.direct_chances[[row]])
        chance = p.new_tensor([[float(trace.ngram_chances[low])]])
        # The n-gram is an outcome of its own, taken out of the rest.
        log_q = torch.cat(
            [log_q[:, :-1], _log(log_q[:, -1:].exp() - log_product.exp()), log_product.view(1, 1)], -1
        )
        p = torch.cat([p[:, :-1], (p[:, -1:] - chance).clamp_min(0), chance], -1)
        terms.append(weight * reverse_kl(log_q.clamp_min(math.log(_TINY)), p))
    return torch.cat(terms)


def _unlikelihood(logits: Tensor, trace: Trace, positions: NDArray[np.int32]) -> Tensor:
    """-log q of the answer's own tokens at these positions."""
    at = _index(positions)
    log_q = logits[at - int(trace.prompt[0])].log_softmax(-1)
    return -log_q.gather(1, _index(trace.tokens)[at, None])[:, 0]


def _direct(logits: Tensor, trace: Trace, pushed: Pushed, divergence: Divergence) -> Tensor:
    """The divergence where the target's token is one of the drafter's, in the target's vocabulary over q'."""
    alone = ~np.isin(trace.direct_positions, trace.ngram_positions)
    laws = pushed.direct(logits[_index(trace.direct_positions[alone] - trace.prompt)])
    return divergence(*outcomes(laws, trace.direct_symbols[alone], trace.direct_chances[alone]))


def _log(q: Tensor) -> Tensor:
    return q.clamp_min(_TINY).log()


def _index(array: NDArray[np.int32]) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))


LOSSES: dict[str, Loss] = {
    "pushforward": pushforward,
    "pushforward-reverse": partial(pushforward, divergence=reverse_kl),
    "hybrid": hybrid,
    "hybrid-point": partial(hybrid, weight=None),
    "hybrid-kl": hybrid_kl,
    "hybrid-forward": partial(hybrid, divergence=forward_kl),
    "direct": partial(hybrid, weight=0.0),
    "likelihood": likelihood,
    "ngram": ngram,
}


def loss_named(name: str) -> Loss:
    """A loss by name.

    Raises:
        OptionError: an unknown name.
    """
    if not isinstance(name, str) or name not in LOSSES:
        raise OptionError(f"unknown loss {name!r}; use one of {', '.join(LOSSES)}")
    return LOSSES[name]
