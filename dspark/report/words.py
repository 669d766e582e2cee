"""Numbers and names as a report spells them: a value is never without its interval where one is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dspark.measured import Measured

NOTHING = "–"


def interval(number: Measured | None, digits: int = 3) -> str:
    """`1.460 [1.410, 1.520]`, or a dash where nothing was measured (the reason stands elsewhere)."""
    if number is None:
        return NOTHING
    low, high = number.ci95
    return f"{number.value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def significant(number: Measured | None, digits: int = 3) -> str:
    """A number of any size, to its first digits: `1.46 [1.41, 1.52]`, `0.0123 [0.012, 0.0127]`."""
    if number is None:
        return NOTHING
    low, high = number.ci95
    return f"{number.value:.{digits}g} [{low:.{digits}g}, {high:.{digits}g}]"


def percent(number: Measured | None) -> str:
    """A relative difference: `+1.2 % [-0.4, +2.9]`."""
    if number is None:
        return NOTHING
    low, high = (100 * bound for bound in number.ci95)
    return f"{100 * number.value:+.1f} % [{low:+.1f}, {high:+.1f}]"


def count(number: Measured | None) -> str:
    """How many observations a number rests on."""
    return NOTHING if number is None else str(number.n)


def milliseconds(number: Measured | None) -> str:
    """Seconds with their interval, as milliseconds."""
    if number is None:
        return NOTHING
    low, high = (1000 * bound for bound in number.ci95)
    return f"{1000 * number.value:.1f} [{low:.1f}, {high:.1f}]"


def leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The settings in nested mappings, `section.key` and the value, in the order of their names."""
    for key in sorted(value):
        inner = value[key]
        if isinstance(inner, Mapping) and inner:
            yield from leaves(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _spelled(inner)


def _spelled(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_spelled, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value) or "none"
