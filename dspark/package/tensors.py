"""The header of a safetensors file, read without any tensor library: names, dtypes, shapes, byte ranges.

Layout: 8 bytes little-endian N, N bytes of JSON, then the tensors' bytes without holes (safetensors format, version 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from dspark.io.jsonfile import strict_loads

_MAX_HEADER = 16 * 2**20
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "F16": 16, "BF16": 16, "I32": 32, "F32": 32, "I64": 64, "F64": 64}
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class TensorHeader:
    """One tensor of a safetensors file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int = 0  # of its bytes in the file

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read_header(handle: BinaryIO, size: int) -> dict[str, TensorHeader]:
    """Read and check the header of an open safetensors file of `size` bytes, from its start.

    Raises:
        ValueError: anything that is not a well-formed header describing exactly the bytes that follow.
    """
    prefix = handle.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 2 <= length <= min(_MAX_HEADER, size - 8):
        raise ValueError("the safetensors header does not fit into the file")
    raw = handle.read(length)
    if not raw.startswith(b"{"):
        raise ValueError("the safetensors header is not a JSON object")
    header: dict[str, Any] = strict_loads(raw.decode("utf-8"))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("the safetensors metadata is not a map of strings")
    tensors: dict[str, TensorHeader] = {}
    ranges: list[tuple[int, int]] = []
    for name, entry in header.items():
        tensors[name], span = _tensor(name, entry, 8 + length)
        ranges.append(span)
    position = 0
    for start, end in sorted(ranges):
        if start != position:
            raise ValueError("the tensors' bytes overlap or leave a hole")
        position = end
    if position != size - 8 - length:
        raise ValueError("the file does not end where the last tensor does")
    return tensors


def _tensor(name: str, entry: Any, data: int) -> tuple[TensorHeader, tuple[int, int]]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"tensor {name!r} has the unknown dtype {dtype!r}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name!r} has a shape or byte range that is no list of natural numbers")
    start, end = offsets
    tensor = TensorHeader(name, dtype, tuple(shape), data + start)
    if end - start != tensor.elements * _BITS[dtype] // 8:
        raise ValueError(f"tensor {name!r} does not fill its byte range")
    return tensor, (start, end)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**53 for item in value)


def describe_tensors(tensors: Mapping[str, TensorHeader]) -> tuple[int, str]:
    """(parameters, dtype) of a checkpoint: all floating-point elements and the dtype that most of them have.

    Raises:
        ValueError: no floating-point tensor.
    """
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        if tensor.dtype in DTYPES:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.elements
    if not sizes:
        raise ValueError("the checkpoint holds no floating-point tensor")
    return sum(sizes.values()), DTYPES[max(sizes, key=lambda dtype: (sizes[dtype], dtype))]
