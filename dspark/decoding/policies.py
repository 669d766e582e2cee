"""Policies: how many of the drafted tokens are verified.

A policy sees the raw confidence logits of a block before it is verified. The logit of slot j depends on the tokens
before j and not on token j, so cutting a block by it is non-anticipating and keeps decoding lossless
(deepspec.md, section 5.2); `scheduled` keeps that property by stopping early (DSpark, section 3.2.2).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dspark.decoding.prefixes import Counts, below_threshold
from dspark.errors import SettingsError
from dspark.scheduling.prefix import PrefixScheduler

Logits = NDArray[np.float32]


class Policy(Protocol):
    """Decides the verification lengths of a batch. One that reads confidences refuses NaN: there is no such head."""

    @property
    def name(self) -> str:
        """As written in reports: `none`, `fixed(4)`, `threshold(0.5)`, `scheduled`."""
        ...

    @property
    def drafts(self) -> bool:
        """False if nothing need be drafted."""
        ...

    def lengths(self, confidence_logits: Logits) -> Counts:
        """Draft tokens to verify per row, [B], of blocks with logits [B, gamma]."""
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
        if np.isnan(confidence_logits).any():
            raise SettingsError(
                "policy scheduled admits drafts by confidence, and this drafter has no confidence head",
                "use policy fixed or fixed(k)",
            )
        survival = self.scheduler.survival(confidence_logits)
        return self.scheduler.lengths(survival).astype(np.int64)


def parse_policy(
    text: str, *, scheduler: PrefixScheduler | None = None, temperatures: Sequence[float] | None = None
) -> Policy:
    """The policy of a name as reports write it.

    Args:
        text: `none`, `fixed`, `fixed(k)`, `threshold(x)` or `scheduled`.
        scheduler: for `scheduled`.
        temperatures: for `threshold`.
    Raises:
        SettingsError: an unknown policy, a value out of range, or no scheduler for `scheduled`.
    """
    match = re.fullmatch(r"([a-z]+)(?:\(([0-9.]+)\))?", text.strip())
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
    if kind == "scheduled" and argument is None:
        if scheduler is None:
            raise SettingsError("policy scheduled needs a cost curve and temperatures")
        return Scheduled(scheduler)
    raise SettingsError(f"policy {text!r} does not exist", "policies: none, fixed, fixed(k), threshold(x), scheduled")
