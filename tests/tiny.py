"""Checkpoints of a few kilobytes, for what must go through the real engine."""

from __future__ import annotations

import json
from pathlib import Path

from toy import toy_tokenizer

from omnidraft import catalog
from omnidraft.cache import MANIFEST, sha256_of
from omnidraft.catalog import DEFAULT_DRAFTER, SHIPPED_DRAFTERS

_LONGEST = 16  # tokens of an answer


def write_tiny(folder: Path, *, merges: int = 25, order: int = 0, context_length: int = 64) -> Path:
    """A GPT-2 with random weights and a byte-level tokenizer, as save_pretrained() leaves it.

    At every 16th position it ends its answer: one column of the embeddings says so, which only the end token reads.
    """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=toy_tokenizer(merges, order=order), bos_token="<bos>", eos_token="<eos>"
    )
    torch.manual_seed(order)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=context_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        tokens, positions = model.transformer.wte.weight, model.transformer.wpe.weight
        tokens[:, 0] = positions[:, 0] = 0
        tokens[tokenizer.eos_token_id, 0] = 100
        positions[_LONGEST - 1 :: _LONGEST, 0] = 100
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_home(home: Path) -> Path:
    """A cache folder in which the known models are such checkpoints: names and defaults work as for a user."""
    for order, name in enumerate(
        (DEFAULT_DRAFTER, "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "smollm2-135m")
    ):
        folder = home / "models" / name / "checkpoint"
        write_tiny(folder, merges=25 + 10 * order, order=order, context_length=4096)
        describe(folder, name)
    return home


def describe(folder: Path, name: str) -> None:
    """Let a checkpoint in the cache pass for the known model of that name."""
    manifest = dict.fromkeys(("source", "sha256", "upstream", "licence"), "tiny")
    if name in SHIPPED_DRAFTERS:  # made anew when the package's file is another
        manifest["sha256"] = sha256_of(Path(catalog.__file__).parent / SHIPPED_DRAFTERS[name].file)
    files = {file.name: sha256_of(file) for file in folder.iterdir()}
    (folder / MANIFEST).write_text(
        json.dumps(manifest | {"name": name, "size": 0, "mtime_ns": 0, "files": files})
    )
