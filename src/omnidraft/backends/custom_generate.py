"""`model.generate(..., custom_generate=omnidraft.custom_generate(...))`: drafting inside `generate` of transformers."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.generation import GenerateDecoderOnlyOutput, GenerationConfig, GenerationMode

from omnidraft.backends.huggingface import HuggingFaceModel
from omnidraft.catalog import DEFAULT_DRAFTER
from omnidraft.engine import OmniDraft
from omnidraft.errors import ContextLengthError, OptionError
from omnidraft.loading import load_model
from omnidraft.options import make_options
from omnidraft.processors import transformers_processor
from omnidraft.session import Model

_HANDLED = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache", "past_key_values"}
_UNSUPPORTED = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def custom_generate(
    drafter: str | Path | Model | None = DEFAULT_DRAFTER,
    *,
    tokenizer: Any = None,
    precision: str = "auto",
    device: str = "auto",
    **options: Any,
) -> CustomGenerate:
    """A decoding method for `generate` of transformers: the same answers, through a drafter.

    Made once, for here the drafter is loaded, and given as `model.generate(**inputs, custom_generate=made)`. `generate`
    prepares everything as always: generation_config, logits processors, stopping criteria and streamer are
    honoured. Greedy answers are those of `generate`. Sampled ones have its law and repeat after `torch.manual_seed`,
    but draw other tokens from the same seed. The model is used as it is and never altered.

    `drafter`, `precision`, `device`: as in `omnidraft.load_model`; None drafts by look-ups alone. `tokenizer`: the
    target's; None loads it by the name the model was loaded by. `options`: `method`, `verification`, `splits` and `k`
    of `omnidraft.Options`.

    Raises:
        OptionError: an unknown option, or a value outside its range.
        OmniDraftError: the drafter cannot be loaded.
    """
    if unknown := options.keys() - {"method", "verification", "splits", "k"}:
        raise OptionError(
            f"custom_generate has no option {', '.join(sorted(unknown))}; give generate's own options to generate"
        )
    make_options(**options)
    if drafter is not None:
        drafter = load_model(drafter, precision=precision, device=device, drafts=True)
    return CustomGenerate(drafter, tokenizer, options)


class CustomGenerate:
    """What `custom_generate` returns; `generate` calls it. Threads may share it: each call has its own KV caches."""

    def __init__(self, drafter: Model | None, tokenizer: Any, options: dict[str, Any]) -> None:
        self._drafter = drafter
        self._tokenizer = tokenizer
        self._options = options
        self._last: tuple[Any, OmniDraft] | None = None  # the caller's model, and the pair made of it
        self._lock = threading.Lock()

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,  # [1, prompt]
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """The prompt and the answer, as `generate` returns them: [1, prompt + answer], or with
        `return_dict_in_generate` an output that holds them as `sequences`.

        Raises:
            OptionError: several sequences, beams, or another option that cannot be honoured.
            ContextLengthError: the prompt leaves no room for an answer.
        """
        _refuse(input_ids, generation_config, synced_gpus, model_kwargs)
        streamer = streamer or _streamer(inspect.currentframe())
        pair = self._pair(model)
        prompt: list[int] = input_ids[0].tolist()
        if (room := pair.target.context_length - len(prompt)) < 1:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens and {pair.target.name} holds {pair.target.context_length}; "
                "shorten the prompt"
            )
        steps = pair.steps(
            prompt,
            make_options(
                # With a seed an answer depends on the target and the seed only, not on what drafts.
                temperature=1.0 if generation_config.do_sample else 0.0,
                seed=int(torch.randint(2**62, ())) if generation_config.do_sample else 0,
                processors=_processors(logits_processor, input_ids.device),
                **self._options,
            ),
            limit=min(generation_config.max_length - len(prompt), room),
            ends=_ends(generation_config),
        )
        for token in (token for step in steps for token in step.tokens):
            input_ids = torch.cat([input_ids, input_ids.new_tensor([[token]])], dim=-1)
            if streamer is not None:
                streamer.put(torch.tensor([token]))
            if bool(stopping_criteria(input_ids, None).all()):
                break
        if streamer is not None:
            streamer.end()
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=input_ids)
        return input_ids

    def _pair(self, module: Any) -> OmniDraft:
        with self._lock:
            if self._last is None or self._last[0] is not module:
                target = HuggingFaceModel.of(module, self._tokenizer or _load_tokenizer(module))
                self._last = module, OmniDraft(target, self._drafter)
            pair = self._last[1]
        pair.reset()  # its weights may have been trained since the last call
        return pair


def _load_tokenizer(module: Any) -> Any:
    name = module.config.name_or_path
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise OptionError(
            f"no tokenizer at {name!r}, where the model came from; pass custom_generate(tokenizer=...)"
        ) from error


def _processors(processors: Any, device: torch.device) -> tuple[Any, ...]:
    """Those that `generate` has prepared, its temperature and filters among them."""
    return (transformers_processor(processors, str(device)),) if len(processors) else ()


def _ends(config: GenerationConfig) -> Sequence[int]:
    eos = config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def _refuse(
    input_ids: Tensor, config: GenerationConfig, synced_gpus: bool, model_kwargs: dict[str, Any]
) -> None:
    """Name what was asked for and cannot be honoured; to leave it out silently would change the answer."""
    refused = {
        "beams, several returned sequences, assistants or other searches; leave them out": (
            config.get_generation_mode() not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
            or (config.num_return_sequences or 1) > 1
        ),
        f"a batch of {len(input_ids)}; give one prompt at a time": len(input_ids) > 1,
        "synced_gpus; leave it out": synced_gpus,
        "padding; leave out the pad tokens and the attention mask": model_kwargs.get("attention_mask")
        is not None,
        "a KV cache of yours; leave it out": bool(
            config.cache_implementation
            or getattr(
                model_kwargs.get("cache", model_kwargs.get("past_key_values")), "_is_user_defined", False
            )
        ),
    }
    refused |= {f"{name}; leave it out": bool(getattr(config, name)) for name in _UNSUPPORTED}
    others = {name: value for name, value in model_kwargs.items() if name not in _HANDLED}
    refused |= {f"the model input {name}; leave it out": value is not None for name, value in others.items()}
    for what, asked in refused.items():
        if asked:
            raise OptionError(f"custom_generate of omnidraft does not do {what}")


def _streamer(frame: FrameType | None) -> Any:
    """The streamer that `generate` was given. Up to transformers 5.24 it hands none to a callable, though it has put
    the prompt into it: a reader of a TextIteratorStreamer would wait for ever. So it is read from its frame."""
    caller = frame.f_back if frame else None
    while caller is not None and caller.f_code.co_name != "generate":
        caller = caller.f_back
    return caller.f_locals.get("streamer") if caller else None
