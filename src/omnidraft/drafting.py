"""The drafter of one answer: follows the target's context and writes k tokens ahead of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from omnidraft.sampling import Sampler
from omnidraft.session import Session, common_prefix, feed, write
from omnidraft.translate import DraftContext, Translator
from omnidraft.types import Draft, Proposal, Row, Tokens, as_tokens


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends a draft after the token with which 1 - prod P(accepted) is above `gamma` (paper 3.3).

    It looks at what was drafted so far and never takes a token back for its value; so the target's law stays as it is
    (docs/how-it-works.md).
    """

    chance: Callable[
        [
            Row,  # [hidden size] what the drafter's output layer was given
            float,  # log q of the token drafted there
        ],
        float,  # P(accepted), given that all before it are
    ]
    gamma: float  # in 0..1


class Drafter:
    """Drafts tokens that can become a proposal."""

    def __init__(
        self,
        session: Session,
        translator: Translator,
        context_length: int,
        sampler: Sampler | None = None,
        stop: Stop | None = None,
    ) -> None:
        """`context_length`: the drafter's own, in its tokens; a longer context slides, by halves. `sampler` draws
        the tokens for a rule that needs their laws; without one each is the likeliest. `stop` needs a session that
        shows its hidden states."""
        self.session = session
        self.translator = translator
        self._sampler = sampler
        self._stop = stop
        self._context = DraftContext(translator.alignment)
        self._context_length = context_length
        self.seen = 0  # target tokens already in the context
        self._start = 0  # first draft token still in the window

    def prefill(self, context: Sequence[int], part: int) -> Iterator[None]:
        """Follow the target's `context` with at most `part` tokens a turn, so that `propose` has few to feed."""
        self._context.extend(context[self.seen :])
        self.seen = len(context)
        tokens = self._window(1)
        for end in range(common_prefix(self.session.tokens, tokens) + part, len(tokens), part):
            feed(self.session, tokens[:end], rows=1)
            yield

    def propose(self, context: Sequence[int], k: int) -> tuple[Draft, Proposal]:
        """A draft of at most k tokens behind the target's `context`, and its proposal in target tokens."""
        self._context.extend(context[self.seen :])
        self.seen = len(context)
        draft = self._write(k)
        return draft, self.translator.translate(context, draft)

    def _window(self, k: int) -> Tokens[int]:
        """The end of the context that leaves room for k tokens."""
        tokens = self._context.tokens
        # Too long, or shorter than when the window was moved: the last word may have been spelled anew.
        if not 0 < len(tokens) - self._start <= self._context_length - k:
            self._start = max(0, len(tokens) - self._context_length // 2)
        return tokens[self._start :]

    def _write(self, k: int) -> Draft:
        k = min(k, self._context_length // 2)
        if not self._context.tokens or not k:
            return Draft(())
        context, usable, ends = self._window(k), self.translator.usable, self.translator.ends
        if self._sampler is None and self._stop is None:
            return Draft(tuple(write(self.session, context, k, usable, ends)))
        laws: list[Row] = []
        written = as_tokens()
        accepted = 1.0  # the chance that all written so far is
        while len(written) < k and not (written and written[-1] in ends):
            row = feed(self.session, context + written, rows=1)[0]
            allowed = np.where(usable, row, -np.inf)
            if self._sampler:
                token, law = self._sampler.draft(allowed)
                laws.append(law)
            else:
                token = int(allowed.argmax())
            written.append(token)
            if self._stop and len(written) < k:
                accepted *= self._stop.chance(self.session.hidden[-1], _log_softmax(row, token))
                if 1 - accepted > self._stop.gamma:
                    break
        return Draft(tuple(written), tuple(laws))


def _log_softmax(row: Row, token: int) -> float:
    top = row.max()
    return float(row[token] - top - np.log(np.exp(row - top).sum()))
