"""The keys of a GGUF file, read without the gguf package: what a drafter's file says of itself.

Layout (GGUF, version 3, little-endian): magic, version, numbers of tensors and keys, then every key with its type and
value. The tensors behind them are not looked at.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

_MAGIC, _VERSION = b"GGUF", 3
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LONGEST = 2**20  # bytes of a string, items of an array of numbers


@dataclass(frozen=True)
class GGUFHeader:
    """What stands before the tensors.

    Attributes:
        keys: by name; an array of strings by its length alone.
        tensors: how many there are.
    """

    keys: dict[str, Any]
    tensors: int


def read_gguf_header(handle: BinaryIO, size: int) -> GGUFHeader:
    """Read the keys of an open GGUF file of `size` bytes, from its start.

    Raises:
        ValueError: anything that is not a well-formed header.
    """
    reader = _Reader(handle, size)
    if reader.take(4) != _MAGIC:
        raise ValueError("does not begin as a GGUF file does")
    version, tensors, count = reader.number("I"), reader.number("Q"), reader.number("Q")
    if version != _VERSION:
        raise ValueError(f"is GGUF version {version}, this version of dspark reads {_VERSION}")
    keys: dict[str, Any] = {}
    for _ in range(count):
        name = reader.string()
        if name in keys:
            raise ValueError(f"has the key {name!r} twice")
        keys[name] = reader.value(reader.number("I"))
    return GGUFHeader(keys, tensors)


class _Reader:
    """Takes values off an open file and never more than it holds."""

    def __init__(self, handle: BinaryIO, size: int) -> None:
        self._handle, self._left = handle, size

    def take(self, count: int) -> bytes:
        """The next bytes."""
        if count > self._left:
            raise ValueError("the GGUF header is cut short")
        self._left -= count
        return self._handle.read(count)

    def number(self, kind: str) -> Any:
        """The next number of a `struct` kind."""
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def string(self) -> str:
        """The next string."""
        length = self.number("Q")
        if length > _LONGEST:
            raise ValueError("the GGUF header holds an overlong string")
        return self.take(length).decode("utf-8")

    def value(self, kind: int) -> Any:
        """The next value of one of GGUF's kinds."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.number("I"), self.number("Q"))
        if kind not in _NUMBERS:
            raise ValueError(f"the GGUF header holds a value of the unknown kind {kind}")
        return self.number(_NUMBERS[kind])

    def _array(self, kind: int, count: int) -> Any:
        if kind == _STRING:
            for _ in range(count):
                self._skip(self.number("Q"))
            return count
        if kind not in _NUMBERS or count > _LONGEST:
            raise ValueError(f"the GGUF header holds an array of {count} values of kind {kind}")
        width = struct.calcsize(f"<{_NUMBERS[kind]}")
        return list(struct.unpack(f"<{count}{_NUMBERS[kind]}", self.take(count * width)))

    def _skip(self, count: int) -> None:
        if count > self._left:
            raise ValueError("the GGUF header is cut short")
        self._left -= count
        self._handle.seek(count, 1)
