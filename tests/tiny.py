"""Checkpoints of a few kilobytes, for what must go through the real engine."""

from __future__ import annotations

from pathlib import Path

from toy import toy_tokenizer


def write_tiny(folder: Path, *, merges: int = 25, order: int = 0, context_length: int = 64) -> Path:
    """A llama with random weights and a byte-level tokenizer, as save_pretrained() leaves it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=toy_tokenizer(merges, order=order), bos_token="<bos>", eos_token="<eos>"
    )
    torch.manual_seed(order)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=context_length,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
