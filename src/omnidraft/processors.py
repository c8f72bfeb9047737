"""Logits processors: what a user may change in the target's logits before a token is drawn.

A processor is called once a position, in order, with all tokens before it, and with accepted tokens only: the
loop never takes one back. So a processor may keep a state and move it by what is new since its last call.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from omnidraft.errors import MissingExtraError, OptionError
from omnidraft.sampling import Processor
from omnidraft.types import Row
from omnidraft.vocab import Vocab


def as_processor(obj: object) -> Processor:
    """Any processor a user may pass: one of transformers' is wrapped, a callable is taken as it is.

    Raises:
        OptionError: it is neither.
    """
    # An instance cannot exist before its module is imported, so nobody pays for an import here.
    module = sys.modules.get("transformers.generation.logits_process")
    if module and isinstance(obj, (module.LogitsProcessor, module.LogitsProcessorList)):
        return transformers_processor(obj)
    if isinstance(obj, type):
        raise OptionError(f"the logits processor {obj.__name__} is a class; pass an instance of it")
    if not callable(obj):
        raise OptionError(
            f"a logits processor is a {type(obj).__name__}; pass a callable of (tokens, row) or a LogitsProcessor "
            "of transformers"
        )
    processor: Processor = obj
    return processor


def transformers_processor(processor: Any, device: str = "cpu") -> Processor:
    """A `LogitsProcessor` or `LogitsProcessorList` of transformers, between numpy and torch.

    `device`: where the processor's own tensors are.

    Raises:
        MissingExtraError: torch is not installed.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "hf") from error

    def process(tokens: Sequence[int], row: Row) -> Row:
        input_ids = torch.tensor([list(tokens)], dtype=torch.int64, device=device)
        scores = torch.tensor(row, dtype=torch.float32, device=device)[
            None
        ]  # a copy, since some write into their input
        with torch.no_grad():
            changed = processor(input_ids, scores)[0]
        array: Row = changed.float().cpu().numpy().astype(row.dtype, copy=False)
        return array

    return process


def json_schema(vocab: Vocab, schema: str | Mapping[str, Any]) -> Grammar:
    """Answers that are JSON and fit `schema`. Properties come in the schema's order.

    `"x-guidance"` in the schema sets llguidance's own options, as `{"whitespace_flexible": false}`.

    Raises:
        OptionError: not a schema, or one that llguidance does not support.
        MissingExtraError: llguidance is not installed.
    """
    return Grammar(vocab, _schema_text(schema))


def check_schema(schema: str | Mapping[str, Any]) -> None:
    """Refuse what `json_schema` would, before there is a vocabulary. Errors as there."""
    if reason := _llguidance().LLMatcher.validate_grammar(_schema_text(schema)):
        raise OptionError(f"the schema is refused: {_one_line(reason)}; change it")


def _schema_text(schema: str | Mapping[str, Any]) -> str:
    try:
        text = json.dumps(json.loads(schema) if isinstance(schema, str) else dict(schema))
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"the schema is not JSON: {error}; pass a JSON schema as text or as a dict"
        ) from error
    return f"start: %json {text}"


def regex(vocab: Vocab, pattern: str) -> Grammar:
    """Answers that match `pattern` from beginning to end, in the syntax of Rust's `regex`. Errors as in `lark`."""
    return Grammar(vocab, f"start: /{_llguidance().regex_to_lark(pattern, '')}/")


def lark(vocab: Vocab, text: str) -> Grammar:
    """Answers in the language of a grammar in llguidance's Lark.

    Raises:
        OptionError: the grammar is wrong.
        MissingExtraError: llguidance is not installed.
    """
    return Grammar(vocab, text)


# The library would otherwise allow only the tokens in which the tokenizer itself would spell a forced text. So the
# law stays one that can be said in a sentence: the target's own, given that the answer can still be completed.
# At the end of the text, where it does not move the lines that an error speaks of.
_ALL_SPELLINGS = '\n%llguidance {"no_forcing": true}\n'


class Grammar:
    """A grammar, compiled for one vocabulary; `processor` starts an answer in it.

    Allowed at a position is each token after which the answer can still become a sentence of the grammar, and an
    end token exactly where the answer is one. Allowed logits stay as they are, the others become -inf.
    Every one of `vocab.eos` may end it: the answer is the same whichever does, and which the model prefers is its own.
    """

    def __init__(self, vocab: Vocab, text: str) -> None:
        """`text`: in llguidance's Lark. Errors as in `lark`."""
        self._table = _table(vocab)
        self._start = _llguidance().LLMatcher(self._table.tokenizer, text + _ALL_SPELLINGS, log_level=0)
        if self._start.is_error():
            raise OptionError(f"the grammar is refused: {_reason(self._start)}; change it or its schema")

    def processor(self, prompt_length: int) -> Processor:
        """A fresh state for one answer, which begins after `prompt_length` tokens."""
        return _GrammarProcessor(self._table, self._start.deep_copy(), prompt_length)


class _GrammarProcessor:
    def __init__(self, table: _Table, matcher: Any, prompt_length: int) -> None:
        self._table = table
        self._matcher = matcher
        self._seen = prompt_length

    def __call__(self, tokens: Sequence[int], row: Row) -> Row:
        for token in tokens[self._seen :]:
            if not self._matcher.consume_token(self._table.same.get(token, token)):
                raise OptionError(
                    f"token {token} at position {self._seen} is outside the grammar: {_reason(self._matcher)}; "
                    "put the grammar behind processors that raise logits, and start it after the prompt"
                )
            self._seen += 1
        allowed = self._table.unpack(self._matcher.compute_bitmask())
        if self._matcher.is_error():  # then the mask allows the end
            if (reason := _reason(self._matcher)) == "NoExtensionBias":
                reason = "no token spells the bytes it asks for"
            raise OptionError(f"the grammar cannot go on: {reason}; simplify it, or take another target")
        changed = np.full_like(row, -np.inf)  # when few are allowed, in a fourth of the time of `np.where`
        np.copyto(changed, row, where=allowed[: len(row)])
        return changed


class _Table:
    """A vocabulary as llguidance wants it, and the way back from its bit masks.

    A token is known to it by its bytes. Of ids with the same bytes it keeps one, and of end tokens it knows one:
    `same` maps the others to those. Ids without bytes, and those that only pad the logits, are left out.
    """

    def __init__(self, vocab: Vocab) -> None:
        ends = [id for id in vocab.eos if id < vocab.size]
        if not ends:
            raise OptionError("the target has no end token, so a grammar cannot end; take another target")
        self.end = ends[0]
        self.same = dict.fromkeys(ends[1:], self.end)
        for id, piece in enumerate(vocab.pieces):
            if piece and id not in ends and vocab.id_of[piece] not in (id, *ends):
                self.same[id] = vocab.id_of[piece]
        self._others = np.array(list(self.same), dtype=np.intp)
        self._kept = np.array(list(self.same.values()), dtype=np.intp)
        self._width = vocab.width
        self.tokenizer = _llguidance().LLTokenizer(_Tokens(vocab, self.end, self.same))

    def unpack(
        self,
        mask: bytes,  # one bit an id, the lowest first
    ) -> NDArray[np.bool_]:  # [V_target]
        bits = np.frombuffer(mask, dtype=np.uint8)
        allowed = np.unpackbits(bits, count=self._width, bitorder="little").view(np.bool_)
        allowed[self._others] = allowed[self._kept]
        return allowed


class _Tokens:
    """What LLTokenizer reads when it is made. Special tokens carry their text, by which a Lark grammar names them."""

    is_tokenizer_wrapper = True

    def __init__(self, vocab: Vocab, end: int, same: Mapping[int, int]) -> None:
        self.eos_token_id = end
        self.bos_token_id = vocab.bos
        self.special_token_ids = [*vocab.special_text, end]  # an end token is never text, whatever its bytes
        self.tokens = [
            b"" if id in same else vocab.special_text.get(id, "").encode() or piece
            for id, piece in enumerate(vocab.pieces[: vocab.size])
        ]

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("with all spellings allowed nothing needs to be spelled")


_tables: WeakKeyDictionary[Vocab, _Table] = WeakKeyDictionary()


def _table(vocab: Vocab) -> _Table:
    """Made once a vocabulary, in about a second for 152k tokens; holds no reference to it."""
    if vocab not in _tables:
        _tables[vocab] = _Table(vocab)
    return _tables[vocab]


def _llguidance() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise MissingExtraError("llguidance", "grammar") from error
    return llguidance


def _reason(matcher: Any) -> str:
    return _one_line(matcher.get_error())


def _one_line(error: str) -> str:
    """The library's reason on one line, without the source and the parser's state around it."""
    reason = re.split(r"\n +\d+ \| |\n<(state|backtrace)>", error)[0]
    return " ".join(reason.rpartition("failed to compile JSON schema: ")[2].split())
