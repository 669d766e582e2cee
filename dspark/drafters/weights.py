"""The files of a released drafter, and what their headers say: names, dtypes, shapes. No weight is read.

A header is 8 bytes of length and that much JSON at the start of a safetensors file; where files are missing, the index
still tells the tensors' names. Formats that engines quantise to (fp8, fp4) are described like any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.errors import DataError, DsparkError
from dspark.io.jsonfile import strict_loads
from dspark.targets.layout import INDEX, weight_files

CONFIG = "config.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_LONGEST_HEADER = 100_000_000  # bytes; safetensors' own limit


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as its file's header describes it."""

    dtype: str  # as safetensors calls it: BF16, F8_E4M3, ...
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class StoredWeights:
    """What is known of a checkpoint's weights without reading one.

    Attributes:
        files: names of the safetensors files that belong to it.
        absent: those of them that are not in the folder.
        bytes: of those that are.
        tensors: by name; None: its file is absent, so the index alone knows of it.
    """

    files: tuple[str, ...]
    absent: tuple[str, ...]
    bytes: int
    tensors: dict[str, StoredTensor | None]


def drafter_files(folder: Path) -> list[str]:
    """Names of the safetensors files of a drafter's folder, sorted: those of its index, or all that are there.

    Raises:
        DataError: none, only pickled ones, or an index that cannot be followed.
    """
    if (folder / INDEX).is_file():
        try:
            return weight_files(folder)
        except DsparkError as reason:
            raise DataError(reason.message, "fetch the drafter again") from None
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if names:
        return names
    if pickles := sorted({path.name for pattern in PICKLES for path in folder.glob(pattern)}):
        raise DataError(
            f"{folder}: its weights are pickled ({pickles[0]}); pickles can run code and are never loaded",
            "supply the drafter in safetensors",
        )
    raise DataError(f"{folder}: no .safetensors files", "name the folder of the drafter's checkpoint")


def has_weights(folder: Path) -> bool:
    """Whether a folder holds weights of any kind, or an index of them."""
    kinds = (INDEX, "*.safetensors", *PICKLES)
    return any(True for kind in kinds for _ in folder.glob(kind))


def stored_weights(folder: Path) -> StoredWeights:
    """What the headers and the index of a folder say.

    Raises:
        DataError: no weights, or a file that is none or was cut off; an absent shard is no error.
    """
    files = drafter_files(folder)
    there = [name for name in files if (folder / name).is_file()]
    tensors: dict[str, StoredTensor | None] = {}
    if (folder / INDEX).is_file():
        tensors |= dict.fromkeys(strict_loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
    for name in there:
        tensors |= read_header(folder / name)
    return StoredWeights(
        files=tuple(files),
        absent=tuple(name for name in files if name not in there),
        bytes=sum((folder / name).stat().st_size for name in there),
        tensors=tensors,
    )


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name.

    Raises:
        DataError: not a whole safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise ValueError("it has no header")
            header = strict_loads(handle.read(length).decode("utf-8"))
        entries: dict[str, Any] = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if 8 + length + end != size:
            raise ValueError(f"its header speaks of {8 + length + end} bytes, it has {size}")
        return {
            name: StoredTensor(str(item["dtype"]), tuple(map(int, item["shape"]))) for name, item in entries.items()
        }
    except (OSError, ValueError, KeyError, IndexError, AttributeError, TypeError) as reason:
        raise DataError(f"{path}: not a whole safetensors file: {reason}", "fetch the drafter again") from None


def tensor_names(folder: Path) -> set[str]:
    """Names of a drafter's tensors without the prefix that some writers put before them, by their headers.

    Raises:
        DataError: no weights, or files that are missing or none.
    """
    return {name.removeprefix("model.") for file in drafter_files(folder) for name in read_header(folder / file)}


def dtypes(tensors: Iterable[StoredTensor | None]) -> dict[str, int]:
    """Elements by dtype of the tensors whose headers were read, most first."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        if tensor is not None:
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.elements
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
