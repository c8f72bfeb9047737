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
from omnidraft.errors import CacheError, InsufficientMemoryError

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
    kept_as = _kept_as(name, checkpoint)
    home = cache.home_of(kept_as)
    folder = home / f"openvino-{precision}"
    if _is_from(folder, made_from):
        return folder
    with cache.locked(home.name, Progress(disable=True)), cache.writing(home):
        if _is_from(folder, made_from):  # another process made it while we waited
            return folder
        with cache.replacing(folder) as unfinished:
            needed = int(_SIZE[precision] * sum(size for _, size, _ in made_from))
            cache.require_space(unfinished, needed)
            require_memory(needed + (2 << 30), f"converting {name} to {precision}")
            for pattern in _TEXT_FILES:
                for file in checkpoint.glob(pattern):
                    if not file.name.startswith((cache.MANIFEST, "model.safetensors")):
                        shutil.copy(file, unfinished)
            model = graph.build(checkpoint, config, precision)
            try:
                ov.save_model(model, unfinished / MODEL, compress_to_fp16=False)
            except RuntimeError as error:  # what a full disk is to OpenVINO
                raise CacheError(
                    f"OpenVINO cannot write in {home} ({error}); make room, or set OMNIDRAFT_HOME to another folder"
                ) from error
            manifest = {
                "name": kept_as,
                "source": str(checkpoint),
                "made_from": made_from,
                "precision": precision,
                "openvino": ov.__version__,
                "version": _VERSION,
            }
            text = json.dumps(manifest, indent=2)
            (unfinished / cache.MANIFEST).write_text(text + "\n", encoding="utf-8")
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


def _kept_as(name: str, checkpoint: Path) -> str:
    """The model's name in the cache: a file's or folder's of the user's is its full path."""
    own = cache.read_manifest(checkpoint)
    if own and checkpoint == cache.home_of(own["name"]) / "checkpoint":
        return str(own["name"])
    return os.path.realpath(checkpoint) if checkpoint == Path(os.path.expanduser(name)) else name


def _stamp(checkpoint: Path) -> list[list[Any]]:
    """Names, sizes and times of the files that a conversion reads."""
    files = [*checkpoint.glob("*.safetensors"), checkpoint / "config.json"]
    return sorted([file.name, (stat := file.stat()).st_size, stat.st_mtime_ns] for file in files)


def _is_from(folder: Path, made_from: list[list[Any]]) -> bool:
    try:
        manifest = json.loads((folder / cache.MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    whole = (folder / MODEL).is_file() and (folder / MODEL).with_suffix(".bin").is_file()
    return bool(whole and manifest.get("made_from") == made_from and manifest.get("version") == _VERSION)
