"""What is asked: the prompt, and how it is to be answered."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from omnidraft.errors import OptionError, is_count
from omnidraft.sampling import Sampling

Method = Literal["auto", "plain", "lookup", "direct", "ngram", "prefill", "text"]
Verification = Literal["auto", "compare", "trie", "paper"]
Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Strategy:
    """How to propose and verify: `Options` with `auto` resolved."""

    method: str
    verification: str
    splits: bool
    lookup: bool = False  # whether look-ups may draft in place of the drafter


@dataclass(frozen=True, slots=True)
class Options:
    """How to answer.

    method: `plain` does not draft. `lookup` proposes what came after the same tokens before, in the prompt, the answer
    so far and the answers that a profile keeps, and needs no drafter. `direct` proposes tokens that both vocabularies
    have, `ngram` also n-grams met before, `prefill` all n-grams, `text` the drafted text re-tokenised. verification:
    `compare` and `trie` leave the target's law as it is, `paper` is the paper's approximation; `text` and `lookup` go
    with `compare` only. `auto` is what measures best (docs/decisions.md): look-ups where they promise most, else `text`
    with `compare` at temperature 0, and with a seed, when the answer is plain decoding's token for token, and
    `prefill` with `trie` when sampling without one; without a drafter look-ups alone. splits: whether draft tokens that
    the target lacks are taken apart; None does so for `ngram` and `prefill`, except under `paper`, which cannot.
    k: draft tokens a step; None drafts as many as promise most tokens a second by what steps have cost and brought so
    far, none where drafting does not pay (`omnidraft.control`).
    json_schema: the answer is a JSON document of this schema (extra `grammar`). processors: logits processors of
    transformers, grammars of `omnidraft.processors`, or functions of (tokens so far, logits) that give changed ones.

    Raises:
        OptionError: a value outside its range, or values that do not go together.
    """

    method: Method = "auto"
    verification: Verification = "auto"
    splits: bool | None = None
    k: int | None = None
    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    raw: bool = False
    json_schema: str | Mapping[str, Any] | None = None
    processors: tuple[Any, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        for name, known in (("method", get_args(Method)), ("verification", get_args(Verification))):
            if getattr(self, name) not in known:
                raise OptionError(f"unknown {name} {getattr(self, name)!r}; use one of {', '.join(known)}")
        if self.method in ("auto", "plain", "lookup", "text") and self.verification in ("trie", "paper"):
            raise OptionError(
                f"method {self.method!r} cannot be verified by {self.verification!r}; "
                "use method 'direct', 'ngram' or 'prefill', or verification 'compare'"
            )
        if self.splits and (
            self.verification == "paper" or self.method in ("auto", "plain", "lookup", "text")
        ):
            raise OptionError(
                "splits are for methods direct, ngram and prefill, and not for verification 'paper'; leave them out"
            )
        if not (self.k is None or (is_count(self.k) and 1 <= self.k <= 64)):
            raise OptionError(
                f"k is {self.k!r}; it must be an integer in 1..64, or None (method='plain' does not draft)"
            )
        if not (is_count(self.max_tokens) and self.max_tokens >= 1):
            raise OptionError(f"max_tokens is {self.max_tokens!r}; it must be an integer, 1 or more")
        if isinstance(self.stop, str) or not all(isinstance(stop, str) and stop for stop in self.stop):
            raise OptionError(
                f"stop is {self.stop!r}; it must be a tuple of stop strings, none of them empty"
            )
        if self.json_schema is not None:
            from omnidraft.processors import check_schema

            check_schema(self.json_schema)

    @property
    def strategy(self) -> Strategy:
        """Method, verification and splits with nothing left to choose."""
        # A seed asks for an answer that can be had again, whatever drafts: `compare` gives plain decoding's own.
        law_aware = self.sampling.temperature > 0 and self.sampling.seed is None
        method, verification, splits = self.method, self.verification, self.splits
        if method == "auto":
            method = "prefill" if law_aware and verification == "auto" else "text"
        if verification == "auto":
            verification = "trie" if law_aware and method in ("direct", "ngram", "prefill") else "compare"
        if splits is None:
            splits = method in ("ngram", "prefill") and verification != "paper"
        return Strategy(method, verification, splits, lookup=self.method in ("auto", "lookup"))


def make_options(**options: Any) -> Options:
    """Options from flat keyword arguments; `stop` may be one string.

    Raises:
        OptionError: an unknown option, or a value outside its range.
    """
    own = {field.name for field in dataclasses.fields(Options)} - {"sampling"}
    sampling = {field.name for field in dataclasses.fields(Sampling)}
    if unknown := options.keys() - own - sampling:
        raise OptionError(
            f"unknown option {', '.join(sorted(unknown))}; known are {', '.join(sorted(own | sampling))}"
        )
    stop = options.get("stop") or ()
    options["stop"] = (stop,) if isinstance(stop, str) else _several("stop", stop)
    options["processors"] = _several("processors", options.get("processors") or ())
    return Options(
        **{name: value for name, value in options.items() if name in own},
        sampling=Sampling(**{name: value for name, value in options.items() if name in sampling}),
    )


def _several(name: str, values: Any) -> tuple[Any, ...]:
    try:
        return tuple(values)
    except TypeError as error:
        raise OptionError(f"{name} is {values!r}; pass a list") from error


def check_text(text: Any) -> None:
    """Refuse what no prompt can hold.

    Raises:
        OptionError: not text, or text that is not valid Unicode.
    """
    if not isinstance(text, str):
        raise OptionError(f"a prompt's text is a {type(text).__name__}; pass a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError("the prompt holds lone surrogates; decode it as UTF-8 first") from error


def messages_of(prompt: str | Sequence[Message]) -> list[dict[str, str]]:
    """A prompt as chat messages.

    Raises:
        OptionError: neither text nor chat messages, or an empty prompt.
    """
    try:
        messages = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        )
    except (TypeError, ValueError) as error:
        raise OptionError("the prompt is neither text nor chat messages; pass one or the other") from error
    for message in messages:
        if not {"role", "content"} <= message.keys():
            raise OptionError("a chat message lacks its role or content; give {'role': ..., 'content': ...}")
        check_text(message["role"])
        check_text(message["content"])
    if not any(message["content"] for message in messages):
        raise OptionError("the prompt is empty; give some text")
    return messages
