"""The transformers engine: any causal language model it can load, on CPU or CUDA, in any dtype."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from transformers.cache_utils import Cache, DynamicLayer

from omnidraft.errors import OptionError, VocabularyError
from omnidraft.tekken import BOS, EOS, read_tekken
from omnidraft.types import Rows, as_tokens
from omnidraft.vocab import Vocab

DTYPES = ("auto", "float32", "bfloat16", "float16", "mixed")
_PACKED_ROWS = 8  # the batch size oneDNN lays a weight out for; any other works too
# A smaller layer (keys and values of a small model) loses more by the call of oneDNN than packing gains.
_PACKED_SIZE = 200_000  # weights


class _RewindableLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values in a buffer that grows by doubling: appending copies only what is new, and forgetting
    is a smaller length. Sliding-window layers keep everything too; the model's mask does the windowing."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.length = 0
        self._buffers = [key_states[..., :0, :], value_states[..., :0, :]]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        for i, new in enumerate((key_states, value_states)):
            if end > self._buffers[i].shape[-2]:
                grown = new.new_empty(*new.shape[:-2], max(256, 2 * end), new.shape[-1])
                grown[..., : self.length, :] = self._buffers[i][..., : self.length, :]
                self._buffers[i] = grown
            self._buffers[i][..., self.length : end, :] = new
        self.length = end
        self.keys, self.values = (buffer[..., :end, :] for buffer in self._buffers)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length if self.is_initialized else 0

    def truncate(self, length: int) -> None:
        """Forget: the next `update` writes over what is behind. No views yet, which cost more than all the rest."""
        if self.is_initialized:
            self.length = min(length, self.length)


class _PackedLinear(torch.nn.Module):
    """A float32 linear layer for inference on a CPU, its weight in oneDNN's own blocked layout.

    torch multiplies a few rows through a BLAS made for many: a pass over 5 tokens costs three of one token.
    With the weight packed once, by the operator that torch.compile uses too, it costs little more than one.
    """

    def __init__(self, linear: torch.nn.Linear, mixed: bool) -> None:
        """`mixed`: multiply a single token in bfloat16, which reads half the memory (see `resolve_dtype`)."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._single = linear.weight.detach().bfloat16() if mixed and linear.bias is None else None
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _PACKED_ROWS)

    def forward(self, x: Tensor) -> Tensor:
        if self._single is not None and x.shape[-2] == 1:
            return torch.nn.functional.linear(x.bfloat16(), self._single).float()
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return product


def _pack(module: Any, mixed: bool) -> None:
    """Replace every large linear layer inside by its packed form. Inference only: there is no weight left to train."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and child.weight.numel() >= _PACKED_SIZE:
                setattr(parent, name, _PackedLinear(child, mixed))


class HuggingFaceSession:
    """One KV cache of a transformers model; see `omnidraft.session.Session`."""

    def __init__(self, module: Any) -> None:
        self.tokens = as_tokens()
        self.seconds = 0.0
        self._module = module
        self._cache = Cache(layer_class_to_replicate=_RewindableLayer)
        # transformers renamed the argument in 5.2x
        parameters = inspect.signature(module.forward).parameters
        self._cache_argument = {"cache" if "cache" in parameters else "past_key_values": self._cache}

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        del self.tokens[length:]
        for layer in self._cache.layers:
            layer.truncate(length)

    def extend(self, tokens: Sequence[int], rows: int) -> Rows:
        """Append tokens in one pass; return the logits after the last `rows` of them. [rows, V] float32"""
        start = perf_counter()
        try:
            return self._pass(tokens, rows)
        finally:
            self.seconds += perf_counter() - start

    @torch.inference_mode()
    def _pass(self, tokens: Sequence[int], rows: int) -> Rows:
        try:
            logits: Tensor = self._module(
                input_ids=torch.tensor([list(tokens)], device=self._module.device),
                use_cache=True,
                logits_to_keep=max(rows, 1),
                **self._cache_argument,
            ).logits[0]
        except BaseException:
            self.truncate(len(self.tokens))  # a Ctrl-C in the middle of a pass leaves some layers longer
            raise
        self.tokens.extend(tokens)
        needed: Rows = logits[len(logits) - rows :].float().cpu().numpy()
        return needed


class HuggingFaceModel:
    """A transformers checkpoint; see `omnidraft.session.Model`.

    Raises:
        OptionError: an unknown dtype, or a model whose state cannot be rewound.
        VocabularyError: no tokenizer, or one whose tokens do not spell bytes.
    """

    def __init__(self, folder: Path, *, name: str, dtype: str = "auto", device: str = "auto") -> None:
        self.name = name
        self.device = resolve_device(device)
        self.dtype = resolve_dtype(dtype, self.device)
        self.tokenizer = _load_tokenizer(folder, name)
        self.module = AutoModelForCausalLM.from_pretrained(folder, dtype=self.dtype).to(self.device).eval()
        self.module.requires_grad_(False)
        self._width: int = self.module.get_output_embeddings().weight.shape[0]
        if self.device == "cpu" and self.dtype == torch.float32 and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            _pack(self.module, mixed=dtype == "mixed")
        if getattr(self.module, "_is_stateful", False):
            raise OptionError(
                f"{name} keeps a recurrent state that cannot be rewound after a rejection; choose a model with "
                "attention layers only"
            )
        config = self.module.config.get_text_config()
        self.context_length: int = getattr(config, "max_position_embeddings", None) or 2**31

    @cached_property
    def vocab(self) -> Vocab:
        """The tokenizer's table of bytes, as wide as the model's logits."""
        eos = self.module.generation_config.eos_token_id
        return _read_vocab(self.tokenizer, self.name, width=self._width, eos=eos)

    def session(self) -> HuggingFaceSession:
        """A new, empty KV cache."""
        return HuggingFaceSession(self.module)

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The messages through the chat template; without a template, their text in order.

        Raises:
            OptionError: the template refuses the messages (a role it does not know, roles out of turn).
        """
        if not self.tokenizer.chat_template:
            return self.encode("\n".join(message["content"] for message in messages))
        from jinja2 import TemplateError  # there is a template, so there is jinja

        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise OptionError(
                f"{self.name}'s chat template refuses these messages ({error}); change the roles or their order"
            ) from error
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def encode(self, text: str) -> list[int]:
        """Raw text as the model's tokenizer gives it, its own BOS included."""
        return list(self.tokenizer(text).input_ids)


def load_vocab(folder: Path, name: str) -> Vocab:
    """`HuggingFaceModel.vocab` of a checkpoint whose weights are not read.

    Raises:
        VocabularyError: as for `HuggingFaceModel`.
    """
    tokenizer = _load_tokenizer(folder, name)
    try:
        generation = GenerationConfig.from_pretrained(folder)
    except OSError:  # a checkpoint may lack that file; then, as for a model, its config says the same
        generation = GenerationConfig.from_pretrained(
            folder, config_file_name="config.json", _from_model_config=True
        )
    width = AutoConfig.from_pretrained(folder).get_text_config().vocab_size  # rows of the output embedding
    return _read_vocab(tokenizer, name, width=width, eos=generation.eos_token_id)


def _load_tokenizer(folder: Path, name: str) -> Any:
    """The folder's tokenizer.json, or what its other files (Tekken, SentencePiece, tiktoken, BERT) convert to."""
    try:
        if (folder / "tekken.json").is_file() and not (folder / "tokenizer.json").is_file():
            return _load_tekken(folder)
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, ImportError) as error:
        raise VocabularyError(
            f"{name} has no tokenizer that transformers can load ({str(error).strip().splitlines()[0]}); "
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


def resolve_device(device: str) -> str:
    """`auto` is CUDA where there is any.

    Raises:
        OptionError: a device that torch does not know or that is not here.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise OptionError(f"device {device!r} cannot be used ({reason}); use 'cpu' or 'auto'") from error
    return device


def resolve_dtype(dtype: str, device: str) -> torch.dtype:
    """`auto` is bfloat16 where the machine multiplies it in hardware, else float32.

    `mixed` is for drafters: bfloat16 on such a machine; elsewhere float32, except that passes over a single token,
    which is what drafting consists of, read weights in bfloat16. A target's passes must all round alike.

    Raises:
        OptionError: an unknown dtype.
    """
    if dtype not in DTYPES:
        raise OptionError(f"unknown dtype {dtype!r}; use one of {', '.join(DTYPES)}")
    if dtype in ("auto", "mixed"):
        fast = torch.cuda.is_bf16_supported() if device.startswith("cuda") else _cpu_has_bfloat16()
        dtype = "bfloat16" if fast else "float32"
    resolved: torch.dtype = getattr(torch, dtype)
    return resolved


def _cpu_has_bfloat16() -> bool:
    try:
        return "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
