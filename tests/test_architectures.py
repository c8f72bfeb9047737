"""Every architecture a user may bring: through `load` from a folder, or refused before its weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from ties import assert_equal_but_for_ties
from tiny_models import (
    COMMON,
    RARE,
    REFUSED,
    VOCAB,
    blurred,
    random_walk,
    save,
    save_tokenizer,
    tiny_config,
    tiny_module,
)

import omnidraft
from omnidraft import OmniDraft
from omnidraft.backends.huggingface import HuggingFaceSession
from omnidraft.errors import DamagedFileError, UnsupportedModelError
from omnidraft.sampling import Sampling
from omnidraft.session import feed

PROMPT = "the flake fell in the lake"
EVERY = [*COMMON, *(pytest.param(name, marks=pytest.mark.full) for name in RARE)]


def load(folder: Path, module: Any) -> OmniDraft:
    """A module as target and, blurred, as drafter, through checkpoints."""
    target = save(module, folder / "target")
    return omnidraft.load(
        target, save(blurred(module), folder / "drafter"), engine="transformers", precision="float32"
    )


@pytest.mark.parametrize("name", EVERY)
def test_answers_equal_plain_decoding(name: str, tmp_path: Path) -> None:
    model = load(tmp_path, tiny_module(tiny_config(name)))
    plain = OmniDraft(model.target, None)
    for options in ({}, {"temperature": 1.0, "seed": 3}):
        options = options | dict(raw=True, max_tokens=24, k=4)
        assert model.generate(PROMPT, **options).tokens == plain.generate(PROMPT, **options).tokens
    assert model.stats.acceptance_rate is not None
    assert 0 < model.stats.acceptance_rate < 1, "the drafter must be right now and then, and wrong"


@pytest.mark.parametrize("name", EVERY)
def test_feed_equals_a_fresh_prefill_and_a_pass_without_a_cache(name: str) -> None:
    module = tiny_module(tiny_config(name)).requires_grad_(False)
    random_walk(lambda: HuggingFaceSession(module), operations=40, vocab=VOCAB, longest=40)
    tokens = list(range(30))
    whole = module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    session = HuggingFaceSession(module)
    for end in (3, 9, 30, 12, 20):
        rows = feed(session, tokens[:end], 2)
        np.testing.assert_allclose(rows, whole[end - 2 : end], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_rewound_is_refused_before_its_weights_are_read(name: str, tmp_path: Path) -> None:
    tiny_config(name).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    # Of the right shape for the folder's check, and of no use: to read it would be another error.
    transformers.LlamaForCausalLM(tiny_config("Llama")).save_pretrained(tmp_path / "weights")
    (tmp_path / "weights" / "model.safetensors").rename(tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"rewound|no KV cache"):
        omnidraft.load_model(str(tmp_path), engine="transformers")


def test_other_kinds_of_model_are_refused_by_name(tmp_path: Path) -> None:
    shape = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2)
    kinds = {
        "does not write text": transformers.BartConfig(**shape, vocab_size=VOCAB),
        "ViTModel|vit": transformers.ViTConfig(hidden_size=16, num_hidden_layers=1),
    }
    save(tiny_module(tiny_config("Llama")), tmp_path)
    for message, config in kinds.items():
        config.save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModelError, match=message):
            omnidraft.load_model(str(tmp_path), engine="transformers")
    for text in ('{"model_type": "of-tomorrow"}', '{"auto_map": {"AutoConfig": "code.Config"}}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UnsupportedModelError, match="does not know"):
            omnidraft.load_model(str(tmp_path), engine="transformers")


def test_a_checkpoint_without_its_output_layer_is_refused(tmp_path: Path) -> None:
    save(tiny_module(tiny_config("Llama")), tmp_path)
    transformers.LlamaModel(tiny_config("Llama")).save_pretrained(tmp_path)
    tiny_config("Llama", architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(DamagedFileError, match=r"lacks 1 of its weights, lm_head\.weight"):
        omnidraft.load_model(str(tmp_path), engine="transformers")
    tied = tiny_config("Llama", tie_word_embeddings=True)
    omnidraft.load_model(save(tiny_module(tied), tmp_path), engine="transformers", precision="float32")


def test_the_text_part_of_a_multimodal_model(tmp_path: Path) -> None:
    config = transformers.Gemma3Config(
        text_config=tiny_config("Gemma3Text").to_dict(),
        vision_config=dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2),
        mm_tokens_per_image=4,
        image_token_index=VOCAB - 1,
        boi_token_index=VOCAB - 1,
        eoi_token_index=VOCAB - 1,
        eos_token_id=VOCAB - 2,
    )
    module = tiny_module(config)
    assert type(module).__name__ == "Gemma3ForConditionalGeneration"
    model = load(tmp_path, module)
    plain = OmniDraft(model.target, None)
    options = dict(raw=True, max_tokens=30)
    assert model.generate(PROMPT, **options).tokens == plain.generate(PROMPT, **options).tokens
    assert model.target.context_length == 4096


@pytest.mark.full
@pytest.mark.parametrize("method", ["bnb4", "bnb8", "torchao"])
@pytest.mark.filterwarnings("default")  # of the libraries
def test_quantised_checkpoints(method: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao" if method == "torchao" else "bitsandbytes")
    if method == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        how: Any = transformers.TorchAoConfig(Int8WeightOnlyConfig())
    elif method == "bnb4":
        how = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    else:
        how = transformers.BitsAndBytesConfig(load_in_8bit=True)
    # Large enough that the layers left as they are would be packed.
    config = tiny_config("Llama", hidden_size=1024, intermediate_size=512, head_dim=64)
    whole = save(tiny_module(config), tmp_path / "whole")
    quantised = transformers.AutoModelForCausalLM.from_pretrained(
        whole, quantization_config=how, device_map="cpu"
    )
    folder = save(quantised, tmp_path / "quantised")
    model = omnidraft.load(folder, whole, engine="transformers", precision="float32")
    plain = OmniDraft(model.target, None)
    for sampling in (Sampling(seed=0), Sampling(temperature=1.0, seed=3)):
        options = dict(raw=True, max_tokens=30, temperature=sampling.temperature, seed=sampling.seed)
        tokens = [one.generate(PROMPT, **options).tokens for one in (plain, model)]
        # LLM.int8 rounds activations to eight bits, so that rows of passes over more tokens differ visibly.
        assert_equal_but_for_ties(model.target, model.prompt_tokens(PROMPT, raw=True), *tokens, sampling)
    assert model.stats.acceptance_rate


def test_a_quantised_checkpoint_without_its_library_is_refused(tmp_path: Path) -> None:
    folder = save(tiny_module(tiny_config("Llama")), tmp_path)
    config = tiny_config("Llama").to_dict() | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="quantised by gptq"):
        omnidraft.load_model(folder, engine="transformers")
