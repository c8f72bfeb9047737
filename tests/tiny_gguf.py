"""A tiny random Qwen2 as a GGUF file, and the same as a torch module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from toy import toy_tokenizer

from omnidraft.pieces import CHAR_OF

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
CONTEXT = 2048


def tiny_module(merges: int, *, seed: int = 0) -> Any:
    """A module for `toy_tokenizer(merges, order=seed)`. What it says follows mostly from the last character, in the
    same way in every vocabulary: so two of them agree often."""
    torch.manual_seed(seed)
    config = transformers.Qwen2Config(
        vocab_size=toy_tokenizer(merges).get_vocab_size(),
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for text, id in toy_tokenizer(merges, order=seed).get_vocab().items():
            module.model.embed_tokens.weight[id] = 10 * _vector(text[-1], config.hidden_size)
            module.lm_head.weight[id] *= 0.5
            module.lm_head.weight[id] += 0.3 * _vector(text[0], config.hidden_size)
    return module


def _vector(char: str, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(ord(char)))


def write_gguf(path: Path, merges: int, *, seed: int = 0, fields: dict[str, Any] | None = None) -> Path:
    """`tiny_module` and its tokenizer as a GGUF file. `fields` replace metadata, for adversarial files."""
    module, tokenizer = tiny_module(merges, seed=seed), toy_tokenizer(merges, order=seed)
    config, spec = module.config, json.loads(tokenizer.to_str())
    tokens = [text for text, _ in sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])]
    special = {token["content"] for token in spec["added_tokens"]}
    writer = gguf.GGUFWriter(path, (fields or {}).get("architecture", "qwen2"))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model((fields or {}).get("tokenizer", "gpt2"))
    writer.add_tokenizer_pre((fields or {}).get("pre", "gpt-2"))
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in spec["model"]["merges"]])
    writer.add_bos_token_id(tokens.index("<bos>"))
    writer.add_eos_token_id(tokens.index("<eos>"))
    writer.add_add_bos_token(True)
    for name, weight in module.state_dict().items():
        stem, _, kind = name.rpartition(".")
        if stem.startswith("model.layers."):
            layer, _, part = stem.removeprefix("model.layers.").partition(".")
            stem = f"blk.{layer}.{_NAMES[part]}"
        else:
            stem = _NAMES[stem]
        writer.add_tensor(f"{stem}.{kind}", weight.float().numpy())
    return _written(writer, path)


def write_recurrent(path: Path) -> Path:
    """A Mamba without weights: its header suffices to refuse it."""
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(32)
    writer.add_ssm_state_size(4)
    writer.add_ssm_time_step_rank(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(list(CHAR_OF.values()))
    writer.add_token_merges(["a b"])
    return _written(writer, path)


def _written(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
