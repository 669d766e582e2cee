"""Where randomness comes from: counter-based draws, one stream per request.

A draw is a pure function of (request seed, draw number), so a request's numbers do not depend on its batch; what they
are used for does where a policy lets the batch decide how much is verified (`loop.ContinuousBatch`). The draw number
only goes up: noise is never used twice, not after a rejection and not after a truncation (architecture.md, section 10).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.decoding.prefixes import Counts as Counts
from dspark.decoding.prefixes import leading

Rows = NDArray[np.intp]  # the request that each row of a batch belongs to

_INCREMENT = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd
_MASK64 = (1 << 64) - 1


class Draws(Protocol):
    """Everything random that the loop asks for.

    The interface names outcomes, not uniform numbers, so that an implementation can enumerate them.
    """

    def categorical(self, probs: Tensor, requests: Rows) -> Tensor:
        """One outcome per row.

        Args:
            probs: [B, V], non-negative; rows need not sum to one exactly.
            requests: the request of each row, [B].
        Returns:
            int64 [B]; never an outcome of probability zero.
        """
        ...

    def accept(self, probs: Tensor, lengths: Counts, requests: Rows) -> Counts:
        """How many leading draft tokens are accepted, position after position, up to the first rejection.

        Args:
            probs: acceptance probability of each draft token, [B, K].
            lengths: draft tokens under verification per row, [B], at most K.
            requests: the request of each row, [B].
        Returns:
            [B], between 0 and `lengths`.
        """
        ...


class CounterDraws:
    """Draws keyed by (request seed, draw number), with the SplitMix64 mixing function (Steele, Lea & Flood 2014).

    Args:
        seeds: one per request.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        raw = np.array([seed & _MASK64 for seed in seeds], dtype=np.uint64)
        # Mixed once, so that neighbouring seeds don't give shifted copies of one stream.
        self._keys = _mix(raw + _INCREMENT)
        self._numbers = np.zeros(len(seeds), dtype=np.uint64)

    def uniform(self, requests: Rows, counts: Counts) -> NDArray[np.float64]:
        """The next `counts[b]` numbers of each row's request, in [0, 1).

        Returns:
            [B, max(counts)]; what lies beyond a row's count has not been drawn and must not be used.
        """
        width = int(counts.max(initial=0))
        numbers = self._numbers[requests, None] + np.arange(1, width + 1, dtype=np.uint64)
        self._numbers[requests] += counts.astype(np.uint64)
        bits = _mix(np.add(self._keys[requests, None], numbers * _INCREMENT, dtype=np.uint64))
        # 52 bits: u * total stays below total in float64 for every total of at least one half.
        return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52

    def categorical(self, probs: Tensor, requests: Rows) -> Tensor:
        """See `Draws`. By inversion of the cumulative sum, in float64 so that summing adds no error of its own."""
        uniform = torch.from_numpy(self.uniform(requests, np.ones(len(requests), np.int64))).to(probs.device)
        cumulative = probs.cumsum(-1, dtype=torch.float64)
        # right=True: the first index whose sum exceeds u * total, so an outcome of probability zero is never drawn.
        drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
        return drawn.squeeze(-1).clamp_(max=probs.shape[-1] - 1)

    def gumbel(self, requests: Rows, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Independent standard Gumbel numbers, finite, for engines that draw by the arg max of noisy logits.

        Returns:
            [B, *shape].
        """
        count = np.full(len(requests), np.prod(shape, dtype=np.int64))
        uniform = self.uniform(requests, count) + 2.0**-53  # the middle of each step: never 0, never 1
        return (-np.log(-np.log(uniform))).astype(np.float32).reshape(len(requests), *shape)

    def accept(self, probs: Tensor, lengths: Counts, requests: Rows) -> Counts:
        """See `Draws`. Each position under verification has its own number, used or not."""
        uniform = self.uniform(requests, lengths)
        width = uniform.shape[1]
        passed = uniform < probs[:, :width].double().cpu().numpy()
        passed &= np.arange(width) < lengths[:, None]
        return leading(passed)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
