"""A drafter as it is shipped: its trained weights in 8 bits, in one file. The embedding is its parent's, read there.

Each matrix has a scale for each row, as OpenVINO's int8 has; norms are float16. Unpacked it is a checkpoint like
any other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omnidraft.errors import DamagedFileError

# The names in a checkpoint of a model like Llama.
_EMBEDDING, _OUTPUT, _TRANSLATOR = "model.embed_tokens.weight", "lm_head.weight", "translator.weight"
_SCALE = ".scale"
_KEPT = "kept"


def pack_drafter(built: Path, file: Path) -> None:
    """Write the drafter that `build_drafter` made in the folder `built` into one file."""
    import torch
    from safetensors.torch import save_file

    state = torch.load(built / "training" / "state.pt", map_location="cpu", weights_only=True)
    tensors: dict[str, Any] = {}
    for name, weight in state["weights"].items():
        name = name.removeprefix("model.")  # of `Student`
        weight = weight.detach().float()
        if weight.dim() == 1:
            tensors[name] = weight.half()
            continue
        scale = (weight.abs().amax(1, keepdim=True) / 127).half()
        tensors[name] = (weight / scale.float()).round().clamp(-127, 127).to(torch.int8)
        tensors[name + _SCALE] = scale
    about = json.loads((built / "drafter.json").read_text(encoding="utf-8"))
    kept = about.pop("kept")
    if kept is not None:
        tensors[_KEPT] = torch.tensor(kept, dtype=torch.int32)
    texts = {name: (built / f"{name}.json").read_text() for name in ("config", "generation_config")}
    save_file(tensors, file, metadata={"drafter": json.dumps(about), **texts})


def unpack_drafter(file: Path, parent: Path, folder: Path) -> None:
    """Write the drafter in `file` as a checkpoint into the existing, empty `folder`; `parent`: its parent's checkpoint.

    Raises:
        DamagedFileError: a file that cannot be read, or a parent that it does not belong to.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    from omnidraft.distil.student import copy_text_files, write_trimmed

    try:
        with safe_open(file, framework="pt") as opened:
            texts = opened.metadata()
            stored = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, it has no __iter__
        with safe_open(parent / "model.safetensors", framework="pt") as opened:
            embedding = opened.get_tensor(_EMBEDDING)
            tied = _OUTPUT not in opened.keys()  # noqa: SIM118
            output = embedding if tied else opened.get_tensor(_OUTPUT)
        kept = stored.pop(_KEPT, None)
        if kept is not None:
            embedding, output = embedding[kept.long()], output[kept.long()]
        weights = {
            name: (tensor.float() * stored[name + _SCALE].float() if name + _SCALE in stored else tensor)
            for name, tensor in stored.items()
            if not name.endswith(_SCALE)
        }
        weights[_OUTPUT] = output.float() @ weights.pop(_TRANSLATOR).float()
        weights[_EMBEDDING] = embedding
        for name in ("config", "generation_config"):
            (folder / f"{name}.json").write_text(texts[name], encoding="utf-8")
    except Exception as error:  # safetensors raises its own, which no module exports
        raise DamagedFileError(
            f"{file} cannot be unpacked with {parent} ({error}); install omnidraft anew"
        ) from error
    save_file(
        {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    copy_text_files(parent, folder)
    contents = json.loads((parent / "tokenizer.json").read_text(encoding="utf-8"))
    write_trimmed(contents, range(len(embedding)) if kept is None else kept.tolist(), folder)
