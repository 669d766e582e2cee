"""Candidate against a rival, prompt by prompt: what both did, how far apart they are, and what that allows to say.

A rival is another package of the same target: the champion, or a pinned baseline. Both drafted for the same prompts in
one run, so the prompts' own difficulty cancels; intervals are 95 % bootstraps over prompts. numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, model_validator

from dspark.config.models import Digest, Name
from dspark.decoding.records import RecordSet
from dspark.errors import DataError
from dspark.evaluation.results import Model
from dspark.measured import Measured, bootstrap_sums

Floats = NDArray[np.float64]
Counts = tuple[Floats, Floats]  # tokens committed in cycles, and cycles, per prompt


# ---------------------------------------------------------------- what was counted


class PairedPrompts(Model):
    """What candidate and rival did on each prompt at one temperature; columns of equal length, one row per prompt."""

    ids: tuple[str, ...]
    domains: tuple[str, ...]
    committed: tuple[NonNegativeInt, ...]  # tokens of all the candidate's cycles, bonus included
    cycles: tuple[NonNegativeInt, ...]
    rival_committed: tuple[NonNegativeInt, ...]
    rival_cycles: tuple[NonNegativeInt, ...]

    @model_validator(mode="after")
    def _rows(self) -> PairedPrompts:
        columns = [getattr(self, name) for name in type(self).model_fields]
        if len({len(column) for column in columns}) > 1:
            raise ValueError("columns are of different length")
        if len(set(self.ids)) != len(self.ids):
            raise ValueError("a prompt stands in two rows")
        for committed, cycles in ((self.committed, self.cycles), (self.rival_committed, self.rival_cycles)):
            if any(tokens < count for tokens, count in zip(committed, cycles, strict=True)):
                raise ValueError("a cycle commits at least one token")
        return self

    @classmethod
    def of(cls, candidate: RecordSet, rival: RecordSet) -> PairedPrompts:
        """The counts of two record sets.

        Raises:
            DataError: they are not of the same prompts in one order, or of another temperature or policy.
        """
        if (candidate.ids, candidate.domains) != (rival.ids, rival.domains):
            raise DataError("candidate and rival decoded different prompts")
        if {(one.temperature, one.policy) for one in (*candidate.decoded, *rival.decoded)} - {
            (candidate.temperature, "fixed")
        }:
            raise DataError("candidate and rival must be decoded at one temperature, with whole blocks verified")
        mine, theirs = (
            [(int(one.cycles.committed.sum()), len(one.cycles)) for one in records.decoded]
            for records in (candidate, rival)
        )
        return cls(
            ids=candidate.ids,
            domains=candidate.domains,
            committed=tuple(tokens for tokens, _ in mine),
            cycles=tuple(count for _, count in mine),
            rival_committed=tuple(tokens for tokens, _ in theirs),
            rival_cycles=tuple(count for _, count in theirs),
        )

    def of_domain(self, domain: str) -> tuple[Counts, Counts]:
        """The counts of candidate and rival on the prompts of a domain."""
        rows = np.array([name == domain for name in self.domains], bool)
        columns = (self.committed, self.cycles, self.rival_committed, self.rival_cycles)
        mine, my_cycles, theirs, their_cycles = (np.array(column, np.float64)[rows] for column in columns)
        return (mine, my_cycles), (theirs, their_cycles)


class Rival(Model):
    """A package that the candidate was measured against, as its own manifest describes it."""

    package_digest: Digest
    model_digest: Digest
    build: Name
    gamma: int = Field(ge=1)
    training_domains: tuple[Name, ...]
    temperatures: dict[str, PairedPrompts]


class PairedReport(Model):
    """`evaluate/paired.json`: written only if the build names something to measure against."""

    schema_: Literal["dspark/paired/1"] = Field(default="dspark/paired/1", alias="schema")
    gamma: int = Field(ge=1)
    rivals: tuple[Rival, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _possible(self) -> PairedReport:
        digests = [rival.package_digest for rival in self.rivals]
        if len(set(digests)) != len(digests):
            raise ValueError("one package stands among the rivals twice")
        for rival in self.rivals:
            for prompts in rival.temperatures.values():
                _check_blocks(prompts.committed, prompts.cycles, self.gamma)
                _check_blocks(prompts.rival_committed, prompts.rival_cycles, rival.gamma)
        return self

    def rival(self, package_digest: str) -> Rival | None:
        """The rival of that digest, or None if it was not measured."""
        return next((rival for rival in self.rivals if rival.package_digest == package_digest), None)


def _check_blocks(committed: Sequence[int], cycles: Sequence[int], gamma: int) -> None:
    if any(tokens > count * (gamma + 1) for tokens, count in zip(committed, cycles, strict=True)):
        raise ValueError(f"a cycle of gamma {gamma} commits at most {gamma + 1} tokens")


# ---------------------------------------------------------------- how far apart


def relative_difference(of: Counts, to: Counts, *, seed: int = 0) -> Measured | None:
    """Pooled tau of one side / pooled tau of the other - 1, with its interval over prompts, paired.

    Args:
        of, to: counts of the same prompts in the same order, [n] each.
    Returns:
        None if a side has no cycle.
    """

    def statistic(sums: Floats) -> Floats:
        tokens, cycles, other_tokens, other_cycles = np.moveaxis(sums, -1, 0)
        return np.asarray(tokens / cycles / (other_tokens / other_cycles) - 1)

    return bootstrap_sums(np.stack([*of, *to], axis=1), statistic, seed=seed)


def tau_of(counts: Counts, *, seed: int = 0) -> Measured | None:
    """Pooled tau of some prompts with its interval; None without a cycle."""
    return bootstrap_sums(np.stack(counts, axis=1), lambda sums: np.asarray(sums[..., 0] / sums[..., 1]), seed=seed)


# ---------------------------------------------------------------- what that allows to say


@dataclass(frozen=True)
class Judgement:
    """What an interval says about a gate.

    Attributes:
        verdict: `fail`: a gain that is surely smaller than asked, though not surely a loss.
        prompts_needed: of an `undecided` one: how many prompts would probably decide it, if the difference stays what
            it is; None: no number of them would (the difference lies on the very limit).
    """

    verdict: Literal["non-inferior", "better", "worse", "undecided", "fail"]
    prompts_needed: int | None = None


def judge_loss(difference: Measured, largest_loss: float) -> Judgement:
    """`non-inferior` iff the lower bound > -largest_loss; `worse` iff the upper bound is below it.

    Args:
        difference: relative, n counts prompts.
        largest_loss: relative, not negative.
    """
    low, high = difference.ci95
    if low > -largest_loss:
        return Judgement("non-inferior")
    if high < -largest_loss:
        return Judgement("worse")
    return Judgement("undecided", _prompts_to_leave(difference, -largest_loss))


def judge_gain(difference: Measured, smallest_gain: float) -> Judgement:
    """`better` iff the lower bound > 0 and the difference >= smallest_gain.

    Args:
        difference: relative, n counts prompts.
        smallest_gain: relative, not negative.
    """
    low, high = difference.ci95
    if low > 0 and difference.value >= smallest_gain:
        return Judgement("better")
    if high < 0:
        return Judgement("worse")
    if high < smallest_gain:
        return Judgement("fail")
    limit = 0.0 if difference.value >= smallest_gain else smallest_gain
    return Judgement("undecided", _prompts_to_leave(difference, limit))


def _prompts_to_leave(difference: Measured, limit: float) -> int | None:
    """How many prompts would narrow the interval until the limit lies outside; its width falls as 1 / sqrt(n)."""
    low, high = difference.ci95
    distance = difference.value - limit
    reach = difference.value - low if distance > 0 else high - difference.value
    if distance == 0:
        return None
    # The interval that just touches the limit decides nothing, so one prompt more.
    return math.floor(difference.n * (reach / distance) ** 2) + 1
