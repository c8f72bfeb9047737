"""Convert a checkpoint for OpenVINO once and keep the result, with its provenance, in the cache folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import openvino as ov
from rich.progress import Progress

from omnidraft import cache
from omnidraft.backends import openvino_graph as graph
from omnidraft.errors import InsufficientMemoryError

MODEL = "openvino_model.xml"
_TEXT_FILES = ("*.json", "*.jinja", "tokenizer.model")  # what makes the folder a model by itself
_VERSION = 1  # of the graph: an older conversion is made anew
# Bytes of the result for each of the checkpoint's, which holds 16 bits a weight.
_SIZE = {"float32": 2.0, "bfloat16": 1.0, "int8": 0.52, "int4": 0.36}


def converted(name: str, checkpoint: Path, config: Any, precision: str) -> Path:
    """The folder with the model in `precision`; made on first use, or anew when the checkpoint has changed.

    Raises:
        UnsupportedModelError: an architecture that `openvino_graph` does not know.
        InsufficientMemoryError: the conversion would not fit.
        CacheError: the cache cannot be written, or the disk is too full.
    """
    graph.check_config(config, name)
    made_from = _stamp(checkpoint)
    home = cache.home_of(name)
    folder = home / f"openvino-{precision}"
    if _is_from(folder, made_from):
        return folder
    with cache.locked(home.name, Progress(disable=True)), cache.writing(home):
        if _is_from(folder, made_from):  # another process made it while we waited
            return folder
        home.mkdir(parents=True, exist_ok=True)
        needed = int(_SIZE[precision] * sum(size for _, size, _ in made_from))
        cache.require_space(home, needed)
        require_memory(needed + (2 << 30), f"converting {name} to {precision}")
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        for pattern in _TEXT_FILES:
            for file in checkpoint.glob(pattern):
                if not file.name.startswith((cache.MANIFEST, "model.safetensors")):
                    shutil.copy(file, unfinished)
        ov.save_model(graph.build(checkpoint, config, precision), unfinished / MODEL, compress_to_fp16=False)
        manifest = {
            "name": name,
            "source": str(checkpoint),
            "made_from": made_from,
            "precision": precision,
            "openvino": ov.__version__,
            "version": _VERSION,
        }
        (unfinished / cache.MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(unfinished, folder)
    return folder


def require_memory(needed: int, what: str) -> None:
    """Refuse work that needs more bytes of memory than are available, where the system says how many are.

    Raises:
        InsufficientMemoryError: it does not fit.
    """
    available = _available_memory()
    if available is not None and available < needed:
        raise InsufficientMemoryError(
            f"{what} needs about {needed / 1e9:.1f} GB of memory and {available / 1e9:.1f} GB are available; "
            "close other programs, or choose a smaller model or precision"
        )


def _available_memory() -> int | None:
    try:
        facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _stamp(checkpoint: Path) -> list[list[Any]]:
    """Names, sizes and times of the files that a conversion reads."""
    files = [*checkpoint.glob("*.safetensors"), checkpoint / "config.json"]
    return sorted([file.name, (stat := file.stat()).st_size, stat.st_mtime_ns] for file in files)


def _is_from(folder: Path, made_from: list[list[Any]]) -> bool:
    try:
        manifest = json.loads((folder / cache.MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(manifest.get("made_from") == made_from and manifest.get("version") == _VERSION)
