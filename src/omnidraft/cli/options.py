"""The options of loading and decoding, the same in every command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Prompt = Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")]
Target = Annotated[
    str,
    typer.Option("--target", "-t", help="A known name (see `models`), hub id, local folder or GGUF file."),
]
DrafterName = Annotated[str, typer.Option("--drafter", "-d", help="The drafter, named like a target.")]
K = Annotated[
    int | None, typer.Option("-k", help="Draft tokens a step; left out: as many as pay, none where none do.")
]
FixedK = Annotated[int, typer.Option("-k", help="Draft tokens a step.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.")]
TopK = Annotated[int, typer.Option(help="Keep this many of the likeliest tokens; 0 keeps all.")]
MinP = Annotated[float, typer.Option(help="Keep tokens at least this likely, relative to the likeliest.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Divide the logits of tokens seen before; 1 is off.")]
PresencePenalty = Annotated[float, typer.Option(help="Subtract from the logits of tokens in the answer.")]
FrequencyPenalty = Annotated[float, typer.Option(help="The same, for each time that a token is there.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the draws; the same seed gives the same answer.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens of an answer.")]
MethodName = Annotated[str, typer.Option(help="plain, lookup, direct, ngram, prefill, text or auto.")]
Verification = Annotated[
    str, typer.Option(help="compare, trie, auto (all exact), or paper (the paper's approximation).")
]
Splits = Annotated[
    bool | None, typer.Option("--splits/--no-splits", help="Take draft tokens apart that the target lacks.")
]
NGrams = Annotated[
    Path | None, typer.Option("--ngrams", help="With method ngram: carry the n-grams on in this file.")
]
NGramCapacity = Annotated[int | None, typer.Option(help="N-grams kept at most; left out: all.")]
NGramEviction = Annotated[str, typer.Option(help="Which n-grams go first: lfu or lru.")]
Raw = Annotated[bool, typer.Option("--raw", help="Do not put the prompt through the chat template.")]
Precision = Annotated[
    str, typer.Option(help="auto, float32, bfloat16, float16, int8, int4: what the engine has.")
]
DrafterPrecision = Annotated[
    str, typer.Option(help="The drafter's, if another; also mixed, with transformers.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Engine = Annotated[str, typer.Option(help="What runs the models: auto, transformers, openvino, llamacpp.")]
DrafterEngine = Annotated[str, typer.Option(help="What runs the drafter, if another.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting of an engine: openvino.KV_CACHE_PRECISION=f32; may be repeated."),
]
