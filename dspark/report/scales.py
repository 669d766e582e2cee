"""Scales: from values to places along an axis, with round ticks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_ROUND = (1, 2, 5)  # times a power of ten
_ENOUGH = 1e-9  # of a step: rounding of floats, no value


@dataclass(frozen=True)
class Tick:
    """A value on an axis, and how it is written there."""

    value: float
    label: str


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`.

    Attributes:
        logarithmic: equal ratios are equally far apart.
        ticks: within `low` and `high`, ascending.
    """

    low: float
    high: float
    ticks: tuple[Tick, ...]
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Where a value stands: 0 at `low`, 1 at `high`; outside of both beyond them."""
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def linear(
    values: Iterable[float],
    *,
    low: float | None = None,
    high: float | None = None,
    whole: bool = False,
    at_most: int = 6,
) -> Scale:
    """An axis that holds all values and ends at round ones.

    Args:
        values: finite.
        low, high: where the axis has to end, whatever is round; None: at a tick.
        whole: ticks are whole numbers.
        at_most: steps between ticks.
    Raises:
        ValueError: no value and no ends, or ends in the wrong order.
    """
    known = [*values, *(end for end in (low, high) if end is not None)]
    if not known:
        raise ValueError("an axis needs values, or both of its ends")
    first, last = min(known) if low is None else low, max(known) if high is None else high
    if first > last:
        raise ValueError(f"an axis cannot run from {first:g} to {last:g}")
    if last - first <= _ENOUGH * max(abs(first), abs(last)):  # nothing that ticks could tell apart
        room = abs(first) / 2 or 1.0
        first, last = (first if low is not None else first - room), (last if high is not None else last + room)
        if last - first <= _ENOUGH * abs(first):  # both ends are given and the same
            last = first + (abs(first) or 1.0)
    step, digits = round_step(last - first, at_most, whole=whole)
    start = math.floor(first / step + _ENOUGH) if low is None else math.ceil(first / step - _ENOUGH)
    end = math.ceil(last / step - _ENOUGH) if high is None else math.floor(last / step + _ENOUGH)
    ticks = tuple(_tick(round(index * step, digits), digits) for index in range(start, end + 1))
    return Scale(ticks[0].value if low is None else first, ticks[-1].value if high is None else last, ticks)


def logarithmic(values: Iterable[float], *, at_most: int = 8) -> Scale:
    """An axis of ratios that ends at 1, 2 or 5 times a power of ten.

    Args:
        values: finite and positive.
        at_most: ticks; with more than that, powers of ten only.
    Raises:
        ValueError: no value, or one that is not positive.
    """
    known = list(values)
    if not known or min(known) <= 0:
        raise ValueError("a logarithmic axis needs values, all of them positive")
    powers = range(math.floor(math.log10(min(known))) - 1, math.ceil(math.log10(max(known))) + 2)
    places = [factor * 10.0**power for power in powers for factor in _ROUND]
    below = [place for place in places if place <= min(known) * (1 + _ENOUGH)]
    above = [place for place in places if place >= max(known) * (1 - _ENOUGH)]
    low, high = below[-1], above[0]
    if low == high:
        low, high = below[-2], above[1]
    chosen = [place for place in places if low <= place <= high]
    if len(chosen) > at_most:
        tens = [10.0**power for power in powers if low <= 10.0**power <= high]
        chosen = tens if len(tens) > 1 else [low, high]
    return Scale(low, high, tuple(_tick(place, max(0, -math.floor(math.log10(place)))) for place in chosen), True)


def at_values(values: Sequence[float]) -> Scale:
    """A logarithmic axis whose ticks are the values themselves, for the few numbers of requests that were measured.

    Raises:
        ValueError: no value, or one that is not positive.
    """
    known = sorted(set(values))
    if not known or known[0] <= 0:
        raise ValueError("a logarithmic axis needs values, all of them positive")
    ticks = tuple(Tick(value, f"{value:,g}") for value in known)
    if len(known) == 1:
        return Scale(known[0] / 2, known[0] * 2, ticks, True)
    room = (known[-1] / known[0]) ** 0.04  # so that marks do not stand on the frame
    return Scale(known[0] / room, known[-1] * room, ticks, True)


def named(names: Sequence[str]) -> Scale:
    """An axis of things that have names and no size: the first stands at 0, the next at 1, and so on.

    Raises:
        ValueError: no name.
    """
    if not names:
        raise ValueError("an axis needs values")
    return Scale(-0.25, len(names) - 0.75, tuple(Tick(float(place), name) for place, name in enumerate(names)))


def round_step(span: float, at_most: int, *, whole: bool = False) -> tuple[float, int]:
    """The smallest of 1, 2 and 5 times a power of ten that divides `span` into `at_most` steps or fewer.

    Returns:
        the step, and the decimals that it needs.
    """
    power = math.floor(math.log10(span / at_most)) - 1
    for exponent, factor in itertools.product(range(power, power + 4), _ROUND):
        step = factor * 10.0**exponent
        if span / step <= at_most * (1 + _ENOUGH) and (step >= 1 or not whole):
            return step, max(0, -exponent)
    return 1.0, 0  # whole numbers over less than one: nothing smaller than 1 is a step


def _tick(value: float, digits: int) -> Tick:
    value = value or 0.0  # no minus zero
    return Tick(value, f"{value:,.{digits}f}")
