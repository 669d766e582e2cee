"""Policies: how many of the drafted tokens are verified.

A policy sees the raw confidence logits of a block before it is verified. The logit of slot j depends on the tokens
before j and not on token j, so cutting a block by it is non-anticipating and keeps decoding lossless
(deepspec.md, section 5.2); `scheduled` keeps that property by stopping early (DSpark, section 3.2.2), and
`scheduled-delayed` by sizing a step before its blocks are drafted (section 5.2).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dspark.decoding.prefixes import Counts, below_threshold
from dspark.errors import SettingsError
from dspark.scheduling.delayed import DelayedPrefixScheduler
from dspark.scheduling.prefix import PrefixScheduler
from dspark.scheduling.survival import Floats

Logits = NDArray[np.float32]
Rows = NDArray[np.intp]  # as `draws.Rows`, which imports torch


class Policy(Protocol):
    """Decides the verification lengths of a batch. One that reads confidences refuses NaN: there is no such head."""

    @property
    def name(self) -> str:
        """As written in reports: `none`, `fixed(4)`, `threshold(0.5)`, `scheduled`, `scheduled-delayed`."""
        ...

    @property
    def drafts(self) -> bool:
        """False if nothing need be drafted."""
        ...

    def lengths(self, confidence_logits: Logits) -> Counts:
        """Draft tokens to verify per row, [B], of blocks with logits [B, gamma]."""
        ...


@runtime_checkable
class Remembering(Protocol):
    """What a policy with a memory has beside `Policy`: it serves one batch at a time and knows its rows by request."""

    def begin(self) -> None:
        """Forget everything: another batch begins."""
        ...

    def step(self, confidence_logits: Logits, requests: Rows) -> Counts:
        """`Policy.lengths` of one step, which is remembered.

        Args:
            requests: the request of each row, [B]; rows move, requests come and go.
        """
        ...


class NoDrafts:
    """Plain decoding."""

    name = "none"
    drafts = False

    def lengths(self, confidence_logits: Logits) -> Counts:
        """Nothing is verified."""
        return np.zeros(len(confidence_logits), np.int64)


class Fixed:
    """The first `k` tokens of every block; None: the whole block."""

    drafts = True

    def __init__(self, k: int | None = None) -> None:
        if k is not None and k < 1:
            raise SettingsError(f"policy fixed({k}): at least one token must be verified", "policy none drafts nothing")
        self.k = k
        self.name = "fixed" if k is None else f"fixed({k})"

    def lengths(self, confidence_logits: Logits) -> Counts:
        """min(k, gamma) for every row."""
        rows, gamma = confidence_logits.shape
        return np.full(rows, gamma if self.k is None else min(self.k, gamma), np.int64)


class Threshold:
    """Cut a block before the first slot whose own confidence is below `value` (DSpark, section 4; not cumulative).

    Args:
        value: in [0, 1]; 0 verifies whole blocks.
        temperatures: of the confidence logits, one per position; None: raw confidences.
    """

    drafts = True

    def __init__(self, value: float, temperatures: Sequence[float] | None = None) -> None:
        if not 0 <= value <= 1:
            raise SettingsError(f"policy threshold({value:g}): the threshold is a probability")
        self.value = value
        self._temperatures = None if temperatures is None else np.asarray(temperatures, np.float64)
        self.name = f"threshold({value:g})"

    def lengths(self, confidence_logits: Logits) -> Counts:
        """Slots before the first one below the threshold."""
        return below_threshold(confidence_logits, self.value, self._temperatures)


class Scheduled:
    """The hardware-aware prefix scheduler with early stop, over the whole batch (DSpark, Algorithm 1)."""

    name = "scheduled"
    drafts = True

    def __init__(self, scheduler: PrefixScheduler) -> None:
        self.scheduler = scheduler

    def lengths(self, confidence_logits: Logits) -> Counts:
        """What the scheduler admits."""
        return self.scheduler.lengths(_survival(self, confidence_logits)).astype(np.int64)


class ScheduledDelayed:
    """The delayed prefix scheduler: how many of a batch from earlier confidences, which ones from these (section 5.2).

    Args:
        scheduler: its memory is this policy's; nobody else steps it.
    """

    name = "scheduled-delayed"
    drafts = True

    def __init__(self, scheduler: DelayedPrefixScheduler) -> None:
        self.scheduler = scheduler

    def begin(self) -> None:
        """See `Remembering`."""
        self.scheduler.forget()

    def step(self, confidence_logits: Logits, requests: Rows) -> Counts:
        """See `Remembering`; a request that was not there when the step was sized counts as surviving."""
        survival = _survival(self, confidence_logits)
        return self.scheduler.step(survival, requests.tolist()).lengths.astype(np.int64)

    def lengths(self, confidence_logits: Logits) -> Counts:
        """One step, the rows being the same requests at every step."""
        return self.step(confidence_logits, np.arange(len(confidence_logits)))


def _survival(policy: Scheduled | ScheduledDelayed, confidence_logits: Logits) -> Floats:
    if np.isnan(confidence_logits).any():
        raise SettingsError(
            f"policy {policy.name} admits drafts by confidence, and this drafter has no confidence head",
            "use policy fixed or fixed(k)",
        )
    return policy.scheduler.survival(confidence_logits)


def parse_policy(
    text: str, *, scheduler: PrefixScheduler | None = None, temperatures: Sequence[float] | None = None
) -> Policy:
    """The policy of a name as reports write it.

    Args:
        text: `none`, `fixed`, `fixed(k)`, `threshold(x)`, `scheduled` or `scheduled-delayed`.
        scheduler: for the last two; `scheduled-delayed` makes its own of it, with a memory of its own.
        temperatures: for `threshold`.
    Raises:
        SettingsError: an unknown policy, a value out of range, or no scheduler for one that is scheduled.
    """
    match = re.fullmatch(r"([a-z]+(?:-[a-z]+)*)(?:\(([0-9.]+)\))?", text.strip())
    kind, argument = match.groups() if match else ("", None)
    try:
        if kind == "none" and argument is None:
            return NoDrafts()
        if kind == "fixed":
            return Fixed(None if argument is None else int(argument))
        if kind == "threshold" and argument is not None:
            return Threshold(float(argument), temperatures)
    except ValueError:
        raise SettingsError(f"policy {text!r}: {argument!r} is not a number that it takes") from None
    if kind in (Scheduled.name, ScheduledDelayed.name) and argument is None:
        if scheduler is None:
            raise SettingsError(f"policy {kind} needs a cost curve and temperatures")
        if kind == Scheduled.name:
            return Scheduled(scheduler)
        return ScheduledDelayed(DelayedPrefixScheduler.of(scheduler))
    raise SettingsError(
        f"policy {text!r} does not exist",
        "policies: none, fixed, fixed(k), threshold(x), scheduled, scheduled-delayed",
    )
