"""Extraction: run the target over token sequences and keep what its tapped layers say.

Shards are planned from the sequences alone: per split and domain, in the corpus's order, so a domain more extracts
only itself. A shard is the unit of resume. Which shards are stored is up to `features.mode`; the others are listed
without bytes, and computed where they are needed (`online.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dspark.config.models import FeatureSettings
from dspark.errors import PreflightError
from dspark.features.forward import Features, features_of, require_lengths
from dspark.features.sizes import bytes_per_token
from dspark.features.store import (
    FeatureManifest,
    ShardEntry,
    damaged_shards,
    discard,
    known_entry,
    most_bytes,
    shard_key,
    write_shard,
)
from dspark.io.progress import Progress
from dspark.processor import arithmetic
from dspark.targets.loading import Target
from dspark.targets.record import TargetRecord

if TYPE_CHECKING:
    from dspark.corpus.sequences import TokenSequence

_GIB = 2**30


def plan(
    record: TargetRecord,
    sequences: Mapping[str, Sequence[TokenSequence]],
    settings: FeatureSettings,
    taps: Sequence[int] | None = None,
) -> FeatureManifest:
    """The shards of a corpus, none of them stored.

    Args:
        sequences: per split.
        taps: None: the record's.
    Raises:
        DataError: a sequence is empty or longer than the target takes.
    """
    chosen = tuple(record.taps if taps is None else taps)
    splits: dict[str, tuple[ShardEntry, ...]] = {}
    for split, rows in sequences.items():
        require_lengths(record, (row.id for row in rows), (len(row.token_ids) for row in rows))
        splits[split] = tuple(
            ShardEntry(
                key=shard_key(record.digest, chosen, settings.dtype, shard),
                sequences=len(shard),
                tokens=sum(len(row.token_ids) for row in shard),
            )
            for shard in plan_shards(rows, settings.sequences_per_shard)
        )
    return FeatureManifest(
        target_digest=record.digest,
        taps=chosen,
        dtype=settings.dtype,
        hidden_size=record.hidden_size,
        mode=settings.mode,
        splits=splits,
    )


def extract(
    target: Target,
    sequences: Mapping[str, Sequence[TokenSequence]],
    settings: FeatureSettings,
    store: Path,
    progress: Progress | None = None,
) -> FeatureManifest:
    """Make the shards that are to be stored and are not, and list all of the corpus's.

    Args:
        sequences: per split.
        store: the folder of shards, shared by all corpora.
    Raises:
        DataError: NaN or infinite features (the layer is named), or a sequence longer than the target takes.
        PreflightError: not enough room on the disk.
        Interrupted: finished shards are kept.
    """
    progress = progress or Progress()
    record = target.record
    if target.dtype_name != arithmetic(record.dtype, target.device.type):
        raise ValueError(f"features are what the target says in its own dtype, {record.dtype}, not in {target.dtype}")
    planned = plan(record, sequences, settings, target.taps)
    shards: dict[str, list[TokenSequence]] = {}  # of all splits, each once
    for split, rows in sequences.items():
        parts = plan_shards(rows, settings.sequences_per_shard)
        shards |= {entry.key: part for entry, part in zip(planned.splits[split], parts, strict=True)}
    chosen = _to_store(planned, shards, settings)
    known = {key: found for key in chosen if (found := known_entry(store, key, shards[key])) is not None}
    lengths = {key: sum(len(row.token_ids) for row in shards[key]) for key in chosen}
    to_do = sum(length for key, length in lengths.items() if key not in known)
    _check_room(store, to_do * bytes_per_token(record.hidden_size, len(target.taps), settings.dtype))
    total = sum(lengths.values())
    progress.start("features", total, done=total - to_do, unit="tokens")
    for key in chosen:
        if key not in known:
            known[key] = write_shard(store, key, shards[key], _features(target, shards[key], settings, progress))
    splits = {
        split: tuple(known.get(entry.key, entry) for entry in entries) for split, entries in planned.splits.items()
    }
    return planned.model_copy(update={"splits": splits})


def ensure(
    manifest: FeatureManifest,
    sequences: Callable[[], Mapping[str, Sequence[TokenSequence]]],
    target: Callable[[], Target],
    settings: FeatureSettings,
    store: Path,
    progress: Progress | None = None,
    *,
    deep: bool = False,
) -> FeatureManifest:
    """Recreate what is missing or damaged of a corpus's stored features, and nothing else.

    Args:
        sequences, target: loaded only if something is to be recreated.
        deep: find damage by reading every byte, not only by sizes.
    Returns:
        the manifest; a shard recreated on another kind of machine may have another digest than before.
    """
    damaged = damaged_shards(manifest, store, deep=deep)
    if not damaged:
        return manifest
    for entry in damaged:
        discard(store, entry.key)
    return extract(target(), sequences(), settings, store, progress)


def in_shard_order(rows: Iterable[TokenSequence]) -> list[TokenSequence]:
    """The sequences of a split one shard after the other: those of one domain together, in order."""
    domains: dict[str, list[TokenSequence]] = {}
    for row in rows:
        domains.setdefault(row.domain, []).append(row)
    return [row for chosen in domains.values() for row in chosen]


def plan_shards(rows: Sequence[TokenSequence], sequences_per_shard: int) -> list[list[TokenSequence]]:
    """Which sequences share a shard: those of one domain, in order, so many at a time."""
    shards: list[list[TokenSequence]] = []
    for row in in_shard_order(rows):
        if not shards or shards[-1][0].domain != row.domain or len(shards[-1]) == sequences_per_shard:
            shards.append([])
        shards[-1].append(row)
    return shards


def _to_store(
    planned: FeatureManifest, shards: Mapping[str, Sequence[TokenSequence]], settings: FeatureSettings
) -> list[str]:
    """Keys of the shards to store, each once.

    A hybrid store holds the dev split before anything else, which every evaluation reads, and then what fits.
    """
    order = sorted(planned.splits, key=lambda split: split == "train") if settings.mode == "hybrid" else planned.splits
    keys = list(dict.fromkeys(entry.key for split in order for entry in planned.splits[split]))
    if settings.mode == "cached":
        return keys
    token_bytes = bytes_per_token(planned.hidden_size, len(planned.taps), settings.dtype)
    left = 0 if settings.mode == "online" else int((settings.cache_gib or 0) * _GIB)
    chosen = []
    for key in keys:
        size = most_bytes(shards[key], token_bytes)
        if size <= left:
            chosen.append(key)
            left -= size
    return chosen


def _features(
    target: Target, shard: Sequence[TokenSequence], settings: FeatureSettings, progress: Progress
) -> dict[str, torch.Tensor]:
    """Features of all tokens of a shard, sequence after sequence, by name."""
    found: list[Features | None] = [None] * len(shard)
    computed = features_of(
        target,
        [row.token_ids for row in shard],
        [row.prompt_length for row in shard],
        [row.id for row in shard],
        dtype=settings.dtype,
        batch_tokens=settings.batch_tokens,
    )
    for index, features in computed:
        found[index] = features
        progress.advance(len(shard[index].token_ids))
    parts = [features.tensors() for features in found if features is not None]
    # Popped, so that no more than one name's numbers are there twice.
    return {name: torch.cat([part.pop(name) for part in parts]) for name in list(parts[0])}


def _check_room(store: Path, needed: int) -> None:
    folder = store
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise PreflightError(
            f"the features need {needed / 1e9:.1f} GB in {store}, {free / 1e9:.1f} GB are free",
            "make room, choose another features.mode or features.dtype, or a larger disk as store.features in "
            "params.yaml",
        )
