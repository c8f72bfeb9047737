"""`load`: models by name, each on the engine that suits it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol, cast, get_args

from omnidraft import hub
from omnidraft.catalog import DEFAULT_DRAFTER, SHIPPED_DRAFTERS
from omnidraft.engine import OmniDraft
from omnidraft.errors import MissingExtraError, OptionError, UnsupportedModelError, is_count
from omnidraft.ngrams import Eviction
from omnidraft.session import Model

# engine -> (module, extra), in the order in which `auto` prefers them on a CPU (docs/decisions.md)
_BACKENDS = {
    "openvino": ("openvino", "openvino"),
    "llamacpp": ("llamacpp", "llamacpp"),
    "transformers": ("huggingface", "hf"),
}
ENGINES = ("auto", *_BACKENDS)
Settings = Mapping[str, Mapping[str, str]]  # engine -> its own settings, by their own names


class Backend(Protocol):
    """What a module in `backends` offers."""

    PRECISIONS: tuple[str, ...]

    def check(self, precision: str, device: str, settings: Mapping[str, str]) -> None:
        """Refuse bad options before anything is fetched.

        Raises:
            OptionError: a precision, device or setting that the engine does not know or that is not here.
        """

    def load(
        self, name: str, *, precision: str, device: str, drafts: bool, settings: Mapping[str, str]
    ) -> Model:
        """The model of that name, fetched and converted on first use. `drafts`: it will draft, which may matter
        for what precision `auto` is.

        Raises:
            UnsupportedModelError: this engine cannot run such a model; before the heavy work.
            OmniDraftError: as for `check` and `hub.pull`.
        """


def load(
    target: str | Path | Model,
    drafter: str | Path | Model | None = DEFAULT_DRAFTER,
    *,
    engine: str = "auto",
    drafter_engine: str = "auto",
    precision: str = "auto",
    drafter_precision: str = "auto",
    device: str = "auto",
    settings: Settings | None = None,
    ngram_capacity: int | None = None,
    ngram_eviction: Eviction = "lfu",
) -> OmniDraft:
    """Load a target and a drafter, fetching them on first use.

    A model is a known name (`omnidraft models`), a hub id, a local folder, a GGUF file, or one loaded before:
    a drafter loaded once serves any number of targets. `drafter=None` drafts by look-ups alone. Under `auto` the
    drafter's engine and precision are the target's, as far as the drafter knows them; see `load_model`.
    `ngram_capacity`: how many n-grams the method `ngram` keeps; None keeps all. Beyond it the least frequently
    (`lfu`) or the least recently (`lru`) accepted ones go.

    Raises:
        OmniDraftError: the subclass says what is wrong with the name, the files or the options.
    """
    if not (ngram_capacity is None or (is_count(ngram_capacity) and ngram_capacity >= 0)):
        raise OptionError(f"ngram_capacity is {ngram_capacity!r}; it must be an integer, 0 or more")
    if ngram_eviction not in get_args(Eviction):
        raise OptionError(f"unknown eviction {ngram_eviction!r}; use one of {', '.join(get_args(Eviction))}")
    target = _named("target", target)
    drafter = None if drafter is None else _named("drafter", drafter)
    if precision == "mixed":
        raise OptionError(
            "precision 'mixed' is for drafters; use 'auto', which gives it to the drafter alone"
        )
    no_gguf = engine == "llamacpp" and drafter in SHIPPED_DRAFTERS  # so llama.cpp cannot run it
    if drafter_engine == "auto" and not no_gguf:
        drafter_engine = engine
        drafter_precision = precision if drafter_precision == "auto" else drafter_precision
    chosen = [(target, engine, precision), (drafter, drafter_engine, drafter_precision)]
    for name, its_engine, its_precision in chosen:
        if isinstance(name, str):  # a mistyped target must not cost the drafter's download first
            hub.check(name)
            _candidates(name, its_engine, its_precision, device, settings or {})
    loaded_drafter = (
        load_model(
            drafter,
            engine=drafter_engine,
            precision=drafter_precision,
            device=device,
            settings=settings,
            drafts=True,
        )
        if drafter is not None
        else None
    )
    return OmniDraft(
        load_model(target, engine=engine, precision=precision, device=device, settings=settings),
        loaded_drafter,
        ngram_capacity=ngram_capacity,
        ngram_eviction=ngram_eviction,
    )


def load_model(
    model: str | Path | Model,
    *,
    engine: str = "auto",
    precision: str = "auto",
    device: str = "auto",
    settings: Settings | None = None,
    drafts: bool = False,
) -> Model:
    """Load one model by name; one that is loaded already is returned as it is.

    `engine`: `transformers` runs anything, on any device; `openvino` int8 and int4 weights on a CPU; `llamacpp` a GGUF
    file as it is. `auto` takes the first of openvino, llamacpp and transformers that is installed, has the precision
    and knows the model; on a GPU transformers; `model.engine` says which and why. `precision`: each engine's own
    words, `auto` its best: transformers float32, bfloat16, float16, mixed; openvino float32, bfloat16, int8, int4;
    llamacpp as the file is. `settings`: an engine's own, by its name: `{"openvino": {"KV_CACHE_PRECISION": "f32"}}`.
    `drafts`: the model will draft, and under `auto` may round as suits that.

    Raises:
        OmniDraftError: the subclass says what is wrong with the name, the files or the options.
    """
    model = _named("model", model)
    if not isinstance(model, str):
        return model
    hub.check(model)
    candidates, passed = _candidates(model, engine, precision, device, settings or {})
    for name, backend in candidates.items():
        own = (settings or {}).get(name, {})
        try:
            loaded = backend.load(model, precision=precision, device=device, drafts=drafts, settings=own)
        except UnsupportedModelError as error:
            if len(candidates) == 1:
                raise
            passed.append(f"{name}: {error}")
        else:
            if engine == "auto":
                reason = "; ".join(passed) or "the first choice"
                loaded.engine = replace(loaded.engine, reason=reason)
            return loaded
    raise UnsupportedModelError(f"no engine runs {model} ({'; '.join(passed)}); choose another model")


def _named(role: str, model: str | Path | Model) -> str | Model:
    """A model's name as text, or the model."""
    if isinstance(model, Path):
        return str(model)
    if not (isinstance(model, str) or hasattr(model, "session")):
        raise OptionError(
            f"the {role} is {model!r}; pass a known name, a hub id, a folder, a GGUF file or a loaded model"
        )
    return model


def _candidates(
    model: str, engine: str, precision: str, device: str, settings: Settings
) -> tuple[dict[str, Backend], list[str]]:
    """The engines that may run the model, best first, and why others do not.

    Raises:
        OptionError: an engine, precision, device or setting that is unknown, or that does not go with the others.
        MissingExtraError: the engine is not installed.
    """
    if engine not in ENGINES:
        raise OptionError(f"unknown engine {engine!r}; use one of {', '.join(ENGINES)}")
    if unknown := settings.keys() - _BACKENDS.keys():
        raise OptionError(f"settings for {unknown.pop()!r}; engines are {', '.join(_BACKENDS)}")
    if engine != "auto":
        backend = _backend(engine)
        backend.check(precision, device, settings.get(engine, {}))
        return {engine: backend}, []
    if (Path(model).expanduser() / "openvino_model.xml").is_file():
        return _candidates(model, "openvino", precision, device, settings)[0], [
            "the folder holds an OpenVINO model"
        ]
    if _on_gpu(device):
        return _candidates(model, "transformers", precision, device, settings)[0], [f"the device is {device}"]
    found: dict[str, Backend] = {}
    passed: list[str] = []
    known: list[str] = []
    for name in _BACKENDS:
        try:
            backend = _backend(name)
        except MissingExtraError as error:
            passed.append(f"{name}: {error}")
            continue
        known += backend.PRECISIONS
        if precision not in backend.PRECISIONS:
            passed.append(f"{name}: has no precision {precision}")
            continue
        backend.check(precision, device, settings.get(name, {}))
        found[name] = backend
    if known and not found:
        raise OptionError(f"unknown precision {precision!r}; use one of {', '.join(dict.fromkeys(known))}")
    if not found:
        raise MissingExtraError("transformers", "hf")
    return found, passed


def _backend(engine: str) -> Backend:
    module, extra = _BACKENDS[engine]
    try:
        return cast(Backend, importlib.import_module(f"omnidraft.backends.{module}"))
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or engine, extra) from error
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        # Too old, or its own library is broken.
        raise MissingExtraError(engine, extra, f"cannot be used ({error})") from error


def _on_gpu(device: str) -> bool:
    if device != "auto":
        return device != "cpu"
    try:
        import torch
    except ModuleNotFoundError:
        return False
    return torch.cuda.is_available()
