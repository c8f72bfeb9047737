"""Which transformers architectures can be rewound, told from the configuration before any weight is read."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from omnidraft.errors import UnsupportedModelError

# The layers whose state is a row of keys and values for each token; "moe" and "mlp" have none. Every other kind
# (linear attention, convolutions, state space models, indexed or compressed attention) keeps more than that.
_REWINDABLE = frozenset({"full_attention", "sliding_attention", "chunked_attention", "moe", "mlp"})


def check_architecture(config: Any, name: str) -> None:
    """Refuse a causal language model that cannot go back after a rejection.

    Raises:
        UnsupportedModelError: its state is more than keys and values, or it has no KV cache.
    """
    text = config.get_text_config(decoder=True)
    module_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(module_class, "_is_stateful", False) or not _REWINDABLE.issuperset(
        getattr(text, "layer_types", None) or ()
    ):
        raise UnsupportedModelError(
            f"{name} ({config.model_type}) keeps a recurrent state that cannot be rewound after a rejection; "
            "choose a model with attention layers only"
        )
    if not cache_argument(module_class):
        raise UnsupportedModelError(
            f"{name} ({config.model_type}) takes no KV cache in transformers, so every token would cost a pass over "
            "the whole text; choose another model"
        )


def cache_argument(module: Any) -> str:
    """What `forward` of a model, or of its class, calls its KV cache; empty when it takes none."""
    parameters = inspect.signature(module.forward).parameters
    # transformers renamed the argument in 5.2x
    return next((name for name in ("cache", "past_key_values") if name in parameters), "")


def context_length(config: Any) -> int:
    """Tokens that fit, prompt and answer together; 2**31 where the configuration sets no end.

    Rotary embeddings of type `longrope` and `dynamic` turn all keys otherwise once a text is longer than what the
    model was first trained for: what is in the cache by then would be wrong. So such a model ends there.
    """
    text = config.get_text_config(decoder=True)
    lengths = [getattr(text, field, None) for field in ("max_position_embeddings", "max_seq_len")]
    rope = getattr(text, "rope_parameters", None) or {}
    # Gemma 3 and its like have one for each type of layer.
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if parameters.get("rope_type") in ("longrope", "dynamic"):
            lengths.append(parameters.get("original_max_position_embeddings"))
    return min((length for length in lengths if length and length > 0), default=2**31)
