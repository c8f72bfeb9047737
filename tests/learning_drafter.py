"""A tiny drafter that can learn; and, as a program, a server whose drafter learns all the time."""

from __future__ import annotations

import sys
from pathlib import Path


def write_drafter(folder: Path, context_length: int = 4096) -> Path:
    """A Llama with random weights and a toy tokenizer."""
    import torch
    from toy import toy_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=toy_tokenizer(25, order=1), bos_token="<bos>", eos_token="<eos>"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=context_length,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def serve(folder: Path) -> None:
    """Serve the toy target and print the address."""
    from serving import TARGET

    from omnidraft import OmniDraft
    from omnidraft.backends.huggingface import HuggingFaceModel
    from omnidraft.serve.app import run
    from omnidraft.serve.settings import Settings

    drafter = HuggingFaceModel(folder, name="tiny", precision="float32")
    run(
        Settings(("target",), port=0, learn="between"),
        lambda name: OmniDraft(TARGET, drafter),
        started=lambda url: print(url, flush=True),
    )


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
