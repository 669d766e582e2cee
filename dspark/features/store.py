"""The feature store: shards keyed by what they were made from, and the manifest that lists a corpus's shards.

A shard is one safetensors file `<key>.safetensors` of whole sequences, their tokens one after the other:
`token_ids` int64 [T], `offsets` int64 [n + 1], `prompt_lengths` int64 [n], `taps` [T, m*d], `last_hidden` [T, d],
`logsumexp` float32 [T], and in its header the ids and domains. Its key is the digest of the target, the taps, the
dtype, the algorithm's revision and the sequences (architecture.md, section 6), so equal keys hold equal features
whoever made them. This module loads torch only to hand out tensors; checking a store needs none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dspark.config.models import Digest, DType
from dspark.errors import DataError, IntegrityError
from dspark.io.atomic import atomic_path
from dspark.io.digest import digest_file, digest_json
from dspark.io.jsonfile import canonical_json, read_model, write_model

if TYPE_CHECKING:
    from torch import Tensor

    from dspark.corpus.sequences import TokenSequence

# Raised whenever the same inputs would give other features: it is part of every key.
REVISION = 1


class ShardEntry(BaseModel):
    """One shard of a corpus."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: Digest
    bytes: int = Field(gt=0)
    sha256: Digest
    sequences: int = Field(gt=0)
    tokens: int = Field(gt=0)


class FeatureManifest(BaseModel):
    """`corpora/<c>/features/manifest.json`: which shards a corpus consists of."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    schema_: Literal["dspark/features/1"] = Field(default="dspark/features/1", alias="schema")
    target_digest: Digest
    taps: tuple[int, ...]
    dtype: DType
    hidden_size: int
    revision: int = REVISION
    splits: dict[str, tuple[ShardEntry, ...]]


@dataclass(frozen=True)
class FeatureSequence:
    """One prompt with its response and what the target's layers say about each of its tokens."""

    id: str
    domain: str
    token_ids: Tensor  # int64 [S]
    prompt_length: int  # tokens before the response
    taps: Tensor  # [S, m*d], outputs of the tapped layers, ascending
    last_hidden: Tensor  # [S, d], after the target's final norm
    logsumexp: Tensor  # float32 [S], over the whole vocabulary of the float32 cast of the target's logits


def shard_path(store: Path, key: str) -> Path:
    """Where a shard lies."""
    return store / f"{key}.safetensors"


def shard_key(target_digest: str, taps: Sequence[int], dtype: str, sequences: Sequence[TokenSequence]) -> str:
    """Digest of everything that decides a shard's bytes."""
    rows = [[row.id, row.domain, row.prompt_length, list(row.token_ids)] for row in sequences]
    return digest_json([target_digest, list(taps), dtype, REVISION, digest_json(rows)])


def bytes_per_token(hidden_size: int, taps: int, dtype: str) -> int:
    """What a token of features takes on disk: taps, last hidden, logsumexp and the id."""
    return hidden_size * (taps + 1) * {"float32": 4, "bfloat16": 2, "float16": 2}[dtype] + 4 + 8


def write_shard(store: Path, key: str, sequences: Sequence[TokenSequence], tensors: Mapping[str, Tensor]) -> ShardEntry:
    """Write a shard, then its entry beside it, each atomically: a shard with an entry is whole.

    Args:
        tensors: `taps`, `last_hidden` and `logsumexp` of all tokens, sequence after sequence.
    """
    import torch
    from safetensors.torch import save_file

    lengths = torch.tensor([0, *(len(row.token_ids) for row in sequences)], dtype=torch.int64)
    tokens = [token for row in sequences for token in row.token_ids]
    index = {
        "token_ids": torch.tensor(tokens, dtype=torch.int64),
        "offsets": lengths.cumsum(0),
        "prompt_lengths": torch.tensor([row.prompt_length for row in sequences], dtype=torch.int64),
    }
    names = canonical_json([[row.id, row.domain] for row in sequences])
    path = shard_path(store, key)
    with atomic_path(path) as temporary:
        save_file({**index, **tensors}, temporary, metadata={"sequences": names})
        entry = ShardEntry(
            key=key,
            bytes=temporary.stat().st_size,
            sha256=digest_file(temporary),
            sequences=len(sequences),
            tokens=len(tokens),
        )
    write_model(path.with_suffix(".json"), entry)
    return entry


def shard_entry(store: Path, key: str) -> ShardEntry | None:
    """The entry of a shard that lies whole in the store, or None; reads no weights."""
    path = shard_path(store, key)
    try:
        entry = read_model(path.with_suffix(".json"), ShardEntry)
    except DataError:
        return None
    return entry if entry.key == key and not _damage(entry, store, deep=False) else None


def known_entry(store: Path, key: str, sequences: Sequence[TokenSequence]) -> ShardEntry | None:
    """The same, unless the entry counts something else than these sequences: then it was damaged."""
    entry = shard_entry(store, key)
    counts = len(sequences), sum(len(row.token_ids) for row in sequences)
    return entry if entry is not None and (entry.sequences, entry.tokens) == counts else None


def discard(store: Path, key: str) -> None:
    """Remove a shard and its entry, if they are there."""
    path = shard_path(store, key)
    path.with_suffix(".json").unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def damaged_shards(manifest: FeatureManifest, store: Path, *, deep: bool = False) -> list[ShardEntry]:
    """Shards that are missing or not what the manifest says; loads no torch.

    Args:
        deep: compare digests too, which reads every byte; otherwise only presence and size.
    """
    return [entry for entries in manifest.splits.values() for entry in entries if _damage(entry, store, deep)]


def read_split(
    manifest: FeatureManifest, split: str, store: Path, *, max_length: int | None = None, verify: bool = True
) -> list[FeatureSequence]:
    """All sequences of a split, in the corpus's order, as memory-mapped tensors.

    Args:
        max_length: cut each sequence to so many tokens.
        verify: compare each shard's sha256 with the manifest first.
    Raises:
        DataError: no such split.
        IntegrityError: a shard is missing or damaged.
    """
    if split not in manifest.splits:
        raise DataError(f"the features have no split {split!r}, only {sorted(manifest.splits)}")
    sequences: list[FeatureSequence] = []
    for entry in manifest.splits[split]:
        damage = _damage(entry, store, deep=verify)
        if damage:
            path = shard_path(store, entry.key)
            raise IntegrityError(f"{path}: {damage}", f"delete {path}, then `dspark run` makes it again")
        sequences.extend(read_shard(shard_path(store, entry.key), max_length=max_length))
    return sequences


def read_shard(path: Path, *, max_length: int | None = None) -> list[FeatureSequence]:
    """The sequences of one shard; their tensors are views of the memory-mapped file.

    Raises:
        IntegrityError: not a shard.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as handle:
            names: list[list[str]] = json.loads(handle.metadata()["sequences"])
            tensors: dict[str, Any] = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError, ValueError) as reason:
        raise IntegrityError(
            f"{path}: not a feature shard: {reason}", f"delete {path}, then `dspark run` makes it again"
        ) from None
    offsets = tensors["offsets"].tolist()
    result = []
    for number, (identity, domain) in enumerate(names):
        start, stop = offsets[number], offsets[number + 1]
        if max_length is not None:
            stop = min(stop, start + max_length)
        result.append(
            FeatureSequence(
                id=identity,
                domain=domain,
                token_ids=tensors["token_ids"][start:stop],
                prompt_length=int(tensors["prompt_lengths"][number]),
                taps=tensors["taps"][start:stop],
                last_hidden=tensors["last_hidden"][start:stop],
                logsumexp=tensors["logsumexp"][start:stop],
            )
        )
    return result


def _damage(entry: ShardEntry, store: Path, deep: bool) -> str | None:
    """What is wrong with a stored shard, or None."""
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
