"""An open-loop load: requests that come at random, ever faster and then slower, whether or not others are done.

Arrivals are a Poisson process whose rate rises from `lowest` to `highest` and falls back, geometrically in time, so
that every doubling of the load lasts equally long. numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark.config.models import LiveLoadSettings
from dspark.errors import DataError, SettingsError

Floats = NDArray[np.float64]

_SECONDS = 60.0
_STEPS = 4096  # of the rate's integral: arrivals are placed to a few ten-thousandths of the trace


@dataclass(frozen=True)
class Rates:
    """Requests per second: where the load is lowest, at both ends, and where it is highest, in the middle."""

    lowest: float
    highest: float

    def __post_init__(self) -> None:
        if not 0 < self.lowest <= self.highest:
            raise SettingsError(
                f"rates of {self.lowest:g} and {self.highest:g} requests per second: they must be > 0 and must not fall"
            )

    def at(self, share: Floats) -> Floats:
        """The rate when a share of the trace has passed, in [0, 1]."""
        height = 1 - np.abs(2 * share - 1)
        result: Floats = self.lowest ** (1 - height) * self.highest**height
        return result

    @property
    def mean(self) -> float:
        """Over the whole trace: the mean of lowest^(1-h) highest^h over all heights h."""
        steepness = float(np.log(self.highest / self.lowest))
        return (self.highest - self.lowest) / steepness if steepness else self.lowest


@dataclass(frozen=True)
class Arrival:
    """One request.

    Attributes:
        seconds: since the trace began.
        prompt: which one, by its place.
    """

    seconds: float
    prompt: int


@dataclass(frozen=True)
class Trace:
    """Requests in the order in which they come.

    Attributes:
        seconds: for how long they come.
    """

    seconds: float
    arrivals: tuple[Arrival, ...]


def make_trace(settings: LiveLoadSettings, rates: Rates, domains: Sequence[str], seed: int) -> Trace:
    """Arrivals of one round: the same for the same arguments.

    Args:
        settings: `requests`, of which there are then exactly as many; else `seconds`.
        domains: of the prompts there are; an arrival takes one of the settings' domains at random, and of it the next
            prompt in an order of its own, which begins again when all have come.
        seed: of the round.
    Raises:
        DataError: there is no prompt of a domain.
    """
    generator = np.random.default_rng(seed)
    count = settings.requests
    seconds = duration(settings, rates)
    grid = np.linspace(0, 1, _STEPS + 1)
    rate = rates.at(grid)
    # Expected arrivals up to each point of the grid; given how many there are, they fall independently by this law.
    expected = np.concatenate([[0.0], np.cumsum((rate[1:] + rate[:-1]) / 2)]) * seconds / _STEPS
    if count is None:
        count = int(generator.poisson(expected[-1]))
    moments = np.interp(np.sort(generator.random(count)) * expected[-1], expected, grid * seconds)
    prompts = _prompts(settings.domains or tuple(dict.fromkeys(domains)), domains, count, generator)
    pairs = zip(moments.tolist(), prompts, strict=True)
    return Trace(seconds, tuple(Arrival(moment, prompt) for moment, prompt in pairs))


def duration(settings: LiveLoadSettings, rates: Rates) -> float:
    """For how many seconds requests come."""
    if settings.requests is not None:
        return settings.requests / rates.mean
    return settings.seconds or _SECONDS


def _prompts(wanted: Sequence[str], domains: Sequence[str], count: int, generator: np.random.Generator) -> list[int]:
    places = {domain: [place for place, name in enumerate(domains) if name == domain] for domain in wanted}
    missing = [domain for domain, found in places.items() if not found]
    if missing or not places:
        there = ", ".join(sorted(set(domains))) or "none"
        raise DataError(f"there is no prompt of domain {', '.join(missing) or 'any'}", f"domains with prompts: {there}")
    orders: dict[str, list[int]] = {domain: [] for domain in wanted}
    chosen = []
    for domain in generator.choice(np.array(wanted, object), count):
        if not orders[domain]:
            orders[domain] = generator.permutation(places[domain]).tolist()
        chosen.append(orders[domain].pop())
    return chosen
