"""The transformers engine: any causal language model it can load, on CPU or CUDA, in any precision."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer
from transformers.pytorch_utils import Conv1D

from omnidraft import hub
from omnidraft.backends.architectures import cache_argument, check_architecture, context_length
from omnidraft.backends.checkpoint import CheckpointModel
from omnidraft.backends.loading import load_causal_lm
from omnidraft.errors import OptionError
from omnidraft.session import Engine, Session
from omnidraft.types import Rows, as_tokens

PRECISIONS = ("auto", "float32", "bfloat16", "float16", "mixed")
_PACKED_ROWS = 8  # the batch size oneDNN lays a weight out for; any other works too
# A smaller layer (keys and values of a small model) loses more by the call of oneDNN than packing gains.
_PACKED_SIZE = 200_000  # weights
_seen = threading.local()  # what an output layer was given last; sessions in several threads share the layer


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
            # A quantised layer may be an nn.Linear whose weight is a tensor of another class.
            if (
                type(child) is torch.nn.Linear
                and type(child.weight.data) is Tensor
                and child.weight.numel() >= _PACKED_SIZE
            ):
                setattr(parent, name, _PackedLinear(child, mixed))


class _AdaptedLinear(torch.nn.Module):
    """A linear layer and a LoRA adapter's part for it. Not merged: switching adapters then copies nothing, and
    one set of weights serves any number of them."""

    def __init__(self, inner: torch.nn.Module, down: Tensor, up: Tensor) -> None:
        super().__init__()
        self._inner = inner
        self._down = down  # [rank, in]
        self._up = up  # [out, rank], scaled

    def forward(self, x: Tensor) -> Tensor:
        linear = torch.nn.functional.linear
        whole: Tensor = self._inner(x)
        return whole + linear(linear(x, self._down), self._up)


def _width(linear: Any) -> tuple[int, int]:
    """(in, out) of a linear layer; GPT-2's are of a class of transformers' own."""
    return (linear.nx, linear.nf) if type(linear) is Conv1D else (linear.in_features, linear.out_features)


def _sharing(module: Any) -> Any:
    """A module tree of its own over the same weights."""
    twin = copy.copy(module)
    twin._modules = {name: _sharing(child) for name, child in module._modules.items()}
    return twin


def _show(layer: Any, given: tuple[Tensor, ...]) -> None:
    _seen.hidden = given[0]


class HuggingFaceSession(Session):
    """One KV cache of a transformers model; see `omnidraft.session.Session`."""

    def __init__(self, module: Any) -> None:
        self.tokens = as_tokens()
        self.seconds = 0.0
        self._module = module
        self._hidden: Tensor | None = None
        self._cache = Cache(layer_class_to_replicate=_RewindableLayer)
        self._cache_argument = {cache_argument(module): self._cache}

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

    @property
    def hidden(self) -> Rows:
        """See `omnidraft.session.Session`; a module of the caller's does not show it."""
        if self._hidden is None:
            return super().hidden
        hidden: Rows = self._hidden.float().cpu().numpy()
        return hidden

    @torch.inference_mode()
    def _pass(self, tokens: Sequence[int], rows: int) -> Rows:
        _seen.hidden = None
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
        self._hidden = None if _seen.hidden is None else _seen.hidden[0]
        needed: Rows = logits[len(logits) - rows :].float().cpu().numpy()
        return needed


class HuggingFaceModel(CheckpointModel):
    """A transformers checkpoint; see `omnidraft.session.Model`.

    Raises:
        OptionError: an unknown precision.
        VocabularyError: no tokenizer, or one whose tokens do not spell bytes.
        UnsupportedModelError: not a causal language model, or one whose state cannot be rewound.
        DamagedFileError: weights that are unreadable, missing, or of another shape than config.json says.
    """

    def __init__(self, folder: Path, *, name: str, precision: str = "auto", device: str = "auto") -> None:
        self.device = resolve_device(device)
        self.dtype = resolve_dtype(precision, self.device)
        super().__init__(folder, name)
        check_architecture(self.config, name)
        self.module = load_causal_lm(folder, name, self.dtype, self.device).eval()
        self.module.requires_grad_(False)
        if self.device == "cpu" and self.dtype == torch.float32 and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            _pack(self.module, mixed=precision == "mixed")
        self.module.get_output_embeddings().register_forward_pre_hook(_show)
        stored = "mixed" if precision == "mixed" and self.dtype == torch.float32 else str(self.dtype)
        self.engine = Engine("transformers", stored.removeprefix("torch."), self.device)

    @classmethod
    def of(cls, module: Any, tokenizer: Any) -> HuggingFaceModel:
        """A model of the caller's: it is not packed, moved, frozen, or changed in any other way.

        Raises:
            UnsupportedModelError: its state cannot be rewound.
        """
        model = cls.__new__(cls)
        model.config = module.config
        model.name = module.config.name_or_path or type(module).__name__
        check_architecture(module.config, model.name)
        model.module, model.tokenizer = module, tokenizer
        model.device, model.dtype = str(module.device), module.dtype
        model.width = module.config.get_text_config().vocab_size
        model.context_length = context_length(module.config)
        model.eos = module.generation_config.eos_token_id
        model.engine = Engine("transformers", str(model.dtype).removeprefix("torch."), model.device)
        model.lock = threading.Lock()
        return model

    def session(self) -> HuggingFaceSession:
        """A new, empty KV cache."""
        return HuggingFaceSession(self.module)

    def adapted(self, adapter: Mapping[str, NDArray[Any]], scale: float = 1.0) -> HuggingFaceModel:
        """This model with a LoRA adapter: another Model over the same weights, which stay as they are.

        `adapter`: matrices by PEFT's names, `...NAME.lora_A.weight` [rank, in] and `...NAME.lora_B.weight`
        [out, rank]; `scale`: alpha / rank.

        Raises:
            OptionError: the adapter is of another model.
        """
        twin = copy.copy(self)
        twin.module = _sharing(self.module)
        for name, down in adapter.items():
            if ".lora_A." not in name:
                continue
            path = name.split(".lora_A.")[0].removeprefix("base_model.model.")
            parent, _, own = path.rpartition(".")
            try:
                inner = twin.module.get_submodule(path)
                up = adapter[name.replace(".lora_A.", ".lora_B.")]
                fits = _width(inner) == (down.shape[1], up.shape[0])
            except (AttributeError, KeyError):
                fits = False
            if not fits:
                raise OptionError(
                    f"the adapter's {path} does not fit {self.name}; choose the adapter of this drafter"
                )
            layer = _AdaptedLinear(inner, self._tensor(down), self._tensor(up * np.float32(scale)))
            setattr(twin.module.get_submodule(parent), own, layer)
        return twin

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, self.dtype)


def check(precision: str, device: str, settings: Mapping[str, str]) -> None:
    """Refuse what `load` would, before anything is fetched.

    Raises:
        OptionError: an unknown precision or device, or a setting: this engine has none.
    """
    resolve_dtype(precision, resolve_device(device))
    if settings:
        raise OptionError(f"engine transformers has no setting {next(iter(settings))!r}; leave it out")


def load(
    name: str, *, precision: str, device: str, drafts: bool, settings: Mapping[str, str]
) -> HuggingFaceModel:
    """The model of that name; `auto` precision is `mixed` for one that drafts. Errors as in `check` and `hub.pull`."""
    check(precision, device, settings)
    if precision == "auto" and drafts:
        precision = "mixed"
    return HuggingFaceModel(hub.pull(name), name=name, precision=precision, device=device)


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


def resolve_dtype(precision: str, device: str) -> torch.dtype:
    """`auto` is bfloat16 where the machine multiplies it in hardware, else float32.

    `mixed` is for drafters: bfloat16 on such a machine; elsewhere float32, except that passes over a single token,
    which is what drafting consists of, read weights in bfloat16. A target's passes must all round alike.

    Raises:
        OptionError: an unknown precision.
    """
    if precision not in PRECISIONS:
        raise OptionError(f"unknown precision {precision!r}; use one of {', '.join(PRECISIONS)}")
    if precision in ("auto", "mixed"):
        fast = torch.cuda.is_bf16_supported() if device.startswith("cuda") else _cpu_has_bfloat16()
        precision = "bfloat16" if fast else "float32"
    resolved: torch.dtype = getattr(torch, precision)
    return resolved


def _cpu_has_bfloat16() -> bool:
    try:
        return "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
