"""What engines count of speculation, in one spelling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Counters:
    """Totals of some requests, or of a server since it started; the difference of two is what happened in between.

    Attributes:
        steps: verification steps of a drafted block. The first token of a reply and an undrafted last one are none.
        drafted: draft tokens that were verified.
        accepted: of them.
        per_position: accepted tokens at each place of a block, as far as any were.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    per_position: tuple[int, ...] = ()

    def __sub__(self, other: Counters) -> Counters:
        """What was counted since `other`."""
        earlier = other.per_position + (0,) * (len(self.per_position) - len(other.per_position))
        counts = tuple(now - before for now, before in zip(self.per_position, earlier, strict=True))
        return Counters(
            self.steps - other.steps,
            self.drafted - other.drafted,
            self.accepted - other.accepted,
            without_zeros_at_the_end(counts),
        )

    @property
    def tau(self) -> float | None:
        """Tokens per step, the target's own included; None without a step."""
        return 1 + self.accepted / self.steps if self.steps else None


def of_histogram(histogram: Sequence[int], drafted: int) -> Counters:
    """The counters of steps of which `histogram[n]` had n of their drafts accepted.

    A draft is accepted only behind accepted ones, so that the steps with more than k of them are those that had the
    draft at place k accepted.
    """
    per_position = tuple(sum(histogram[place:]) for place in range(1, len(histogram)))
    return Counters(sum(histogram), drafted, sum(per_position), without_zeros_at_the_end(per_position))


def summed(counters: Iterable[Counters]) -> Counters:
    """What some requests counted together."""
    total = Counters()
    for one in counters:
        places = range(max(len(total.per_position), len(one.per_position)))
        per_position = tuple(sum(total.per_position[at : at + 1]) + sum(one.per_position[at : at + 1]) for at in places)
        total = Counters(
            total.steps + one.steps, total.drafted + one.drafted, total.accepted + one.accepted, per_position
        )
    return total


def without_zeros_at_the_end(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Counts per position up to the last one that is not zero; engines leave the others out or not, as they like."""
    length = max((place + 1 for place, count in enumerate(counts) if count), default=0)
    return counts[:length]
