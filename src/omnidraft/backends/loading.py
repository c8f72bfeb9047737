"""A checkpoint's weights as a module of transformers, or one clear error.

Left to itself transformers loads an encoder as if it could write, and makes up at random what weights are missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from omnidraft.errors import DamagedFileError, UnsupportedModelError

_GENERATES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def load_causal_lm(folder: Path, name: str, dtype: torch.dtype) -> Any:
    """The checkpoint in `folder`, all of its weights read from there.

    Raises:
        UnsupportedModelError: not a language model that writes from left to right.
        DamagedFileError: weights that are unreadable, missing, or of another shape than config.json says.
    """
    causal_config(folder, name)
    try:
        module, report = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    except Exception as error:  # which one depends on the library at fault: torch, safetensors, transformers
        raise DamagedFileError(
            f"{name} cannot be loaded ({_first_line(error)}); its files are damaged or do not belong together, "
            "so fetch it again"
        ) from error
    if absent := sorted(report["missing_keys"]):
        raise DamagedFileError(
            f"{name} lacks {len(absent)} of its weights, {absent[0]} among them; fetch the whole model again"
        )
    return module


def causal_config(folder: Path, name: str) -> Any:
    """The checkpoint's configuration.

    Raises:
        UnsupportedModelError: not a language model that writes from left to right.
    """
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} is of a kind that transformers does not know ({_first_line(error)}); "
            "choose a causal language model"
        ) from error
    made = config.architectures or []
    if (
        config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        or config.is_encoder_decoder
        or (made and not any(architecture.endswith(_GENERATES) for architecture in made))
    ):
        raise UnsupportedModelError(
            f"{name} is a {made[0] if made else config.model_type}, which does not write text from left to right; "
            "choose a causal language model"
        )
    return config


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
