"""Shard files read sequence by sequence, into memory of our own, each part compared with its checksum.

A mapped file would be simpler, but what of it is in memory is up to the kernel, reading it ahead is too, and on a
network file system a fault stops the whole process. Here a read is asked for, counted and checked.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.errors import IntegrityError
from dspark.features.compression import decode
from dspark.features.store import FEATURES, INDEX, REPAIR, checksum
from dspark.io.digest import digest_bytes
from dspark.io.jsonfile import canonical_json

_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
}
_LONGEST_HEADER = 100 << 20  # safetensors' own limit
_NEEDED = {"token_ids", "taps", "last_hidden", "logsumexp"}


@dataclass(frozen=True)
class FeatureSequence:
    """One prompt with its response and what the target's layers say about each of its tokens."""

    id: str
    domain: str
    token_ids: Tensor  # int64 [S]
    prompt_length: int  # tokens before the response
    taps: Tensor  # [S, m*d], outputs of the tapped layers, ascending
    last_hidden: Tensor  # [S, d], after the target's final norm
    # float32 [S], over the whole vocabulary of the float32 cast of the target's logits, at positions that predict a
    # token of the response; NaN elsewhere, where nobody has a use for it.
    logsumexp: Tensor


@dataclass(frozen=True, slots=True)
class _Block:
    """Where a tensor stands in its file."""

    start: int
    dtype: torch.dtype
    width: int  # numbers per token
    vector: bool

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    def tensor(self, buffer: bytearray) -> Tensor:
        found = torch.frombuffer(buffer, dtype=self.dtype)
        return found if self.vector else found.view(-1, self.width)


class Shard:
    """One shard: its index in memory, its tokens and features on disk.

    Args:
        path: of the file.
        header_sha256: compared if it is given; the header holds the checksum of everything else.

    Attributes:
        path: of the file.
        offsets: first token of each sequence and the end, int64 [n + 1].
        prompt_lengths: int64 [n].
        domains: of each sequence.

    Raises:
        IntegrityError: not a shard, or its index is damaged.
    """

    def __init__(self, path: Path, header_sha256: str | None = None) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                start, header = _header(file, path.stat().st_size, header_sha256)
                names, sums = _metadata(header)
                self._blocks = {name: _block(entry, start) for name, entry in header.items()}
                index = {name: _read(file.fileno(), *self._whole(header, name)) for name in INDEX}
            if absent := _NEEDED - self._blocks.keys():
                raise ValueError(f"it has no {min(absent)}")
            if checksum([canonical_json(names).encode(), *(index[name] for name in INDEX)]) != sums["index"]:
                raise ValueError("the checksum of its index is another one")
            self.offsets: NDArray[np.int64] = np.frombuffer(index["offsets"], np.int64)
            self.prompt_lengths: NDArray[np.int64] = np.frombuffer(index["prompt_lengths"], np.int64)
            self._ids = np.array([identity.encode() for identity, _ in names])
            # Names of domains repeat from shard to shard: one string for all.
            self.domains = tuple(sys.intern(domain) for _, domain in names)
            self._sums = np.array([sums["tokens"], sums["features"]], np.uint32)  # [2, n]
            if not len(names) == len(self.prompt_lengths) == self._sums.shape[1] == len(self.offsets) - 1:
                raise ValueError("its index and its names speak of different numbers of sequences")
            self._features = tuple(name for name in FEATURES if name in self._blocks)
        except FileNotFoundError:
            raise IntegrityError(f"{path}: missing", REPAIR) from None
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as reason:
            raise IntegrityError(f"{path}: not a feature shard: {reason}", REPAIR) from None

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def length(self, number: int) -> int:
        """Tokens of a sequence."""
        return int(self.offsets[number + 1] - self.offsets[number])

    def feature_bytes(self, number: int) -> int:
        """What the features of a sequence take in memory: as they are read, and decoded if they are compressed."""
        token = sum(self._blocks[name].row_bytes for name in self._features)
        if "taps_scales" in self._blocks:
            token += 4 * (self._blocks["taps"].width + self._blocks["last_hidden"].width)
        return self.length(number) * token

    def tokens(self, number: int) -> Tensor:
        """Token ids of a sequence, int64 [S].

        Raises:
            IntegrityError: they are damaged.
        """
        buffers = self._parts(number, ("token_ids",), 0)
        return self._blocks["token_ids"].tensor(buffers["token_ids"])

    def fetch(self, number: int) -> dict[str, bytearray]:
        """Features of a sequence as they are stored; what takes long is done without the interpreter's lock.

        Raises:
            IntegrityError: they are damaged.
        """
        return self._parts(number, self._features, 1)

    def sequence(self, number: int, fetched: Mapping[str, bytearray], longest: int | None = None) -> FeatureSequence:
        """A sequence from what was fetched of it.

        Args:
            longest: tokens; the rest is cut.
        """
        parts = {name: self._blocks[name].tensor(buffer)[:longest] for name, buffer in fetched.items()}
        return FeatureSequence(
            id=self._ids[number].decode(),
            domain=self.domains[number],
            token_ids=self.tokens(number)[:longest],
            prompt_length=int(self.prompt_lengths[number]),
            taps=decode(parts["taps"], parts.get("taps_scales")),
            last_hidden=decode(parts["last_hidden"], parts.get("last_hidden_scales")),
            logsumexp=parts["logsumexp"],
        )

    def _whole(self, header: Mapping[str, Any], name: str) -> tuple[int, int]:
        start, end = header[name]["data_offsets"]
        return self._blocks[name].start, end - start

    def _parts(self, number: int, names: tuple[str, ...], kind: int) -> dict[str, bytearray]:
        first, length = int(self.offsets[number]), self.length(number)
        buffers = {}
        try:
            handle = os.open(self.path, os.O_RDONLY)
            try:
                for name in names:
                    block = self._blocks[name]
                    buffers[name] = _read(handle, block.start + first * block.row_bytes, length * block.row_bytes)
            finally:
                os.close(handle)
        except (OSError, ValueError) as reason:
            raise IntegrityError(f"{self.path}: {reason}", REPAIR) from None
        if checksum(list(buffers.values())) != self._sums[kind, number]:
            what = "tokens" if kind == 0 else "features"
            raise IntegrityError(f"{self.path}: the checksum of the {what} of sequence {number} is another one", REPAIR)
        return buffers


def _header(file: Any, size: int, sha256: str | None) -> tuple[int, dict[str, Any]]:
    """Where the data of a safetensors file starts, and its header."""
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if not 0 < length <= min(size - 8, _LONGEST_HEADER):
        raise ValueError("it has no header")
    text = file.read(length)
    if sha256 is not None and digest_bytes(prefix + text) != sha256:
        raise ValueError(f"the sha256 of its header is not {sha256}")
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    if 8 + length + max(ends, default=0) != size:
        raise ValueError(f"its header speaks of {8 + length + max(ends, default=0)} bytes, it has {size}")
    return 8 + length, header


def _metadata(header: dict[str, Any]) -> tuple[list[list[str]], dict[str, Any]]:
    index = json.loads(header.pop("__metadata__")["index"])
    return index["names"], index["checksums"]


def _block(entry: Mapping[str, Any], start: int) -> _Block:
    shape = entry["shape"]
    return _Block(
        start=start + entry["data_offsets"][0],
        dtype=_DTYPES[entry["dtype"]],
        width=shape[1] if len(shape) == 2 else 1,
        vector=len(shape) == 1,
    )


def _read(handle: int, start: int, count: int) -> bytearray:
    """So many bytes from a place of a file; ValueError if it ends before."""
    buffer = bytearray(count)
    view, done = memoryview(buffer), 0
    while done < count:
        read = os.preadv(handle, [view[done:]], start + done)
        if read == 0:
            raise ValueError("it ends early")
        done += read
    return buffer
