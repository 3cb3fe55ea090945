"""Writes a safetensors file one tensor after the other; the library's own writer wants them all in memory."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str, value: Callable[[str], np.ndarray]
) -> None:
    """Write the tensors named in `shapes`, all of one dtype; `value` gives each when it is its turn."""
    itemsize = np.dtype(dtype).itemsize
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + itemsize * math.prod(shape)
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data starts at a multiple of 8
    with path.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, shape in shapes.items():
            tensor = np.ascontiguousarray(value(name), dtype)
            if tensor.shape != shape:
                raise ValueError(f"{path}: tensor {name!r} has shape {tensor.shape} instead of {shape}")
            out.write(tensor.reshape(-1).view(np.uint8).data)
