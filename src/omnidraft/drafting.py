"""The drafter of one answer: follows the target's context and writes k tokens ahead of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omnidraft.sampling import Sampler
from omnidraft.session import Session, feed, write
from omnidraft.translate import DraftContext, Translator
from omnidraft.types import Draft, Proposal, Row, as_tokens


class Drafter:
    """Drafts tokens that can become a proposal."""

    def __init__(
        self,
        session: Session,
        translator: Translator,
        context_length: int,
        sampler: Sampler | None = None,
    ) -> None:
        """`context_length`: the drafter's own, in its tokens; a longer context slides, by halves. `sampler` draws
        the tokens for a rule that needs their laws; without one each is the likeliest."""
        self.session = session
        self.translator = translator
        self._sampler = sampler
        self._context = DraftContext(translator.alignment)
        self._context_length = context_length
        self._seen = 0  # target tokens already in the context
        self._start = 0  # first draft token still in the window

    def propose(self, context: Sequence[int], k: int) -> tuple[Draft, Proposal]:
        """A draft of at most k tokens behind the target's `context`, and its proposal in target tokens."""
        self._context.extend(context[self._seen :])
        self._seen = len(context)
        draft = self._write(k)
        return draft, self.translator.translate(context, draft)

    def _write(self, k: int) -> Draft:
        tokens = self._context.tokens
        if not tokens or not k:
            return Draft(())
        if len(tokens) - self._start > self._context_length - k:
            self._start = len(tokens) - self._context_length // 2
        context, usable, ends = tokens[self._start :], self.translator.usable, self.translator.ends
        if self._sampler is None:
            return Draft(tuple(write(self.session, context, k, usable, ends)))
        laws: list[Row] = []
        written = as_tokens()
        while len(written) < k and not (written and written[-1] in ends):
            row = feed(self.session, context + written, rows=1)[0]
            token, law = self._sampler.draft(np.where(usable, row, -np.inf))
            written.append(token)
            laws.append(law)
        return Draft(tuple(written), tuple(laws))
