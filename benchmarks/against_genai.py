"""Plain decoding through our session against OpenVINO GenAI's own pipeline: same converted model, prompts and tokens.

    python benchmarks/against_genai.py --model smollm2-135m --json results/against_genai.json

Both decode greedily, in turns, prompt by prompt; the first prompt warms up and is not counted. Processor time is given
beside wall time: on a machine that others use too it is the one to compare.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Annotated, Any

import numpy as np
import openvino as ov
import openvino_genai
import typer
from openvino_tokenizers import convert_tokenizer

from omnidraft import load_model
from omnidraft.backends.openvino import SETTINGS, OpenVinoModel
from omnidraft.demo import PROMPTS
from omnidraft.provenance import provenance
from omnidraft.session import feed


def pipeline(graph: Path, tokenizer: Any, folder: Path, **settings: Any) -> Any:
    """GenAI's pipeline over a model's own files. `folder`: an empty one, needed until this returns."""
    for file in graph.parent.iterdir():
        shutil.copy(file, folder)
    encoder, decoder = convert_tokenizer(tokenizer, with_detokenizer=True)
    ov.save_model(encoder, folder / "openvino_tokenizer.xml")
    ov.save_model(decoder, folder / "openvino_detokenizer.xml")
    return openvino_genai.LLMPipeline(str(folder), "CPU", **settings)


def main(
    model: Annotated[str, typer.Option(help="A known name, hub id or folder.")] = "smollm2-135m",
    precision: Annotated[str, typer.Option(help="int8, int4, bfloat16 or float32.")] = "int8",
    tokens: Annotated[int, typer.Option(help="New tokens of each answer.")] = 64,
    limit: Annotated[int, typer.Option(help="Prompts of our demo.")] = 6,
    backend: Annotated[str, typer.Option(help="GenAI's attention: SDPA or PA.")] = "SDPA",
    out: Annotated[Path | None, typer.Option("--json", help="Where to write the result.")] = None,
) -> None:
    """Print and keep seconds of both, and their ratio."""
    loaded = load_model(model, engine="openvino", precision=precision)
    assert isinstance(loaded, OpenVinoModel)
    session = loaded.session()
    with tempfile.TemporaryDirectory() as folder:
        genai = pipeline(loaded.graph, loaded.tokenizer, Path(folder), ATTENTION_BACKEND=backend, **SETTINGS)
    config = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
    config.min_new_tokens = tokens

    def ours(prompt: list[int]) -> list[int]:
        session.truncate(0)
        written: list[int] = []
        while len(written) < tokens:
            written.append(int(feed(session, prompt + written, 1)[0].argmax()))
        return written

    def theirs(prompt: list[int]) -> list[int]:
        ids = ov.Tensor(np.array([prompt], np.int64))
        mask = ov.Tensor(np.ones((1, len(prompt)), np.int64))
        result = genai.generate(openvino_genai.TokenizedInputs(ids, mask), config)
        return list(result.tokens[0])

    rows = []
    for i, text in enumerate(PROMPTS[:limit]):
        prompt = loaded.chat([{"role": "user", "content": text}])
        row: dict[str, Any] = {}
        for name, answer in [("ours", ours), ("genai", theirs)][:: 1 if i % 2 else -1]:
            wall, processor = perf_counter(), process_time()
            row[f"{name}_answer"] = answer(prompt)
            row[name] = {"wall": perf_counter() - wall, "processor": process_time() - processor}
        row["same"] = row.pop("ours_answer") == row.pop("genai_answer")
        rows.append(row)
    ratios = {
        clock: median(row["genai"][clock] / row["ours"][clock] for row in rows[1:])
        for clock in ("wall", "processor")
    }
    speeds = {name: tokens / median(row[name]["wall"] for row in rows[1:]) for name in ("ours", "genai")}
    print(
        f"tokens/s {speeds}; our speed over GenAI's {ratios}; same answers {sum(row['same'] for row in rows)}"
    )
    if out:
        facts = {"model": model, "precision": precision, "tokens": tokens, "backend": backend}
        record = {"provenance": provenance() | facts, "speed_over_genai": ratios, "prompts": rows}
        out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
