"""Features computed while training runs, and splits of which some shards are stored and others are not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.corpus.sequences import TokenSequence
from dspark.errors import DataError
from dspark.features.compression import decode
from dspark.features.extraction import in_shard_order
from dspark.features.forward import BATCH_TOKENS, features_of
from dspark.features.shards import FeatureSequence
from dspark.features.sources import FeatureRow, FeatureSource, StoredFeatures
from dspark.features.store import FeatureManifest, ShardEntry, shard_key
from dspark.targets.loading import Target

_OTHERS = "the responses are not those that the features were planned for"
_AGAIN = "dspark run --target NAME"


class ComputedFeatures:
    """Sequences whose features the target computes when they are asked for, rounded as those of the store are.

    Args:
        sequences: kept as four bytes a token.
        target: loaded when it is first needed.
        dtype: of storage.
        max_length: cut each sequence to so many tokens; the target sees all of it, so that the rest is the same.
    """

    ahead = False  # the trainer's own arithmetic switches must not change under it

    def __init__(
        self,
        sequences: Iterable[TokenSequence],
        target: Callable[[], Target],
        dtype: str,
        *,
        max_length: int | None = None,
        batch_tokens: int = BATCH_TOKENS,
    ) -> None:
        self._names: list[str] = []
        self._domains: list[str] = []
        self._prompts: list[int] = []
        tokens, ends = [], [0]
        for row in sequences:
            self._names.append(row.id)
            self._domains.append(row.domain)
            self._prompts.append(row.prompt_length)
            tokens.append(np.array(row.token_ids, np.int32))
            ends.append(ends[-1] + len(row.token_ids))
        self._tokens = np.concatenate(tokens) if tokens else np.zeros(0, np.int32)
        self._ends = ends
        self._target, self._dtype = target, dtype
        self._max_length, self._batch_tokens = max_length, batch_tokens

    def __len__(self) -> int:
        return len(self._prompts)

    def token_ids(self, index: int) -> Tensor:
        """int64 [S]."""
        return self._whole(index)[: self._max_length]

    def prompt_length(self, index: int) -> int:
        """Tokens before the response."""
        return self._prompts[index]

    def domain(self, index: int) -> str:
        """That the prompt belongs to."""
        return self._domains[index]

    def feature_bytes(self, index: int) -> int:
        """Nothing is held before it is computed."""
        return 0

    def fetch(self, index: int) -> Any:
        """Nothing can be read."""

    def load(self, indices: Sequence[int], fetched: Mapping[int, Any]) -> list[FeatureSequence]:
        """Sequences with their features.

        Raises:
            DataError: as `features_of`.
        """
        found: list[FeatureSequence | None] = [None] * len(indices)
        computed = features_of(
            self._target(),
            [self._whole(index).tolist() for index in indices],
            [self._prompts[index] for index in indices],
            [self._names[index] for index in indices],
            dtype=self._dtype,
            batch_tokens=self._batch_tokens,
        )
        for position, features in computed:
            index = indices[position]
            cut = slice(self._max_length)
            found[position] = FeatureSequence(
                id=self._names[index],
                domain=self._domains[index],
                token_ids=self.token_ids(index),
                prompt_length=self._prompts[index],
                taps=decode(features.taps.values, features.taps.scales)[cut],
                last_hidden=decode(features.last_hidden.values, features.last_hidden.scales)[cut],
                logsumexp=features.logsumexp[cut],
            )
        return [sequence for sequence in found if sequence is not None]

    def _whole(self, index: int) -> Tensor:
        return torch.from_numpy(self._tokens[self._ends[index] : self._ends[index + 1]]).long()


def open_split(
    manifest: FeatureManifest,
    split: str,
    store: Path,
    *,
    sequences: Callable[[], Iterable[TokenSequence]],
    target: Callable[[], Target],
    max_length: int | None = None,
) -> list[FeatureRow]:
    """The sequences of a split, in the corpus's order, whether their shards are stored or not.

    Args:
        sequences: of the split, and `target`: asked for only where a shard is not stored.
        max_length: cut each sequence to so many tokens.
    Raises:
        DataError: no such split, or the sequences are not those that the manifest was made of.
        IntegrityError: a stored shard is missing or damaged.
    """
    entries = manifest.entries(split)
    stored = StoredFeatures([entry for entry in entries if entry.stored], store, max_length=max_length)
    missing = [entry for entry in entries if not entry.stored]
    absent: list[TokenSequence] = []
    if missing:
        absent = _sequences_of(missing, entries, sequences(), manifest)
    computed = ComputedFeatures(absent, _checked(target, manifest), manifest.dtype, max_length=max_length)
    rows: list[FeatureRow] = []
    taken = {True: 0, False: 0}
    for entry in entries:
        source: FeatureSource = stored if entry.stored else computed
        first = taken[entry.stored]
        rows.extend(FeatureRow(source, index) for index in range(first, first + entry.sequences))
        taken[entry.stored] += entry.sequences
    return rows


def _sequences_of(
    missing: Sequence[ShardEntry],
    entries: Sequence[ShardEntry],
    sequences: Iterable[TokenSequence],
    manifest: FeatureManifest,
) -> list[TokenSequence]:
    """The sequences of shards that are not stored, each shard's checked against its key."""
    keys = {entry.key for entry in missing}
    rows = iter(in_shard_order(sequences))
    found: list[TokenSequence] = []
    for entry in entries:
        chosen = list(islice(rows, entry.sequences))
        if entry.key not in keys:
            continue
        if shard_key(manifest.target_digest, manifest.taps, manifest.dtype, chosen) != entry.key:
            raise DataError(f"{_OTHERS}: shard {entry.key[:12]} of {entry.sequences} sequences is another one", _AGAIN)
        found.extend(chosen)
    if next(rows, None) is not None:
        raise DataError(f"{_OTHERS}: there are more than {sum(entry.sequences for entry in entries)}", _AGAIN)
    return found


def _checked(target: Callable[[], Target], manifest: FeatureManifest) -> Callable[[], Target]:
    """The target, loaded once, or refused if the features were planned for another."""
    loaded: list[Target] = []

    def load() -> Target:
        if not loaded:
            found = target()
            if (found.record.digest, tuple(found.taps)) != (manifest.target_digest, manifest.taps):
                raise DataError(
                    f"the features were planned for another target than {found.record.name!r}, or for other taps",
                    _AGAIN,
                )
            loaded.append(found)
        return loaded[0]

    return load
