"""Two registered versions side by side: their settings, and what was measured of each.

From the tracking runs, for looking at. The numbers come from different runs on perhaps different prompts, so their
difference decides nothing: gates compare records that one run measured in pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dspark.registry.tracking import Registry

# Of the many numbers in a package those that say whether it pays.
_TELLING = ("tau", "ratio", "tokens_per_second", "mean_ece_after")
_BOUNDS = (".ci95_low", ".ci95_high", ".n")


@dataclass(frozen=True)
class Setting:
    """A parameter or a tag; None where it is absent."""

    name: str
    first: str | None
    second: str | None


@dataclass(frozen=True)
class Number:
    """A measured number of both versions: value, and bounds of its 95 % interval; None where it is absent."""

    name: str
    first: tuple[float, float, float] | None
    second: tuple[float, float, float] | None

    @property
    def telling(self) -> bool:
        """True if it belongs to the few that say whether a drafter pays."""
        return self.name.rpartition(".")[2] in _TELLING

    @property
    def relative(self) -> float | None:
        """second / first - 1, or None where that says nothing."""
        if self.first is None or self.second is None or self.first[0] == 0:
            return None
        return self.second[0] / self.first[0] - 1


@dataclass(frozen=True)
class Comparison:
    """What differs."""

    first: int
    second: int
    settings: tuple[Setting, ...]
    numbers: tuple[Number, ...]

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


def compare(registry: Registry, first: Any, second: Any) -> Comparison:
    """Compare two versions of one model.

    Raises:
        MlflowException: the run of one of them is gone.
    """
    runs = [registry.client.get_run(found.run_id).data for found in (first, second)]
    settings = {**_differing(first.tags, second.tags), **_differing(runs[0].params, runs[1].params)}
    measured = [_measured(run.metrics) for run in runs]
    names = sorted({*measured[0], *measured[1]})
    return Comparison(
        first=int(first.version),
        second=int(second.version),
        settings=tuple(Setting(name, *both) for name, both in sorted(settings.items())),
        numbers=tuple(Number(name, measured[0].get(name), measured[1].get(name)) for name in names),
    )


def _differing(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
    both = {key: (first.get(key), second.get(key)) for key in {*first, *second}}
    return {key: values for key, values in both.items() if values[0] != values[1]}


def _measured(metrics: Mapping[str, float]) -> dict[str, tuple[float, float, float]]:
    """Numbers that have an interval; the rest are seconds of stages and points of curves."""
    return {
        name: (value, metrics[f"{name}.ci95_low"], metrics[f"{name}.ci95_high"])
        for name, value in metrics.items()
        if not name.endswith(_BOUNDS) and f"{name}.ci95_low" in metrics and f"{name}.ci95_high" in metrics
    }
