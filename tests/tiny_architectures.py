"""Random checkpoints on disk, small enough to convert and run in a moment."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import transformers
from toy import toy_tokenizer

_SHAPE = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=4096,
    initializer_range=0.3,  # logits far enough apart to have a mind of their own
)
_LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10_000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS = {
    "llama": (transformers.LlamaConfig, dict(tie_word_embeddings=True)),
    "llama3": (transformers.LlamaConfig, dict(rope_parameters=_LLAMA3, attention_bias=True)),
    "mistral": (transformers.MistralConfig, dict(sliding_window=6)),
    "qwen2": (transformers.Qwen2Config, dict(use_sliding_window=False)),
    "qwen3": (transformers.Qwen3Config, dict()),
    "gemma3": (transformers.Gemma3TextConfig, dict(sliding_window=6, layer_types=_LAYERS)),
    "gpt2": (transformers.GPT2Config, dict(n_embd=32, n_layer=1, n_head=2)),
}


def checkpoint(folder: Path, name: str, *, merges: int = 60, order: int = 0, seed: int = 0) -> Path:
    """Write a random model of the named kind and a tokenizer of `toy`."""
    tokenizer = toy_tokenizer(merges, order=order)
    kind, special = CONFIGS[name]
    ends = {role: tokenizer.token_to_id(f"<{role}>") for role in ("bos", "eos")}
    config = kind(
        **(_SHAPE | special),
        vocab_size=tokenizer.get_vocab_size() + 5,
        bos_token_id=ends["bos"],
        eos_token_id=ends["eos"],
        pad_token_id=ends["eos"],
    )
    torch.manual_seed(seed)
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in module.parameters():
        if parameter.dim() == 1:  # norms and biases that do something
            parameter.data += 0.3 * torch.randn_like(parameter)
    module.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)
    return folder


def random_checkpoint(folder: Path, name: str, tokenizer: Path) -> Path:
    """A random model of the named kind for the real tokenizer of a folder."""
    shutil.copytree(tokenizer, folder)
    loaded = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer / "tokenizer.json"))
    kind, special = CONFIGS[name]
    ends = [token for token in ("</s>", "<|eot_id|>", "<|im_end|>") if token in loaded.get_vocab()]
    eos = loaded.convert_tokens_to_ids(ends[0])
    config = kind(
        **(_SHAPE | special), vocab_size=len(loaded), bos_token_id=None, eos_token_id=eos, pad_token_id=eos
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder
