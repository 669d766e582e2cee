"""Extraction: run the target over token sequences and keep what its tapped layers say.

Shards are planned from the sequences alone: per split and domain, in the corpus's order, so a domain more extracts
only itself. A shard is the unit of resume; within it, sequences of similar length share a forward pass. Padding
stands on the right, where causal attention never looks, so no mask is needed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dspark.config.models import FeatureSettings
from dspark.errors import DataError, PreflightError
from dspark.features.store import (
    FeatureManifest,
    ShardEntry,
    bytes_per_token,
    damaged_shards,
    discard,
    known_entry,
    shard_key,
    write_shard,
)
from dspark.io.progress import Progress
from dspark.processor import arithmetic
from dspark.targets.loading import Target
from dspark.targets.sampling import log_normaliser

if TYPE_CHECKING:
    from dspark.corpus.sequences import TokenSequence

_LOGITS_BYTES = 64 << 20  # float32 logits held at a time


def extract(
    target: Target,
    sequences: Mapping[str, Sequence[TokenSequence]],
    settings: FeatureSettings,
    store: Path,
    progress: Progress | None = None,
) -> FeatureManifest:
    """Make the shards that the store lacks, and list all of the corpus's.

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
    plan = {
        split: [
            (shard_key(record.digest, target.taps, settings.dtype, shard), shard)
            for shard in plan_shards(rows, settings.sequences_per_shard)
        ]
        for split, rows in sequences.items()
    }
    known = {key: known_entry(store, key, shard) for shards in plan.values() for key, shard in shards}
    lengths = {key: sum(len(row.token_ids) for row in shard) for shards in plan.values() for key, shard in shards}
    to_do = sum(length for key, length in lengths.items() if known[key] is None)
    _check_room(store, to_do * bytes_per_token(record.hidden_size, len(target.taps), settings.dtype))
    total = sum(lengths.values())
    progress.start("features", total, done=total - to_do, unit="tokens")
    splits: dict[str, tuple[ShardEntry, ...]] = {}
    for split, shards in plan.items():
        entries = []
        for key, shard in shards:
            entry = known[key]
            if entry is None:
                tensors = _shard_features(target, shard, settings, progress)
                entry = known[key] = write_shard(store, key, shard, tensors)
            entries.append(entry)
        splits[split] = tuple(entries)
    return FeatureManifest(
        target_digest=record.digest,
        taps=target.taps,
        dtype=settings.dtype,
        hidden_size=record.hidden_size,
        splits=splits,
    )


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
    """Recreate what is missing or damaged of a corpus's features, and nothing else.

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


def plan_shards(rows: Sequence[TokenSequence], sequences_per_shard: int) -> list[list[TokenSequence]]:
    """Which sequences share a shard: those of one domain, in order, so many at a time."""
    domains: dict[str, list[TokenSequence]] = {}
    for row in rows:
        domains.setdefault(row.domain, []).append(row)
    return [
        chosen[start : start + sequences_per_shard]
        for chosen in domains.values()
        for start in range(0, len(chosen), sequences_per_shard)
    ]


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Which sequences share a forward pass: the longest first, as many as fit into `batch_tokens` with padding.

    Returns:
        indices into `lengths`; a sequence longer than `batch_tokens` is alone.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batches: list[list[int]] = []
    for index in order:
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _shard_features(
    target: Target, shard: Sequence[TokenSequence], settings: FeatureSettings, progress: Progress
) -> dict[str, Tensor]:
    """Features of all tokens of a shard, sequence after sequence."""
    lengths = [len(row.token_ids) for row in shard]
    limit = target.record.max_position
    for row, length in zip(shard, lengths, strict=True):
        if not 0 < length <= limit:
            raise DataError(f"sequence {row.id!r} has {length} tokens; the target takes 1 to {limit}")
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    dtype: torch.dtype = getattr(torch, settings.dtype)
    total, width = starts[-1], target.record.hidden_size
    taps = torch.empty(total, len(target.taps) * width, dtype=dtype)
    last_hidden = torch.empty(total, width, dtype=dtype)
    logsumexp = torch.empty(total, dtype=torch.float32)
    for batch in plan_batches(lengths, settings.batch_tokens):
        ids = torch.zeros(len(batch), lengths[batch[0]], dtype=torch.int64)
        for number, index in enumerate(batch):
            ids[number, : lengths[index]] = torch.tensor(shard[index].token_ids)
        output = target.hidden(ids.to(target.device))
        for number, index in enumerate(batch):
            place = slice(starts[index], starts[index + 1])
            own = output.last_hidden[number, : lengths[index]]
            taps[place], last_hidden[place] = output.taps[number, : lengths[index]], own
            logsumexp[place] = _log_normalisers(target, own)
        progress.advance(sum(lengths[index] for index in batch))
    _refuse_non_finite(target, taps, last_hidden, logsumexp, settings.dtype)
    return {"taps": taps, "last_hidden": last_hidden, "logsumexp": logsumexp}


def _log_normalisers(target: Target, last_hidden: Tensor) -> Tensor:
    """logsumexp over the whole vocabulary of the float32 cast of the target's logits, [S, d] -> float32 [S]."""
    rows = max(1, _LOGITS_BYTES // (4 * target.record.vocab_physical))
    return torch.cat([log_normaliser(target.logits(chunk)) for chunk in torch.split(last_hidden, rows)])


def _refuse_non_finite(target: Target, taps: Tensor, last_hidden: Tensor, logsumexp: Tensor, dtype: str) -> None:
    width = target.record.hidden_size
    for name, values in _named(target, taps, last_hidden, logsumexp, width):
        if not torch.isfinite(values).all():
            tokens = int((~torch.isfinite(values)).reshape(len(values), -1).any(-1).sum())
            raise DataError(
                f"NaN or infinity in the features: {name} of target {target.record.name!r}, {tokens} of {len(values)} "
                f"tokens (stored as {dtype}, computed in {target.dtype_name})",
                "set features.dtype or the target's dtype to bfloat16 or float32",
            )


def _named(
    target: Target, taps: Tensor, last_hidden: Tensor, logsumexp: Tensor, width: int
) -> Iterator[tuple[str, Tensor]]:
    for number, layer in enumerate(target.taps):
        yield f"the output of layer {layer}", taps[:, number * width : (number + 1) * width]
    yield "the final norm", last_hidden
    yield "the logits", logsumexp


def _check_room(store: Path, needed: int) -> None:
    folder = store
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise PreflightError(
            f"the features need {needed / 1e9:.1f} GB in {store}, {free / 1e9:.1f} GB are free",
            "make room, or move the store to a larger disk and link it there",
        )
