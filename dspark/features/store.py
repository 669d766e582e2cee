"""The feature store: shards keyed by what they were made from, and the manifest that lists a corpus's shards.

A shard is one safetensors file `<key>.safetensors` of whole sequences, their tokens one after the other:
`token_ids` int64 [T], `offsets` int64 [n + 1], `prompt_lengths` int64 [n], `taps` [T, m*d], `last_hidden` [T, d],
`logsumexp` float32 [T], with compressed dtypes `taps_scales` [T, m] and `last_hidden_scales` [T, groups]; in its header
the ids, the domains and a checksum per sequence. Its key is the digest of the target, the taps, the dtype, the
algorithm's revision and the sequences (architecture.md, section 6), so equal keys hold equal features whoever made
them. This module loads torch only to write; checking a store needs none.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dspark.config.models import Digest, FeatureDType, FeatureMode
from dspark.errors import DataError
from dspark.io.atomic import atomic_path
from dspark.io.digest import digest_bytes, digest_file, digest_json
from dspark.io.jsonfile import canonical_json, read_model, write_model

if TYPE_CHECKING:
    from torch import Tensor

    from dspark.corpus.sequences import TokenSequence

# Raised whenever the same inputs would give other features or another layout: it is part of every key.
REVISION = 2
SUFFIX = ".safetensors"
INDEX = ("offsets", "prompt_lengths")
FEATURES = ("taps", "taps_scales", "last_hidden", "last_hidden_scales", "logsumexp")  # in the order of checksums
REPAIR = "dspark store verify --repair, then `dspark run` makes it again"

_HEADER_BYTES = 4096  # of a shard's header and index, beside what grows with its sequences


class ShardEntry(BaseModel):
    """One shard of a corpus; without bytes and sha256 it is not stored, and computed where it is needed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: Digest
    sequences: int = Field(gt=0)
    tokens: int = Field(gt=0)
    bytes: int | None = Field(default=None, gt=0)
    sha256: Digest | None = None
    # Of the header, which holds a checksum of everything else: what is read in parts is compared with it.
    header_sha256: Digest | None = None

    @model_validator(mode="after")
    def _whole(self) -> ShardEntry:
        if (self.bytes is None) != (self.sha256 is None):
            raise ValueError("bytes and sha256 belong together")
        return self

    @property
    def stored(self) -> bool:
        """True if the shard lies in the store."""
        return self.sha256 is not None


class FeatureManifest(BaseModel):
    """`corpora/<c>/features/manifest.json`: which shards a corpus consists of."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    schema_: Literal["dspark/features/1"] = Field(default="dspark/features/1", alias="schema")
    target_digest: Digest
    taps: tuple[int, ...]
    dtype: FeatureDType
    hidden_size: int
    mode: FeatureMode = "cached"
    revision: int = REVISION
    splits: dict[str, tuple[ShardEntry, ...]]

    @property
    def stored(self) -> dict[str, ShardEntry]:
        """The shards that lie in the store, by key."""
        return {entry.key: entry for entries in self.splits.values() for entry in entries if entry.stored}

    def entries(self, split: str) -> tuple[ShardEntry, ...]:
        """The shards of a split, in the corpus's order.

        Raises:
            DataError: no such split.
        """
        if split not in self.splits:
            raise DataError(f"the features have no split {split!r}, only {sorted(self.splits)}")
        return self.splits[split]

    @property
    def bytes(self) -> int:
        """What those take there."""
        return sum(entry.bytes or 0 for entry in self.stored.values())


def shard_path(store: Path, key: str) -> Path:
    """Where a shard lies."""
    return store / f"{key}{SUFFIX}"


def entry_path(store: Path, key: str) -> Path:
    """Where the entry of a shard lies, which is written when the shard is whole."""
    return store / f"{key}.json"


def shard_key(target_digest: str, taps: Sequence[int], dtype: str, sequences: Sequence[TokenSequence]) -> str:
    """Digest of everything that decides a shard's bytes."""
    rows = [[row.id, row.domain, row.prompt_length, list(row.token_ids)] for row in sequences]
    return digest_json([target_digest, list(taps), dtype, REVISION, digest_json(rows)])


def most_bytes(sequences: Sequence[TokenSequence], token_bytes: int) -> int:
    """What a shard of these sequences takes on disk at most.

    Args:
        token_bytes: `sizes.bytes_per_token`.
    """
    tokens = sum(len(row.token_ids) for row in sequences)
    names = canonical_json([[row.id, row.domain] for row in sequences])
    # Inside the header's JSON a name's quotes are escaped; a checksum has ten digits, an index entry eight bytes twice.
    return tokens * token_bytes + 2 * len(names.encode()) + len(sequences) * 2 * (8 + 12) + _HEADER_BYTES


def write_shard(store: Path, key: str, sequences: Sequence[TokenSequence], tensors: Mapping[str, Tensor]) -> ShardEntry:
    """Write a shard, then its entry beside it, each atomically: a shard with an entry is whole.

    Args:
        tensors: some of `FEATURES`, of all tokens, sequence after sequence.
    """
    import torch
    from safetensors.torch import save_file

    lengths = torch.tensor([0, *(len(row.token_ids) for row in sequences)], dtype=torch.int64)
    tokens = torch.tensor([token for row in sequences for token in row.token_ids], dtype=torch.int64)
    index = {
        "offsets": lengths.cumsum(0),
        "prompt_lengths": torch.tensor([row.prompt_length for row in sequences], dtype=torch.int64),
    }
    names = [[row.id, row.domain] for row in sequences]
    present = [tensors[name] for name in FEATURES if name in tensors]
    parts = list(zip(index["offsets"].tolist(), index["offsets"][1:].tolist(), strict=False))
    checksums = {
        "index": checksum([canonical_json(names).encode(), *(_bytes(index[name]) for name in INDEX)]),
        "tokens": [checksum([_bytes(tokens[start:stop])]) for start, stop in parts],
        "features": [checksum([_bytes(tensor[start:stop]) for tensor in present]) for start, stop in parts],
    }
    # One key: safetensors writes several in any order, and equal features should be equal bytes.
    metadata = {"index": canonical_json({"names": names, "checksums": checksums})}
    path = shard_path(store, key)
    with atomic_path(path) as temporary:
        save_file({**index, "token_ids": tokens, **tensors}, temporary, metadata=metadata)
        entry = ShardEntry(
            key=key,
            bytes=temporary.stat().st_size,
            sha256=digest_file(temporary),
            header_sha256=_header_digest(temporary),
            sequences=len(sequences),
            tokens=len(tokens),
        )
    write_model(entry_path(store, key), entry)
    return entry


def checksum(parts: Sequence[Any]) -> int:
    """crc32 of some buffers, one after the other."""
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value


def read_entry(store: Path, key: str) -> ShardEntry | None:
    """What was written beside a shard when it was whole, or None."""
    try:
        entry = read_model(entry_path(store, key), ShardEntry)
    except DataError:
        return None
    return entry if entry.key == key and entry.stored else None


def shard_entry(store: Path, key: str) -> ShardEntry | None:
    """The entry of a shard that lies whole in the store, or None; reads no weights."""
    entry = read_entry(store, key)
    return entry if entry is not None and damage(entry, store) is None else None


def known_entry(store: Path, key: str, sequences: Sequence[TokenSequence]) -> ShardEntry | None:
    """The same, unless the entry counts something else than these sequences: then it was damaged."""
    entry = shard_entry(store, key)
    counts = len(sequences), sum(len(row.token_ids) for row in sequences)
    return entry if entry is not None and (entry.sequences, entry.tokens) == counts else None


def discard(store: Path, key: str) -> None:
    """Remove a shard and its entry, if they are there."""
    entry_path(store, key).unlink(missing_ok=True)
    shard_path(store, key).unlink(missing_ok=True)


def damaged_shards(manifest: FeatureManifest, store: Path, *, deep: bool = False) -> list[ShardEntry]:
    """Shards that should be stored and are missing or not what the manifest says; loads no torch.

    Args:
        deep: compare digests too, which reads every byte; otherwise only presence and size.
    """
    return [entry for entry in manifest.stored.values() if damage(entry, store, deep=deep)]


def damage(entry: ShardEntry, store: Path, *, deep: bool = False) -> str | None:
    """What is wrong with a stored shard, or None; as `damaged_shards`."""
    path = shard_path(store, entry.key)
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return "missing"
    if size != entry.bytes:
        return f"{size} bytes instead of {entry.bytes}"
    if deep and digest_file(path) != entry.sha256:
        return f"its sha256 is not {entry.sha256}"
    return None


def _header_digest(path: Path) -> str:
    with path.open("rb") as file:
        length = file.read(8)
        return digest_bytes(length + file.read(int.from_bytes(length, "little")))


def _bytes(tensor: Tensor) -> Any:
    import torch

    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
