"""The text side of a checkpoint, the same for every engine: vocabulary, chat template, encoding."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from omnidraft.backends.architectures import context_length
from omnidraft.backends.loading import causal_config
from omnidraft.errors import OptionError, VocabularyError
from omnidraft.tekken import BOS, EOS, read_tekken
from omnidraft.vocab import Vocab


class CheckpointModel:
    """A folder with config, weights and tokenizer. An engine adds `session` (see `omnidraft.session.Model`).

    Raises:
        UnsupportedModelError: not a causal language model.
        VocabularyError: no tokenizer, or one whose tokens do not spell bytes.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.folder = folder
        self.config = causal_config(folder, name)
        self.tokenizer = _load_tokenizer(folder, name)
        self.width: int = self.config.get_text_config().vocab_size  # rows of the output embedding
        self.context_length = context_length(self.config)
        self.eos: int | list[int] | None = _generation_config(folder).eos_token_id
        self.lock = threading.Lock()  # a tokenizer of transformers sets its options on each call

    @property
    def vocab(self) -> Vocab:
        """The tokenizer's table of bytes, as wide as the model's logits."""
        with self.lock:  # one for all threads: what is kept by vocabulary would be there twice
            return self._vocab

    @cached_property
    def _vocab(self) -> Vocab:
        return _read_vocab(self.tokenizer, self.name, width=self.width, eos=self.eos)

    def chat(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None
    ) -> list[int]:
        """The messages and tools through the chat template; without a template, the messages' text in order.

        Raises:
            OptionError: the template refuses the messages (a role it does not know, roles out of turn).
        """
        if not self.tokenizer.chat_template:
            return self.encode("\n".join(message["content"] for message in messages))
        from jinja2 import TemplateError  # there is a template, so there is jinja

        try:
            with self.lock:
                text = self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(tools) if tools else None,
                    tokenize=False,
                    add_generation_prompt=True,
                )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise OptionError(
                f"{self.name}'s chat template refuses these messages ({error}); change the roles or their order"
            ) from error
        return self._tokenise(text, add_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        """Raw text as the model's tokenizer gives it, its own BOS included."""
        return self._tokenise(text)

    def _tokenise(self, text: str, **options: bool) -> list[int]:
        with self.lock:
            return list(self.tokenizer(text, **options).input_ids)


def load_vocab(folder: Path, name: str) -> Vocab:
    """The vocabulary of a checkpoint whose weights are not read. Errors as for `CheckpointModel`."""
    return CheckpointModel(folder, name).vocab


def _generation_config(folder: Path) -> Any:
    try:
        return GenerationConfig.from_pretrained(folder)
    except OSError:  # a checkpoint may lack that file; then its config says the same
        return GenerationConfig.from_pretrained(
            folder, config_file_name="config.json", _from_model_config=True
        )


def _load_tokenizer(folder: Path, name: str) -> Any:
    """The folder's tokenizer.json, or what its other files (Tekken, SentencePiece, tiktoken, BERT) convert to."""
    if (folder / "tekken.json").is_file() and not (folder / "tokenizer.json").is_file():
        return _load_tekken(folder)
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # the tokenizers library raises bare ones
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise VocabularyError(
            f"{name} has no tokenizer that transformers can load ({reason}); "
            "put the model's tokenizer.json beside its weights"
        ) from error


def _load_tekken(folder: Path) -> Any:
    """transformers converts the file too, but only where mistral-common is installed."""
    template = folder / "chat_template.jinja"
    return PreTrainedTokenizerFast(
        tokenizer_object=read_tekken(folder / "tekken.json"),
        bos_token=BOS,
        eos_token=EOS,
        chat_template=template.read_text(encoding="utf-8") if template.is_file() else None,
    )


def _read_vocab(tokenizer: Any, name: str, *, width: int, eos: int | list[int] | None) -> Vocab:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise VocabularyError(
            f"{name} has a tokenizer that transformers cannot convert ({type(tokenizer).__name__}); "
            "put its tokenizer.json beside the weights"
        )
    listed = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    own = tokenizer.eos_token_id
    return Vocab(
        backend,
        width=width,
        # Not `bos_token_id`: many families name a BOS and yet begin without one.
        bos=next(iter(tokenizer("").input_ids), None),
        eos=[*([own] if own is not None else []), *listed],
    )
