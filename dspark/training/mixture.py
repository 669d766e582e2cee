"""Which sequences a step of retraining sees: some of the new domains, the rest replayed from all others.

The replayed ones come as they stood in the mixture before, each as often as the other, whatever their domain; only
the share of both kinds is set. Steps are planned in windows. A kind fills its part of a window from its own shuffled
epochs, so within a window no sequence comes twice, and what a step sees is a function of (seed, step).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark.errors import DataError
from dspark.training.batches import SORTED_BATCHES

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Mixture:
    """A plan for any number of steps.

    Attributes:
        streams: indices of the replayed and of the new sequences.
        counts: how many a window takes of each.
        steps: of a window.
    """

    streams: tuple[Indices, Indices]
    counts: tuple[int, int]
    steps: int

    def window(self, lengths: Indices, seed: int, number: int) -> list[Indices]:
        """The sequences of each step of a window; those of a step are of similar length within their kind.

        Args:
            lengths: tokens per sequence, [n].
            number: of the window, 0-based.
        """
        size = sum(self.counts) // self.steps
        replayed = [self.counts[0] * step // self.steps for step in range(self.steps + 1)]
        # Where the replayed ones get one more, the new ones get one less: a step always has the same size.
        bounds = (replayed, [size * step - before for step, before in enumerate(replayed)])
        parts = []
        for kind, (stream, count) in enumerate(zip(self.streams, self.counts, strict=True)):
            chosen = _taken(stream, count, seed, number, kind)
            chosen = chosen[np.argsort(lengths[chosen], kind="stable")]
            parts.append(np.split(chosen, bounds[kind][1:-1]))
        order = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, number)))).permutation(self.steps)
        return [np.concatenate([parts[0][step], parts[1][step]]) for step in order]


def plan_mixture(domains: Sequence[str], new: Sequence[str], replay: float, batch: int) -> Mixture:
    """Plan windows of steps of `batch` sequences, a share `replay` of them replayed.

    A share that is no multiple of a sequence is kept over the steps of a window; where a kind has too few sequences
    for a long window, windows are shorter.

    Args:
        domains: the domain of every sequence.
        new: domains that are not replayed.
        replay: in [0, 1).
    Raises:
        DataError: a kind has fewer sequences than a step takes of it.
    """
    is_new = np.isin(np.array(domains), list(new))
    streams = (np.flatnonzero(~is_new), np.flatnonzero(is_new))
    for steps in range(SORTED_BATCHES, 0, -1):
        total = steps * batch
        # A kind that is wanted at all gets at least one sequence of every window.
        replayed = min(max(round(replay * total), 1), total - 1) if replay and total > 1 else round(replay * total)
        counts = (replayed, total - replayed)
        if all(count <= len(stream) for count, stream in zip(counts, streams, strict=True)):
            return Mixture(streams, counts, steps)
    raise DataError(
        f"training.mixture: a step takes {counts[0]} replayed and {counts[1]} new sequences, the train split has "
        f"{len(streams[0])} and {len(streams[1])} ({', '.join(new)})",
        "add prompts to the new domain, or lower training.sequences_per_step",
    )


def _taken(stream: Indices, count: int, seed: int, window: int, kind: int) -> Indices:
    """What a window takes of a stream: the next part of its shuffled epoch, the tail of which is dropped."""
    if not count:
        return stream[:0]
    epoch, place = divmod(window, len(stream) // count)
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch, kind, len(stream)))))
    return stream[generator.permutation(len(stream))[place * count : (place + 1) * count]]
