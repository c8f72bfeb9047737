"""Tiny random models of the true transformers classes, as checkpoints on disk, with toy tokenizers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from toy import toy_tokenizer

from omnidraft.session import Session, feed

MERGES = 40
VOCAB = toy_tokenizer(MERGES).get_vocab_size()
WINDOW = 6  # of sliding and chunked attention: far less than the texts of the tests
SHAPE = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
)
HEADS = dict(head_dim=8)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
LOCAL_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
SLIDING = dict(sliding_window=WINDOW)
MIXED = dict(SLIDING, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
GPT2 = dict(n_embd=32, n_layer=3, n_head=4, n_positions=128)
OPT = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=128)
LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
)
LINEAR = dict(
    num_hidden_layers=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)

# What a user is likely to bring: in CI.
COMMON: dict[str, dict[str, Any]] = {
    "Llama": SHAPE | HEADS,
    "Qwen2": SHAPE | SLIDING | dict(use_sliding_window=True, max_window_layers=1),
    "Qwen3": SHAPE | HEADS,
    "Qwen2Moe": SHAPE | EXPERTS | dict(shared_expert_intermediate_size=16),
    "Qwen3Moe": SHAPE | HEADS | EXPERTS,
    "Gemma2": SHAPE | HEADS | SLIDING | dict(query_pre_attn_scalar=8),
    "Gemma3Text": SHAPE | HEADS | MIXED,
    "Mistral": SHAPE | HEADS | SLIDING,
    "Phi": SHAPE,
    "Phi3": SHAPE | SLIDING,
    "GPT2": GPT2,
    "GPTNeoX": SHAPE,
    "Olmo2": SHAPE,
    "SmolLM3": SHAPE | dict(use_sliding_window=False),
    "Falcon": dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4),
    "StableLm": SHAPE,
    "Granite": SHAPE,
    "Cohere2": SHAPE | HEADS | SLIDING | dict(logit_scale=1.0),
    "GptOss": SHAPE | HEADS | LOCAL_EXPERTS | SLIDING,
    "Llama4Text": SHAPE
    | HEADS
    | dict(num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=64, interleave_moe_layer_step=2)
    | dict(attention_chunk_size=WINDOW, no_rope_layers=[1, 1, 0]),
}
RARE: dict[str, dict[str, Any]] = {
    "Gemma": SHAPE | HEADS,
    "Gemma3nText": SHAPE
    | HEADS
    | SLIDING
    | dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
    | dict(vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8, num_kv_shared_layers=1)
    | dict(laurel_rank=4, activation_sparsity_pattern=None),
    "Gemma4Text": SHAPE | HEADS | SLIDING,
    "Ministral": SHAPE | HEADS | SLIDING,
    "Mixtral": SHAPE | HEADS | LOCAL_EXPERTS | SLIDING,
    "Phimoe": SHAPE | HEADS | LOCAL_EXPERTS,
    "GPTNeo": dict(hidden_size=32, num_layers=2, num_heads=4, window_size=WINDOW, max_position_embeddings=128)
    | dict(attention_types=[[["global", "local"], 1]]),
    "GPTJ": GPT2 | dict(rotary_dim=8),
    "GPTBigCode": GPT2,
    "CodeGen": GPT2 | dict(rotary_dim=8),
    "OPT": OPT | dict(ffn_dim=64, word_embed_proj_dim=32),
    "Bloom": dict(hidden_size=32, n_layer=3, n_head=4),
    "Mpt": dict(d_model=32, n_layers=3, n_heads=4, max_seq_len=128),
    "Olmo": SHAPE,
    "Olmo3": SHAPE | SLIDING,
    "Olmoe": SHAPE | dict(num_experts=4, num_experts_per_tok=2),
    "GraniteMoe": SHAPE | LOCAL_EXPERTS,
    "Cohere": SHAPE | HEADS | dict(logit_scale=1.0),
    "DeepseekV2": SHAPE | HEADS | LATENT | dict(q_lora_rank=None),
    "DeepseekV3": SHAPE | HEADS | LATENT,
    "Glm": SHAPE | HEADS,
    "Glm4": SHAPE | HEADS,
    "Starcoder2": SHAPE | SLIDING,
    "Nemotron": SHAPE | HEADS,
    "Exaone4": SHAPE | HEADS | SLIDING,
    "Ernie4_5": SHAPE | HEADS,
    "SeedOss": SHAPE | HEADS,
    "HunYuanDenseV1": SHAPE | HEADS,
    "Helium": SHAPE | HEADS,
    "Arcee": SHAPE | HEADS,
    "Persimmon": SHAPE,
    "MiniMaxM2": SHAPE | HEADS | LOCAL_EXPERTS,
    "BioGpt": OPT | dict(intermediate_size=64),
    "NanoChat": SHAPE,
    "Dbrx": dict(d_model=32, n_heads=4, n_layers=3, max_seq_len=128)
    | dict(attn_config=dict(kv_n_heads=2, clip_qkv=8, rope_theta=10000.0))
    | dict(ffn_config=dict(ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2)),
}
# A state that is more than keys and values, or no cache at all.
REFUSED: dict[str, dict[str, Any]] = {
    "Mamba": dict(hidden_size=32, num_hidden_layers=2),
    "Mamba2": dict(hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=8, n_groups=1),
    "Rwkv": dict(hidden_size=32, num_hidden_layers=2, attention_hidden_size=32),
    "Jamba": SHAPE | dict(num_experts=2, attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=4),
    "Qwen3Next": SHAPE | EXPERTS | LINEAR,
    "Qwen3_5Text": SHAPE | LINEAR,
    "FalconH1": SHAPE,
    "Lfm2": SHAPE | dict(layer_types=["conv", "full_attention", "conv"]),
    "Bamba": SHAPE | dict(attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1),
    "RecurrentGemma": SHAPE,
    "MiniMax": SHAPE | dict(layer_types=["linear_attention", "full_attention", "linear_attention"]),
    "DeepseekV32": SHAPE | LATENT,
    "OpenAIGPT": dict(n_embd=32, n_layer=2, n_head=4, n_positions=128),
    "XLNet": dict(d_model=32, n_layer=2, n_head=4, d_inner=64),
}


def tiny_config(name: str, **changes: Any) -> Any:
    """A configuration of `transformers.<name>Config` for the toy tokenizer's vocabulary."""
    shape = {**COMMON, **RARE, **REFUSED}[name]
    own = dict(vocab_size=VOCAB, bos_token_id=None, eos_token_id=VOCAB - 2, pad_token_id=0)
    return getattr(transformers, f"{name}Config")(**own | shape | changes)


def tiny_module(config: Any) -> Any:
    """Random weights that make some tokens far likelier than others, the same each time."""
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.2)
    return module


def blurred(module: Any, share: float = 0.1) -> Any:
    """The same module, each weight moved by noise: as a drafter it is right now and then."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in module.parameters():
            weight += share * weight.std(correction=0) * torch.randn(weight.shape, generator=generator)
    return module


def save(module: Any, folder: Path, *, order: int = 0) -> str:
    """A checkpoint with a toy tokenizer beside its weights."""
    module.save_pretrained(folder)
    save_tokenizer(folder, order=order)
    return str(folder)


def save_tokenizer(folder: Path, *, order: int = 0) -> Any:
    """The toy tokenizer as one of transformers."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=toy_tokenizer(MERGES, order=order), eos_token="<eos>"
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def random_walk(new_session: Callable[[], Session], operations: int, vocab: int, longest: int) -> None:
    """Random extends and truncates by `feed`; now and then its rows against a fresh prefill's."""
    generator = random.Random(0)
    session = new_session()
    tokens: list[int] = []
    for i in range(operations):
        del tokens[generator.randrange(len(tokens) + 1) if generator.random() < 0.5 else len(tokens) :]
        tokens = tokens[-longest:] if len(tokens) > longest else tokens
        tokens += [generator.randrange(vocab) for _ in range(generator.randrange(1, 6))]
        rows = generator.randrange(1, len(tokens) + 1)
        logits = feed(session, tokens, rows)
        assert session.tokens.tolist() == tokens
        if i % 10 == 9:
            fresh = feed(new_session(), tokens, rows)
            np.testing.assert_allclose(logits, fresh, atol=2e-4, rtol=1e-3)
