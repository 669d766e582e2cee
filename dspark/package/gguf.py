"""A GGUF file read without the gguf package: its keys, the shapes of its tensors, and the ids of a draft vocabulary.

Layout (GGUF, version 3, little-endian): magic, version, numbers of tensors and keys; every key with its type and value;
every tensor's name, sizes, type and place; then, aligned, the tensors' bytes. Of these only ids of tokens are read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

_MAGIC, _VERSION = b"GGUF", 3
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LONGEST = 2**20  # bytes of a string, items of an array of numbers
_MOST_AXES = 4
_INT64 = 27  # the number of the type of tensors of 64-bit integers
_IDS = "d2t"
_ALIGNMENT = ("general.alignment", 32)  # its key and what it is without one


@dataclass(frozen=True)
class GGUFHeader:
    """What stands before the tensors' bytes, and the one tensor that is ids of tokens.

    Attributes:
        keys: by name; an array of strings by its length alone.
        shapes: of every tensor, row-major.
        draft_ids: target ids of the tokens of a reduced draft vocabulary; None: the file has no `d2t`.
    """

    keys: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    draft_ids: tuple[int, ...] | None


def read_gguf_header(handle: BinaryIO, size: int) -> GGUFHeader:
    """Read an open GGUF file of `size` bytes, from its start, as far as it is worth reading.

    Raises:
        ValueError: anything that is not well-formed.
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
    shapes: dict[str, tuple[int, ...]] = {}
    places: dict[str, tuple[int, int]] = {}  # type and offset
    for _ in range(tensors):
        name = reader.string()
        if name in shapes:
            raise ValueError(f"has the tensor {name!r} twice")
        shapes[name] = reader.shape()
        places[name] = reader.number("I"), reader.number("Q")
    if _IDS not in shapes:
        return GGUFHeader(keys, shapes, None)
    kind, offset = places[_IDS]
    if kind != _INT64 or len(shapes[_IDS]) != 1:
        raise ValueError(f"its {_IDS} is no list of 64-bit integers")
    key, default = _ALIGNMENT
    reader.align(keys.get(key, default))
    return GGUFHeader(keys, shapes, reader.integers(offset, shapes[_IDS][0]))


class _Reader:
    """Takes values off an open file and never more than it holds."""

    def __init__(self, handle: BinaryIO, size: int) -> None:
        self._handle, self._size, self._left = handle, size, size

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

    def shape(self) -> tuple[int, ...]:
        """The next tensor's sizes, which stand the other way round in the file."""
        axes = self.number("I")
        if axes > _MOST_AXES:
            raise ValueError(f"the GGUF header holds a tensor of {axes} axes")
        return tuple(reversed([self.number("Q") for _ in range(axes)]))

    def align(self, alignment: Any) -> None:
        """Go on to the next multiple of `alignment`, where the tensors' bytes begin."""
        if type(alignment) is not int or not 0 < alignment <= _LONGEST:
            raise ValueError(f"has the alignment {alignment!r}")
        self._skip(-(self._size - self._left) % alignment)

    def integers(self, offset: int, count: int) -> tuple[int, ...]:
        """64-bit integers at an offset from here."""
        if count > _LONGEST:
            raise ValueError(f"the GGUF file holds a list of {count} ids")
        self._skip(offset)
        return struct.unpack(f"<{count}q", self.take(8 * count))

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
