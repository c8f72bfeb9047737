"""The llama.cpp engine: a GGUF file as it is, on a CPU or offloaded to a GPU, by llama-cpp-python's C functions."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np

from omnidraft import hub
from omnidraft.backends.gguf_model import GgufModel
from omnidraft.errors import (
    ContextLengthError,
    DamagedFileError,
    InsufficientMemoryError,
    OptionError,
    UnsupportedModelError,
)
from omnidraft.gguf_file import Gguf, read_gguf
from omnidraft.session import Engine, Session
from omnidraft.types import Rows, as_tokens

PRECISIONS = ("auto",)  # what the file holds
_BATCH = 512  # tokens of one call: as many as a chunk of `feed`
_ROWS = 64  # logits of one call: the engine sets memory aside for so many
_FIRST_CONTEXT = 4096  # tokens that a KV cache has room for at first
_CACHE_TYPES = {  # name -> (llama.cpp's number, bytes a value)
    "f32": (llama.GGML_TYPE_F32, 4.0),
    "f16": (llama.GGML_TYPE_F16, 2.0),
    "q8_0": (llama.GGML_TYPE_Q8_0, 34 / 32),
}
_FLASH_ATTENTION = {
    "auto": llama.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": llama.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": llama.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
_RECURRENT = re.compile(r"\.(ssm|wkv|shortconv|kda)\.")  # fields of a GGUF file: such layers keep a state
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """llama.cpp's own settings, by its own names.

    n_ctx: tokens of a KV cache; 0 lets it grow up to the model's context. n_gpu_layers: layers on the GPU where
    there is one; -1 is all. n_threads: 0 is OMP_NUM_THREADS, else as many as this process has cores. use_mmap: read
    the file in place rather than copy it. flash_attn: auto, on, off. cache_type: of a KV cache: f32, f16, q8_0.

    Raises:
        OptionError: a value outside its range.
    """

    n_ctx: int = 0
    n_gpu_layers: int = -1
    n_threads: int = 0
    use_mmap: bool = True
    flash_attn: str = "auto"
    cache_type: str = "f16"

    def __post_init__(self) -> None:
        for name, least in (("n_ctx", 0), ("n_gpu_layers", -1), ("n_threads", 0)):
            if getattr(self, name) < least:
                raise OptionError(f"llamacpp's {name} is {getattr(self, name)}; it must be {least} or more")
        for name, known in (("flash_attn", _FLASH_ATTENTION), ("cache_type", _CACHE_TYPES)):
            if getattr(self, name) not in known:
                raise OptionError(
                    f"llamacpp's {name} is {getattr(self, name)!r}; use one of {', '.join(known)}"
                )

    @classmethod
    def parse(cls, settings: Mapping[str, str], device: str = "auto") -> Settings:
        """Settings from text; `device` "cpu" keeps all layers off the GPU.

        Raises:
            OptionError: a setting that is unknown or outside its range, or a GPU that this build cannot use.
        """
        kinds: dict[str, Any] = {field.name: type(field.default) for field in fields(cls)}
        if unknown := settings.keys() - kinds.keys():
            raise OptionError(f"llamacpp has no setting {min(unknown)!r}; known are {', '.join(kinds)}")
        values: dict[str, Any] = {}
        for name, text in settings.items():
            try:
                values[name] = _BOOLEANS[str(text).lower()] if kinds[name] is bool else kinds[name](text)
            except (KeyError, ValueError) as error:
                kind = "true or false" if kinds[name] is bool else "a whole number"
                raise OptionError(f"llamacpp's {name} is {text!r}; it must be {kind}") from error
        if device not in ("auto", "cpu") and not llama.llama_supports_gpu_offload():
            raise OptionError(
                f"this build of llama.cpp cannot use device {device!r}; use 'cpu', or install llama-cpp-python "
                "with CMAKE_ARGS=-DGGML_CUDA=on"
            )
        parsed = cls(**values)
        return replace(parsed, n_gpu_layers=0) if device == "cpu" else parsed

    @property
    def on_gpu(self) -> bool:
        """Whether any layer goes to a GPU."""
        return self.n_gpu_layers != 0 and bool(llama.llama_supports_gpu_offload())

    @property
    def threads(self) -> int:
        """How many threads compute."""
        of_openmp = re.match(r"\s*(\d+)", os.environ.get("OMP_NUM_THREADS", ""))
        return self.n_threads or int(of_openmp[1] if of_openmp else 0) or _cores()


def check(precision: str, device: str, settings: Mapping[str, str]) -> None:
    """Refuse bad options before anything is fetched.

    Raises:
        OptionError: a precision, device or setting that the engine does not know or that is not here.
    """
    if precision not in PRECISIONS:
        raise OptionError(
            f"llamacpp has no precision {precision!r}; it runs a GGUF file as it is, so name another file"
        )
    Settings.parse(settings, device)


def load(
    name: str, *, precision: str, device: str, drafts: bool, settings: Mapping[str, str]
) -> LlamaCppModel:
    """The model in the GGUF file that `name` means, fetched on first use.

    Raises:
        UnsupportedModelError: no GGUF file, or one that llama.cpp or the rewinding of a KV cache cannot do.
        OmniDraftError: as for `check` and `hub.pull`.
    """
    return LlamaCppModel(hub.pull_gguf(name), name=name, settings=Settings.parse(settings, device))


class LlamaCppModel(GgufModel):
    """A GGUF file run by llama.cpp; see `omnidraft.session.Model`.

    Raises:
        DamagedFileError: not a GGUF file, or one that is cut short.
        UnsupportedModelError: a family that llama.cpp does not know, or whose state cannot be rewound.
        InsufficientMemoryError: file and KV cache exceed the memory that is free.
        VocabularyError: a kind of tokenizer that we cannot build.
    """

    def __init__(self, file: Path, *, name: str, settings: Settings | None = None) -> None:
        self.settings = settings = settings or Settings()
        facts = read_gguf(file)
        if any(_RECURRENT.search(field) for field in facts.fields):
            raise _not_rewindable(name)
        self._cache_bytes = _cache_bytes(facts, settings)
        if not settings.on_gpu:
            first = min(facts.context_length, settings.n_ctx or _FIRST_CONTEXT)
            _require_memory(name, file.stat().st_size + int(first * self._cache_bytes))
        super().__init__(facts, name)
        self.handle = _load(file, name, settings)
        weakref.finalize(self, llama.llama_model_free, self.handle)
        self.width = len(facts.tokens)
        self.context_length = min(facts.context_length, settings.n_ctx or facts.context_length)
        kind = llama.llama_ftype_name(llama.llama_model_ftype(self.handle)) or b"unknown"
        self.engine = Engine("llamacpp", kind.decode(), "gpu" if settings.on_gpu else "cpu")

    def session(self) -> LlamaCppSession:
        """A new, empty KV cache.

        Raises:
            OptionError: llama.cpp refuses the settings.
        """
        return LlamaCppSession(self)

    def new_context(self, room: int) -> Context:
        """A KV cache with room for that many tokens."""
        if not self.settings.on_gpu:
            _require_memory(self.name, int(room * self._cache_bytes))
        return Context(self, room)

    def room(self, needed: int, now: int) -> int:
        """How many tokens a KV cache of `now` is to have room for, so that `needed` fit.

        Raises:
            ContextLengthError: more than the model, or the setting n_ctx, allows.
        """
        if needed > self.context_length:
            raise ContextLengthError(
                f"{needed} tokens do not fit the {self.context_length} of {self.name}; shorten the prompt, or set "
                "llamacpp's n_ctx to more if the model has more"
            )
        first = self.settings.n_ctx or _FIRST_CONTEXT
        return min(self.context_length, max(2 * now, needed, first))


class LlamaCppSession(Session):
    """One KV cache of a llama.cpp model; see `omnidraft.session.Session`."""

    def __init__(self, model: LlamaCppModel) -> None:
        self.tokens = as_tokens()
        self.seconds = 0.0
        self._model = model
        self._context = model.new_context(model.room(0, now=0))

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        self._context.truncate(length)
        del self.tokens[length:]

    def extend(self, tokens: Sequence[int], rows: int) -> Rows:
        """Append tokens in one pass; return the logits after the last `rows` of them. [rows, V] float32

        Raises:
            ContextLengthError: more tokens than the model's context holds.
            InsufficientMemoryError: the KV cache cannot grow.
        """
        start = perf_counter()
        try:
            return self._pass(tokens, rows)
        finally:
            self.seconds += perf_counter() - start

    def _pass(self, tokens: Sequence[int], rows: int) -> Rows:
        needed = len(self.tokens) + len(tokens)
        if needed > self._context.room:
            grown = self._model.new_context(self._model.room(needed, now=self._context.room))
            grown.copy_from(self._context)
            self._context = grown
        logits = np.empty((rows, self._model.width), dtype=np.float32)
        ids = as_tokens(tokens)
        first = len(ids) - rows  # of the tokens whose logits are wanted
        start = 0
        try:
            while start < len(ids):
                end = min(start + _BATCH, len(ids), max(start, first) + _ROWS)
                self._context.decode(ids[start:end], logits[max(start - first, 0) : max(end - first, 0)])
                start = end
        except BaseException:
            self._context.truncate(len(self.tokens))  # a Ctrl-C comes after the pass it meant to interrupt
            raise
        self.tokens.extend(ids)
        return logits


class Context:
    """llama.cpp's context: a KV cache with room for `room` tokens, and the memory that passes need."""

    def __init__(self, model: LlamaCppModel, room: int) -> None:
        settings = model.settings
        parameters = llama.llama_context_default_params()
        parameters.n_ctx = room
        parameters.n_batch = parameters.n_ubatch = _BATCH
        parameters.n_outputs_max = _ROWS
        parameters.n_threads = parameters.n_threads_batch = settings.threads
        parameters.flash_attn_type = _FLASH_ATTENTION[settings.flash_attn]
        parameters.type_k = parameters.type_v = _CACHE_TYPES[settings.cache_type][0]
        parameters.swa_full = True  # without it a sliding window's tokens are gone when the cache is cut
        self.room = room
        self._model = model  # must outlive the context
        _messages.clear()
        self._handle = llama.llama_init_from_model(model.handle, parameters)
        if self._handle is None:
            raise OptionError(
                f"llama.cpp cannot make a KV cache for {model.name} ({_messages.error}); change its settings"
            )
        weakref.finalize(self, llama.llama_free, self._handle)
        self._memory = llama.llama_get_memory(self._handle)

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        if not llama.llama_memory_seq_rm(self._memory, 0, length, -1):
            raise UnsupportedModelError("llama.cpp cannot rewind this model's state; choose another model")

    def decode(self, ids: Any, logits: Rows) -> None:
        """Append at most _BATCH tokens; write the logits after the last ones. ids: array of int, logits: [rows, V]"""
        wanted = (ctypes.c_int8 * len(ids))(*[0] * (len(ids) - len(logits)), *[1] * len(logits))
        batch = llama.llama_batch(
            n_tokens=len(ids),
            token=ctypes.cast(ids.buffer_info()[0], ctypes.POINTER(ctypes.c_int32)),
            logits=wanted,
        )
        _messages.clear()
        if status := llama.llama_decode(self._handle, batch):
            raise InsufficientMemoryError(
                f"llama.cpp's pass over {len(ids)} tokens failed with {status} ({_messages.error}); "
                "set llamacpp's n_ctx to less, or choose a smaller model"
            )
        source = llama.llama_get_logits(self._handle)  # waits for the pass to end
        if len(logits):
            ctypes.memmove(logits.ctypes.data, source, logits.nbytes)

    def copy_from(self, other: Context) -> None:
        """Hold what another, smaller context holds."""
        size = llama.llama_state_seq_get_size(other._handle, 0)
        state = (ctypes.c_uint8 * size)()
        llama.llama_state_seq_get_data(other._handle, state, size, 0)
        if not llama.llama_state_seq_set_data(self._handle, state, size, 0):
            raise InsufficientMemoryError(
                f"llama.cpp cannot move its KV cache into a larger one ({_messages.error}); set llamacpp's n_ctx"
            )


def _load(file: Path, name: str, settings: Settings) -> Any:
    parameters = llama.llama_model_default_params()
    parameters.n_gpu_layers = settings.n_gpu_layers
    parameters.load_mode = llama.LLAMA_LOAD_MODE_MMAP if settings.use_mmap else llama.LLAMA_LOAD_MODE_NONE
    _messages.clear()
    handle = llama.llama_model_load_from_file(os.fsencode(file), parameters)
    if handle is None:
        if "corrupted" in _messages.error:
            raise DamagedFileError(
                f"llama.cpp cannot load {name} ({_messages.error}); fetch or export the file again"
            )
        raise UnsupportedModelError(
            f"llama.cpp cannot load {name} ({_messages.error}); update llama-cpp-python, choose another model, or use "
            "the engine 'transformers'"
        )
    refusal = None
    if llama.llama_model_is_recurrent(handle) or llama.llama_model_is_hybrid(handle):
        refusal = _not_rewindable(name)
    elif llama.llama_model_has_encoder(handle) or llama.llama_model_is_diffusion(handle):
        refusal = UnsupportedModelError(f"{name} does not write token by token; choose a decoder-only model")
    if refusal:
        llama.llama_model_free(handle)
        raise refusal
    return handle


def _not_rewindable(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} keeps a recurrent state that cannot be rewound after a rejection; choose a model with attention "
        "layers only"
    )


def _cache_bytes(facts: Gguf, settings: Settings) -> float:
    """Bytes of keys and values a token."""
    layers: int = facts.of_architecture("block_count", 0)
    heads = facts.of_architecture("attention.head_count", 1)
    of_keys = facts.of_architecture("attention.head_count_kv", heads)
    total = sum(of_keys) if isinstance(of_keys, list) else layers * of_keys
    most = max(heads) if isinstance(heads, list) else heads
    size = facts.of_architecture("embedding_length", 0) // most
    key = facts.of_architecture("attention.key_length", size)
    value = facts.of_architecture("attention.value_length", size)
    return float(total * (key + value) * _CACHE_TYPES[settings.cache_type][1])


def _require_memory(name: str, needed: int) -> None:
    free = _free_memory()
    if free is not None and needed > free:
        raise InsufficientMemoryError(
            f"{name} needs {needed / 1e9:.1f} GB of memory for weights and KV cache, and {free / 1e9:.1f} GB are free; "
            "choose a smaller model or quantisation, or set llamacpp's n_ctx to less"
        )


def _free_memory() -> int | None:
    """Bytes that can be had without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Messages:
    """llama.cpp's messages, kept off the user's terminal. `error`: the first since `clear`, the one that says why."""

    _ERROR, _CONTINUED = 4, 5  # of ggml's log levels

    def __init__(self) -> None:
        self.clear()
        self._level = 0
        self._callback = llama.llama_log_callback(self._receive)  # llama.cpp keeps a pointer to it
        llama.llama_log_set(self._callback, None)

    def clear(self) -> None:
        self.error = "no reason given"

    def _receive(self, level: int, text: bytes, _: object) -> None:
        self._level = self._level if level == self._CONTINUED else level
        line = text.decode("utf-8", "replace").strip()
        _log.debug("%s", line)
        if self._level == self._ERROR and line and self.error == "no reason given":
            self.error = re.sub(r"^\w+: ", "", line)  # the function that complains


_messages = _Messages()
