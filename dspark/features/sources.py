"""Where the sequences of a split come from: stored shards, or the target itself while training runs.

A split is a list of rows. A row knows its tokens; its features are read or computed when somebody asks for them, so a
corpus of any size takes a few dozen bytes of memory per sequence. Rows that are needed together are loaded together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from dspark.errors import IntegrityError
from dspark.features.shards import FeatureSequence, Shard
from dspark.features.store import REPAIR, FeatureManifest, ShardEntry, damage, shard_path


class FeatureSource(Protocol):
    """Sequences by number."""

    ahead: bool  # `fetch` only reads: another thread may call it before the features are needed

    def __len__(self) -> int:
        """How many there are."""

    def token_ids(self, index: int) -> Tensor:
        """int64 [S]."""

    def prompt_length(self, index: int) -> int:
        """Tokens before the response."""

    def domain(self, index: int) -> str:
        """That the prompt belongs to."""

    def feature_bytes(self, index: int) -> int:
        """What the features take in memory."""

    def fetch(self, index: int) -> Any:
        """What `load` makes features of."""

    def load(self, indices: Sequence[int], fetched: Mapping[int, Any]) -> list[FeatureSequence]:
        """Sequences with their features.

        Args:
            fetched: by index, what was fetched already.
        """


@dataclass(frozen=True, slots=True)
class FeatureRow:
    """One sequence of a source; asked for features it loads them, alone and each time anew."""

    source: FeatureSource
    index: int

    @property
    def id(self) -> str:
        """The sequence's."""
        return self.load().id

    @property
    def domain(self) -> str:
        """That the prompt belongs to."""
        return self.source.domain(self.index)

    @property
    def token_ids(self) -> Tensor:
        """int64 [S]."""
        return self.source.token_ids(self.index)

    @property
    def prompt_length(self) -> int:
        """Tokens before the response."""
        return self.source.prompt_length(self.index)

    @property
    def taps(self) -> Tensor:
        """As in `FeatureSequence`."""
        return self.load().taps

    @property
    def last_hidden(self) -> Tensor:
        """As in `FeatureSequence`."""
        return self.load().last_hidden

    @property
    def logsumexp(self) -> Tensor:
        """As in `FeatureSequence`."""
        return self.load().logsumexp

    def load(self) -> FeatureSequence:
        """The sequence with its features."""
        return self.source.load([self.index], {})[0]


def loaded(rows: Sequence[Any], fetched: Mapping[int, Any] | None = None) -> list[Any]:
    """The rows with their features in memory, those of a source loaded together; what is no `FeatureRow` is itself.

    Args:
        fetched: by position among the rows, what was fetched ahead.
    """
    ready: list[Any] = list(rows)
    sources: dict[int, list[int]] = {}
    for position, row in enumerate(rows):
        if isinstance(row, FeatureRow):
            sources.setdefault(id(row.source), []).append(position)
    for positions in sources.values():
        indices = [rows[position].index for position in positions]
        known = {rows[position].index: fetched[position] for position in positions if fetched and position in fetched}
        for position, sequence in zip(positions, rows[positions[0]].source.load(indices, known), strict=True):
            ready[position] = sequence
    return ready


class StoredFeatures:
    """Sequences of shards in the store.

    Args:
        entries: as the manifest lists them.
        max_length: cut each sequence to so many tokens.
    Raises:
        IntegrityError: a shard is missing or damaged, or is another one than the manifest lists.
    """

    ahead = True

    def __init__(self, entries: Iterable[ShardEntry], store: Path, *, max_length: int | None = None) -> None:
        self._shards = [_trusted(entry, store) for entry in entries]
        self._places = [(shard, number) for shard in self._shards for number in range(len(shard))]
        self._max_length = max_length

    def __len__(self) -> int:
        return len(self._places)

    def token_ids(self, index: int) -> Tensor:
        """int64 [S]; read each time."""
        shard, number = self._places[index]
        return shard.tokens(number)[: self._max_length]

    def prompt_length(self, index: int) -> int:
        """Tokens before the response."""
        shard, number = self._places[index]
        return int(shard.prompt_lengths[number])

    def domain(self, index: int) -> str:
        """That the prompt belongs to."""
        shard, number = self._places[index]
        return shard.domains[number]

    def feature_bytes(self, index: int) -> int:
        """What the features take in memory, decoded ones beside the stored."""
        shard, number = self._places[index]
        return shard.feature_bytes(number)

    def fetch(self, index: int) -> Any:
        """Read and check the stored features."""
        shard, number = self._places[index]
        return shard.fetch(number)

    def load(self, indices: Sequence[int], fetched: Mapping[int, Any]) -> list[FeatureSequence]:
        """Sequences with their features.

        Raises:
            IntegrityError: damaged.
        """
        found = []
        for index in indices:
            shard, number = self._places[index]
            parts = fetched[index] if index in fetched else shard.fetch(number)
            found.append(shard.sequence(number, parts, self._max_length))
        return found


def read_split(
    manifest: FeatureManifest, split: str, store: Path, *, max_length: int | None = None
) -> list[FeatureSequence]:
    """All sequences of a split that is stored whole, in the corpus's order and in memory: for small splits.

    Raises:
        DataError: no such split.
        IntegrityError: a shard is missing or damaged.
    """
    entries = manifest.entries(split)
    source = StoredFeatures(entries, store, max_length=max_length)
    return source.load(range(len(source)), {})


def _trusted(entry: ShardEntry, store: Path) -> Shard:
    """A shard that is the one which was listed, by its header; where none is listed, by every byte of it."""
    wrong = damage(entry, store, deep=entry.header_sha256 is None)
    path = shard_path(store, entry.key)
    if wrong:
        raise IntegrityError(f"{path}: {wrong}", REPAIR)
    return Shard(path, entry.header_sha256)
