"""The acceptance head: how likely a drafted token is to be accepted (paper 3.3).

It begins as the drafter's own confidence, the token's log-odds under q, and learns what to add to them from what the
drafter's output layer was given for the token. So it can be asked before the token is fed: to stop costs no pass of the
drafter. The paper leaves the head's shape open; SpecDec++, which it builds on, reads the hidden state behind the token,
which takes that pass, and knows nothing of q, which took hundreds of answers to make up for (docs/decisions.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omnidraft.learn.losses import Pushed, outcomes
from omnidraft.learn.traces import Trace
from omnidraft.learn.updates import Update, take
from omnidraft.types import Row

HEADS = ("off", "joint", "interleaved", "only")
_WIDTH = 128
_BLOCKS = 1
_RATE = 1e-3  # of AdamW
_SURE = 1e-4  # a token is never surer than 1 less this


class Head:
    """A trained head, as a draft asks it: numpy, for one token at a time."""

    def __init__(self, weights: Mapping[str, NDArray[Any]], hidden_size: int) -> None:
        """`weights`: of `HeadModule.weights`; `hidden_size`: the drafter's.

        Raises:
            KeyError, ValueError: they are not a head's, or one's for another drafter.
        """
        self._weights = {name: np.array(weight, np.float32) for name, weight in weights.items()}
        shapes = {name: list(weight.shape) for name, weight in self._weights.items()}
        expected = {name: list(weight.shape) for name, weight in HeadModule(hidden_size).state_dict().items()}
        if shapes != expected:
            raise ValueError(f"the head does not fit a drafter of hidden size {hidden_size}")

    @property
    def weights(self) -> Mapping[str, NDArray[Any]]:
        """As `HeadModule.load_state_dict` takes them, in numpy."""
        return self._weights

    def chance(
        self,
        hidden: Row,  # [hidden size] what the output layer was given
        log_q: float,  # of the token drafted there
    ) -> float:
        """P(accepted), given that all tokens drafted before it are."""
        w = self._weights
        x = hidden / np.sqrt(np.mean(np.square(hidden)) + _TINY)
        y = _silu(w["input.weight"] @ x + w["input.bias"])
        for i in range(_BLOCKS):
            y = y + _silu(w[f"blocks.{i}.weight"] @ y + w[f"blocks.{i}.bias"])
        odds = log_q - np.log1p(-min(np.exp(log_q), 1 - _SURE))
        logit = w["output.weight"][0] @ y + w["odds.weight"][0, 0] * odds + w["odds.bias"][0]
        return float(1 / (1 + np.exp(-logit)))


class HeadModule(torch.nn.Module):
    """The same to be trained: the log-odds of q, and a layer with residual blocks that begins as nothing."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):  # the same for everyone, and nobody else's draws are changed
            torch.manual_seed(0)
            self.input = torch.nn.Linear(hidden_size, _WIDTH)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_BLOCKS))
        self.output = torch.nn.Linear(_WIDTH, 1, bias=False)
        self.odds = torch.nn.Linear(1, 1)
        for parameter in (*self.blocks.parameters(), self.output.weight):
            torch.nn.init.zeros_(parameter)
        torch.nn.init.ones_(self.odds.weight)
        torch.nn.init.zeros_(self.odds.bias)

    def forward(self, hidden: Tensor, log_q: Tensor) -> Tensor:  # [n, hidden size], [n] -> [n]
        """The logit of P(accepted)."""
        x = hidden * hidden.square().mean(-1, keepdim=True).add(_TINY).rsqrt()
        y = torch.nn.functional.silu(self.input(x))
        for block in self.blocks:
            y = y + torch.nn.functional.silu(block(y))
        odds = log_q - torch.log1p(-log_q.exp().clamp_max(1 - _SURE))
        logits: Tensor = (self.output(y) + self.odds(odds[:, None]))[:, 0]
        return logits


_TINY = 1e-6


def _silu(x: Row) -> Row:
    y: Row = x / (1 + np.exp(-x))
    return y


@dataclass(frozen=True, slots=True)
class Examples:
    """What a head learns from: a token that the drafter would draft at each position of an answer."""

    hidden: Tensor  # [n, hidden size]
    log_q: Tensor  # [n]
    labels: Tensor  # [n] the chance that the token is accepted; NaN where it is not known


def examples(
    hidden: Tensor,  # [n, hidden size] what the drafter's output layer was given at each token of the answer
    logits: Tensor,  # [n, V_draft] what came out
    trace: Trace,
    pushed: Pushed,
    generator: torch.Generator,
) -> Examples:
    """What the drafter would draft now at each position of an answer, and how the rule takes it.

    Under `compare` the token is the likeliest, and the label is whether its bytes are the answer's: as the answer
    is the target's own draw, under whatever filters, that is the chance itself on average. Under `trie` the token is
    drawn, and the label is min(1, P/Q) of its symbol, P pushed forward from the target's row at temperature 1. What is
    not known: where the answer ends inside the token, and a drawn token of several symbols.
    """
    with torch.no_grad():
        temperature = float(trace.temperature[0])
        allowed = logits.masked_fill(~pushed.usable, -torch.inf)
        if temperature:
            q = (allowed / temperature).softmax(-1)
            tokens = torch.multinomial(q, 1, generator=generator)[:, 0]
            labels = _ratios(tokens, q, trace, pushed, temperature)
        else:
            tokens = allowed.argmax(-1)
            labels = torch.from_numpy(trace.goes_on(pushed.vocab, tokens.tolist()))
        log_q = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return Examples(hidden.detach(), log_q, labels.to(logits.dtype))


def _ratios(tokens: Tensor, q: Tensor, trace: Trace, pushed: Pushed, temperature: float) -> Tensor:
    """min(1, P/Q) of drawn tokens; NaN where there is no teacher, or where a token is several symbols. [n]"""
    labels = torch.full((len(tokens),), torch.nan)
    begins = np.flatnonzero(trace.nodes[:, 2] == 0)
    at = trace.positions[begins] - trace.prompt[0]
    log_q, p = outcomes(pushed.masses(q[at]).log(), trace.symbols[begins], trace.chances[begins])
    p = p ** (1 / temperature)
    ratios = (p / p.sum(-1, keepdim=True) / log_q.exp()).clamp_max(1)
    for i, (position, own) in enumerate(zip(at.tolist(), trace.symbols[begins], strict=True)):
        symbol = pushed.symbol_of(int(tokens[position]))
        if symbol is not None:  # one that was not kept is one of all others together
            kept = np.flatnonzero(own == symbol)
            labels[position] = ratios[i, kept[0] if len(kept) else -1]
    return labels


def bce(
    logits: Tensor,  # [n] of P(accepted)
    labels: Tensor,  # [n]; NaN: not known
    weight: float = 1.0,  # of rejections
) -> Tensor:
    """Weighted binary cross-entropy of each position with a label, nats. [any]"""
    known = ~labels.isnan()
    logits, labels = logits[known], labels[known]
    sure = torch.nn.functional.logsigmoid
    return -(labels * sure(logits) + weight * (1 - labels) * sure(-logits))


class HeadTrainer:
    """A head and its optimiser."""

    def __init__(self, hidden_size: int, clip: float = 1.0) -> None:
        """`clip`: of the gradient's norm."""
        self.module = HeadModule(hidden_size)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=_RATE)
        self._hidden_size = hidden_size
        self._clip = clip

    def update(self, seen: Sequence[Examples]) -> Update:
        """One step on a batch of answers; each position with a label weighs the same."""
        self.optimizer.zero_grad(set_to_none=True)
        terms = torch.cat([bce(self.module(one.hidden, one.log_q), one.labels) for one in seen])
        terms.sum().backward()  # type: ignore[no-untyped-call]
        return take(
            self.optimizer,
            list(self.module.parameters()),
            float(terms.detach().sum()),
            len(terms),
            self._clip,
        )

    def weights(self) -> dict[str, NDArray[Any]]:
        """The head, as `Head` takes it. float32"""
        return {name: weight.detach().numpy().copy() for name, weight in self.module.state_dict().items()}

    def load(self, weights: Mapping[str, NDArray[Any]]) -> None:
        """Go on from this head.

        Raises:
            RuntimeError: it is another drafter's.
        """
        self.module.load_state_dict(
            {name: torch.from_numpy(np.array(weight)) for name, weight in weights.items()}
        )

    def losses(
        self, seen: Mapping[Trace, Examples], weights: Mapping[str, NDArray[Any]] | None = None
    ) -> dict[Trace, float]:
        """The mean loss over the positions of each answer, of this head or of one with other weights."""
        head = self
        if weights is not None:
            head = HeadTrainer(self._hidden_size)
            head.load(weights)
        with torch.no_grad():
            terms = {key: bce(head.module(one.hidden, one.log_q), one.labels) for key, one in seen.items()}
        return {key: float(own.mean()) for key, own in terms.items() if len(own)}
