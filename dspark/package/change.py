"""What `dspark plan --what-if` is to change: its words and their mistakes."""

from __future__ import annotations

from dataclasses import dataclass

from dspark.config.declared import suggestion
from dspark.errors import SettingsError

_EXAMPLES = {"gamma": "gamma=2", "profile": "profile=reference-cpu", "concurrency": "concurrency=8"}


@dataclass(frozen=True)
class Change:
    """What is to be different; None: as it is.

    Attributes:
        gamma: drafts of a block.
        profile: a serving profile.
        concurrency: requests at a time; None: all numbers of which there are step times.
    """

    gamma: int | None = None
    profile: str | None = None
    concurrency: int | None = None


def parse_change(text: str) -> Change:
    """`gamma=2,profile=reference-cpu,concurrency=8`, any of them.

    Raises:
        SettingsError: another key, a value that is no number above 0, a key without a value or named twice.
    """
    found: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in _EXAMPLES:
            raise SettingsError(f"--what-if {text}: {key!r} cannot be changed", suggestion(key, _EXAMPLES))
        if not equals or not value or key in found:
            problem = "stands there twice" if key in found else "has no value"
            raise SettingsError(f"--what-if {text}: {key} {problem}", f"for instance --what-if {_EXAMPLES[key]}")
        found[key] = value
    numbers = {}
    for key in ("gamma", "concurrency"):
        if key in found:
            if not found[key].isdecimal() or int(found[key]) < 1:
                raise SettingsError(
                    f"--what-if {text}: {key} is a number above 0, not {found[key]!r}",
                    f"for instance --what-if {_EXAMPLES[key]}",
                )
            numbers[key] = int(found[key])
    return Change(profile=found.get("profile"), **numbers)
