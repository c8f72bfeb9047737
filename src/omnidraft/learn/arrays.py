"""Arrays as safetensors, for numpy alone: bfloat16 survives, and reading maps the file and copies nothing.

The format's own library needs another package for numpy and bfloat16, and copies. The format: the header's
size (8 bytes, little-endian), the header (JSON: name -> dtype, shape, data_offsets), then the data without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

# numpy has no bfloat16; one field of bits keeps the dtype with the array. For torch and back:
# torch.tensor(array.view("u2")).view(torch.bfloat16) and tensor.view(torch.uint16).numpy().view(BFLOAT16).
BFLOAT16 = np.dtype([("bfloat16", "<u2")])

_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": BFLOAT16,
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def serialise(
    arrays: Mapping[str, NDArray[Any]],
    metadata: Mapping[str, str],
) -> list[bytes | memoryview]:
    """The pieces of a safetensors file, in order; the arrays' own memory where it is contiguous.

    Raises:
        TypeError: an array's dtype is not in the format, or metadata are not text.
    """
    if not all(isinstance(text, str) for item in metadata.items() for text in item):
        raise TypeError("metadata must be text")
    stored = {name: _contiguous(name, array) for name, array in arrays.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    pieces: list[bytes | memoryview] = []
    offset = 0
    # Widest first: so each array is aligned in the file, and can be used where it lies.
    for name in sorted(stored, key=lambda name: (-stored[name].itemsize, name)):
        array = stored[name]
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
        pieces.append(array.reshape(-1).view(np.uint8).data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *pieces]


def _contiguous(name: str, array: NDArray[Any]) -> NDArray[Any]:
    # A dtype that calls itself so comes from ml_dtypes.
    array = array.view("<u2").view(BFLOAT16) if array.dtype.name == "bfloat16" else array
    if array.dtype.newbyteorder("<") not in _NAMES or name == "__metadata__":
        raise TypeError(f"array {name!r} of {array.dtype} cannot be kept")
    return np.asarray(array, array.dtype.newbyteorder("<"), order="C")


def parse(data: memoryview) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """(arrays, metadata) of a safetensors file; the arrays are views of `data`, read-only if it is.

    Raises:
        ValueError: `data` is not a whole safetensors file.
    """
    try:
        size = int.from_bytes(data[:8], "little")
        if size > len(data) - 8:
            raise ValueError("it is cut off")
        header = json.loads(bytes(data[8 : 8 + size]))
        metadata = dict(header.pop("__metadata__", {}))
        arrays, end = {}, 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape = _DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
            begin, until = entry["data_offsets"]
            if (
                begin != end
                or min(shape, default=0) < 0
                or until - begin != math.prod(shape) * dtype.itemsize
            ):
                raise ValueError(f"{name} does not lie where it should")
            arrays[name] = np.frombuffer(data[8 + size + begin : 8 + size + until], dtype).reshape(shape)
            end = until
        if end != len(data) - 8 - size:
            raise ValueError("its data end elsewhere")
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its header is unreadable ({error})") from error
    return arrays, metadata
