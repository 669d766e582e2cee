"""Confidence records that SGLang collected in files: shards `<stem>.<n>.pt` of release 0.5.23 (engine-formats.md, 1.8).

The one place that reads foreign `.pt` files, and it unpickles nothing but tensors. A shard holds `logits` and
`prefix_mask`, both [blocks, gamma]: raw confidence logits, and 1 as long as the drafts are the target's arg maxima. The
mask says that whatever the traffic's temperature was, so the label is `greedy_match` also for sampled traffic. A shard
does not say which block is of which request, or where a reply ended: drafts behind an end were compared with what the
target would go on to say, which is a greedy match as any other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.calibration.records import Records
from dspark.errors import CalibrationError, DataError
from dspark.io.digest import digest_file

COLLECT = (
    "collect them with SGLANG_DSPARK_STS_COLLECT_PATH=FOLDER/STEM SGLANG_RAGGED_VERIFY_MODE=cap-accept; a shard is "
    "written every 256 steps"
)
_SHARD = re.compile(r"(?P<stem>.+)\.(?P<number>0|[1-9][0-9]*)\.pt")


def shard_files(folder: Path) -> list[Path]:
    """The shards of a folder, by stem and number.

    Raises:
        DataError: there are none.
    """
    found = [(match["stem"], int(match["number"]), path) for path in _files(folder) if (match := _named(path))]
    if not found:
        raise DataError(f"{folder} holds no shards <stem>.<n>.pt", COLLECT)
    return [path for _, _, path in sorted(found)]


def shard_digests(folder: Path) -> dict[str, str]:
    """The sha256 of each shard, by name.

    Raises:
        DataError: there are none.
    """
    return {path.name: digest_file(path) for path in shard_files(folder)}


def read_shards(folder: Path, *, gamma: int, temperature: float) -> Records:
    """All blocks of a folder's shards. Whole shards are split and resampled, as blocks of one resemble each other.

    Args:
        folder: with shards of one drafter and one kind of traffic.
        gamma: the drafter's.
        temperature: of the traffic.
    Raises:
        DataError: no shards, one that cannot be read, or blocks of another size; names the file.
        CalibrationError: values that no confidence head and no mask have.
    """
    paths = shard_files(folder)
    shards = [_read(path, gamma) for path in paths]
    try:
        return Records(
            logits=np.concatenate([logits for logits, _ in shards]),
            accepted=np.concatenate([mask for _, mask in shards]),
            conversation=np.repeat([path.name for path in paths], [len(logits) for logits, _ in shards]),
            temperature=temperature,
            label="greedy_match",
            source=f"{len(paths)} shards that SGLang collected",
        )
    except CalibrationError as reason:
        raise CalibrationError(f"{folder}: {reason.message}", COLLECT) from None


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []


def _named(path: Path) -> re.Match[str] | None:
    return _SHARD.fullmatch(path.name)


def _read(path: Path, gamma: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Logits and mask of one shard, [blocks, gamma]."""
    import torch

    try:
        shard: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as reason:  # whatever a damaged archive makes of it
        said = str(reason).strip().splitlines() or [type(reason).__name__]
        raise DataError(f"{path}: not a file of tensors: {said[0]}", COLLECT) from None
    arrays = []
    for name in ("logits", "prefix_mask"):
        tensor = shard.get(name) if isinstance(shard, Mapping) else None
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 2:
            raise DataError(f"{path}: it has no {name} [blocks, gamma], as shards of SGLang do", COLLECT)
        if tensor.shape[1] != gamma:
            raise DataError(
                f"{path}: {name} is of blocks of {tensor.shape[1]}, the drafter has gamma {gamma}",
                "collect shards with this build's drafter",
            )
        arrays.append(tensor.double().numpy())
    if arrays[0].shape != arrays[1].shape:
        raise DataError(f"{path}: {len(arrays[0])} rows of logits and {len(arrays[1])} of prefix_mask", COLLECT)
    return arrays[0], arrays[1]
