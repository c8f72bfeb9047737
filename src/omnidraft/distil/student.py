"""The drafter itself: a parent's layers and a part of its embedding, and the folder it is kept in."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer

from omnidraft.backends.loading import load_causal_lm
from omnidraft.distil.trim import choose_tokens, trimmed
from omnidraft.errors import OptionError, UnsupportedModelError

_TEXT_FILES = ("tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
_RIDGE = 0.01  # of the mean diagonal
_TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load_parent(folder: Path, name: str, device: str = "cpu") -> Any:
    """The parent in float32, frozen.

    Raises:
        UnsupportedModelError: a model whose layers are not a plain stack, or that cannot be loaded.
    """
    parent = load_causal_lm(folder, name, torch.float32, device).eval().requires_grad_(False)
    if not isinstance(getattr(parent.get_decoder(), "layers", None), torch.nn.ModuleList):
        raise UnsupportedModelError(
            f"{name} ({parent.config.model_type}) is no plain stack of layers; choose a model like Llama as parent"
        )
    return parent


class Student(torch.nn.Module):
    """A drafter in training: a model that ends in the parent's frozen embedding, and a translator in front of that.

    After few layers the hidden state is not yet what the embedding reads; one matrix makes most of the difference
    (the "tuned lens" of Belrose et al. 2023, arXiv 2303.08112), and can be solved for before any training.
    """

    def __init__(self, parent: Any, layers: Sequence[int], kept: Sequence[int] | None) -> None:
        """`layers`: the parent's, copied; `kept`: rows of its embedding, None for all."""
        super().__init__()
        self.model = _cut_model(parent, layers, kept)
        size = self.model.get_output_embeddings().weight.shape[1]
        self.translator = torch.nn.Linear(size, size, bias=False, device=parent.device)
        torch.nn.init.eye_(self.translator.weight)

    def hidden(self, tokens: Tensor) -> Tensor:  # [n, length] -> [n, length, size]
        """What the output layer is given."""
        decoded = self.model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
        return self.translator(decoded)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """The output layer. [..., size] -> [..., V]"""
        return self.model.get_output_embeddings()(hidden)  # type: ignore[no-any-return]

    @torch.no_grad()
    def fit(self, parent: Any, kept: Sequence[int] | None, batches: Iterable[Tensor]) -> None:
        """Solve for the translator that comes closest to the parent's last hidden state (ridge regression)."""
        size = self.translator.weight.shape[0]
        inner = torch.zeros(size, size, dtype=torch.float64, device=parent.device)
        outer = torch.zeros_like(inner)
        rows = None if kept is None else torch.tensor(kept, device=parent.device)
        for tokens in batches:
            decoder = self.model.get_decoder()
            own = decoder(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1).double()
            known = tokens if rows is None else rows[tokens]
            theirs = parent.get_decoder()(input_ids=known, use_cache=False).last_hidden_state.flatten(0, 1)
            inner += own.T @ own
            outer += own.T @ theirs.double()
        inner.diagonal().add_(_RIDGE * inner.diagonal().mean())
        self.translator.weight.copy_(torch.linalg.solve(inner, outer).T)

    @torch.no_grad()
    def save(self, folder: Path) -> None:
        """An ordinary checkpoint in bfloat16: the translator goes into an output layer of its own."""
        config = copy.deepcopy(self.model.config)
        config.tie_word_embeddings = False
        config.dtype = torch.bfloat16
        weights = {
            name: weight for name, weight in self.model.state_dict().items() if not name.startswith("lm_head")
        }
        weights["lm_head.weight"] = self.model.get_output_embeddings().weight @ self.translator.weight
        unfinished = folder / "unfinished"
        unfinished.mkdir(exist_ok=True)
        save_file(
            {name: weight.to("cpu", torch.bfloat16).contiguous() for name, weight in weights.items()},
            unfinished / "model.safetensors",
            metadata={"format": "pt"},
        )
        config.save_pretrained(unfinished)
        self.model.generation_config.save_pretrained(unfinished)
        for file in sorted(unfinished.iterdir()):
            os.replace(file, folder / file.name)
        unfinished.rmdir()


def _cut_model(parent: Any, layers: Sequence[int], kept: Sequence[int] | None) -> Any:
    """The parent's class with some of its layers; of all weights only those of layers and norms can be trained."""
    config = copy.deepcopy(parent.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in layers]
    if kept is not None:
        config.vocab_size = len(kept)
        _renumber(config, kept)
    model = type(parent)(config).to(parent.device)
    own, others = model.get_decoder(), parent.get_decoder()
    for new, old in enumerate(layers):
        own.layers[new].load_state_dict(others.layers[old].state_dict())
    own.norm.load_state_dict(others.norm.state_dict())
    rows = slice(None) if kept is None else torch.tensor(kept, device=parent.device)
    with torch.no_grad():
        for mine, theirs in (
            (model.get_input_embeddings(), parent.get_input_embeddings()),
            (model.get_output_embeddings(), parent.get_output_embeddings()),
        ):
            mine.weight.copy_(theirs.weight[rows])
            mine.requires_grad_(False)
    if parent.generation_config is not None:
        model.generation_config = copy.deepcopy(parent.generation_config)
        if kept is not None:
            _renumber(model.generation_config, kept)
    return model


def _renumber(config: Any, kept: Sequence[int]) -> None:
    new = {old: i for i, old in enumerate(kept)}
    for field in _TOKEN_FIELDS:
        value = getattr(config, field, None)
        if isinstance(value, list):
            setattr(config, field, [new[token] for token in value])
        elif value is not None:
            setattr(config, field, new[value])


def write_text_files(
    parent_folder: Path, folder: Path, texts: Iterable[str], trim: int | None
) -> list[int] | None:
    """Put the parent's tokenizer in `folder`, cut down to the `trim` most frequent tokens of `texts`; return which.

    Raises:
        OptionError: a vocabulary that cannot be trimmed (see `choose_tokens`).
    """
    copy_text_files(parent_folder, folder)
    source = parent_folder / "tokenizer.json"
    if trim is None:
        shutil.copy(source, folder)
        return None
    from tokenizers import Tokenizer

    contents = json.loads(source.read_text(encoding="utf-8"))
    whole = Tokenizer.from_file(str(source))
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(whole.encode(text, add_special_tokens=False).ids)
    kept = choose_tokens(contents, counts, trim)
    write_trimmed(contents, kept, folder)
    return kept


def copy_text_files(parent_folder: Path, folder: Path) -> None:
    """All of the parent's text side but the vocabulary itself."""
    for name in _TEXT_FILES:
        if (parent_folder / name).is_file():
            shutil.copy(parent_folder / name, folder)


def write_trimmed(contents: dict[str, Any], kept: Sequence[int], folder: Path) -> None:
    """tokenizer.json with the kept tokens of the parent's `contents`."""
    smaller = json.dumps(trimmed(contents, kept), ensure_ascii=False)
    (folder / "tokenizer.json").write_text(smaller, encoding="utf-8")


def load_tokenizer(folder: Path) -> Any:
    """A drafter's tokenizer, as transformers has it.

    Raises:
        OptionError: one without an end of text.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.eos_token_id is None:
        raise OptionError("the parent's tokenizer has no end-of-text token; choose another parent")
    return tokenizer
