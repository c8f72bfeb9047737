"""The text side of a GGUF file: vocabulary, chat template, encoding. Needs neither torch nor transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from omnidraft.errors import OptionError
from omnidraft.gguf_file import Gguf
from omnidraft.gguf_tokenizer import build_tokenizer
from omnidraft.vocab import Vocab


class GgufModel:
    """What a GGUF file says of its model. An engine adds `session` (see `omnidraft.session.Model`).

    Raises:
        VocabularyError: a kind of tokenizer that we cannot build.
    """

    def __init__(self, facts: Gguf, name: str) -> None:
        self.name = name
        self.context_length: int = facts.context_length
        self._facts = facts
        self._tokenizer = build_tokenizer(facts, name)

    @cached_property
    def vocab(self) -> Vocab:
        """The tokenizer's table of bytes, as wide as the model's logits."""
        return Vocab(
            self._tokenizer,
            width=len(self._facts.tokens),
            bos=next(iter(self.encode("")), None),
            eos=self._facts.ends,
        )

    def chat(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None
    ) -> list[int]:
        """The messages and tools through the chat template; without a template, the messages' text in order.

        Raises:
            OptionError: the template refuses the messages (a role it does not know, roles out of turn).
        """
        if not self._facts.chat_template:
            return self.encode("\n".join(message["content"] for message in messages))
        specials = {"bos": self._facts.bos, "eos": self._facts.eos, "unk": self._facts.unknown}
        try:
            text = (
                _environment()
                .from_string(self._facts.chat_template)
                .render(
                    messages=list(messages),
                    tools=list(tools) if tools else None,
                    documents=None,
                    add_generation_prompt=True,
                    **{f"{role}_token": token for role, token in specials.items() if token is not None},
                )
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise OptionError(
                f"{self.name}'s chat template refuses these messages ({error}); change the roles or their order"
            ) from error
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode(self, text: str) -> list[int]:
        """Raw text as the model's tokenizer gives it, its own BOS included."""
        return list(self._tokenizer.encode(text).ids)


class _Generation(Extension):  # type: ignore[misc]
    """`{% generation %}` marks what a model wrote, for training; here it is nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        body: list[Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def _environment() -> ImmutableSandboxedEnvironment:
    """What chat templates are written for: the environment of transformers' `apply_chat_template`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    environment.filters["tojson"] = to_json  # jinja's own escapes HTML
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
