"""What temperatures do to the calibration of records that they were not fitted on."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict

from dspark.calibration.records import Records
from dspark.calibration.resampling import Estimate, Resampling, mean_of
from dspark.measured import Measured
from dspark.scheduling.survival import check_temperatures

Floats = NDArray[np.float64]

_NOTHING = "no block reached a position whose outcome is known"


class PositionAssessment(BaseModel):
    """Calibration of the survival up to one draft position, with T = 1 (before) and with the temperatures (after)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    position: int  # counted from 1
    samples: int  # blocks whose outcome at this position is known
    accepted: int  # of those, accepted up to and including this position
    ece_before: Measured | None = None
    ece_after: Measured | None = None
    ece_change: Measured | None = None  # after - before, paired
    ece_equal_mass_before: Measured | None = None
    ece_equal_mass_after: Measured | None = None
    auroc_before: Measured | None = None
    auroc_after: Measured | None = None
    brier_before: Measured | None = None
    brier_after: Measured | None = None
    absent: dict[str, str] = {}  # what could not be measured, and why


class Assessment(BaseModel):
    """Calibration over all positions; intervals by bootstrap over conversations, n counts conversations."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    temperatures: tuple[float, ...]
    bins: int
    rows: int
    conversations: int
    positions: tuple[PositionAssessment, ...]
    mean_ece_before: Measured | None = None  # over the positions that have samples, unweighted; bins of equal width
    mean_ece_after: Measured | None = None
    mean_ece_change: Measured | None = None  # after - before, paired
    absent: dict[str, str] = {}


def assess(records: Records, temperatures: ArrayLike, *, bins: int = 15, seed: int = 0) -> Assessment:
    """Measure survival probabilities against what happened, uncalibrated and calibrated.

    Args:
        records: fresh ones, not those that the temperatures were fitted on.
        temperatures: [gamma].
        bins: of ECE.
        seed: of the bootstrap.
    Raises:
        CalibrationError: temperatures that are not one positive number per position.
    """
    return Assessor(records, Resampling.of(records, seed=seed), bins).assess(temperatures)


class Assessor:
    """Records on which temperatures are compared: what one asks of several is worked out once.

    Args:
        records: fresh ones.
        resampling: of their conversations.
        bins: of ECE.
    """

    def __init__(self, records: Records, resampling: Resampling, bins: int) -> None:
        self.records, self.resampling, self.bins = records, resampling, bins
        self._cases = {
            int(k): resampling.cases(records.known[:, k], records.survived[records.known[:, k], k])
            for k in np.flatnonzero(records.known.any(axis=0))
        }
        self._errors: dict[bytes, dict[int, Estimate]] = {}

    def mean_ece(self, temperatures: ArrayLike) -> Estimate:
        """ECE of the survival, unweighted mean over the positions that have samples; there must be one."""
        return mean_of(list(self._ece(temperatures).values()))

    def assess(self, temperatures: ArrayLike) -> Assessment:
        """See `assess`."""
        scales = check_temperatures(temperatures, self.records.gamma)
        ones = np.ones(self.records.gamma)
        absent, means = {}, {}
        if self._cases:
            before, after = self.mean_ece(ones), self.mean_ece(scales)
            means = {
                "mean_ece_before": before.measured(low=0),
                "mean_ece_after": after.measured(low=0),
                "mean_ece_change": (after - before).measured(),
            }
        else:
            absent = {"samples": _NOTHING}
        return Assessment(
            temperatures=tuple(scales.tolist()),
            bins=self.bins,
            rows=len(self.records),
            conversations=self.records.conversations,
            positions=tuple(self._position(k, ones, scales) for k in range(self.records.gamma)),
            absent=absent,
            **means,
        )

    def _position(self, k: int, before: Floats, after: Floats) -> PositionAssessment:
        cases = self._cases.get(k)
        if cases is None:
            return PositionAssessment(position=k + 1, samples=0, accepted=0, absent={"samples": _NOTHING})
        errors = [self._ece(temperatures)[k] for temperatures in (before, after)]
        values = {"ece_change": (errors[1] - errors[0]).measured()}
        absent = {}
        for when, temperatures, error in zip(("before", "after"), (before, after), errors, strict=True):
            survival = self._survival(k, temperatures)
            ranked = cases.ranked(survival)
            values[f"ece_{when}"] = error.measured(low=0)
            values[f"ece_equal_mass_{when}"] = ranked.ece_equal_mass(self.bins).measured(low=0)
            values[f"brier_{when}"] = cases.mean((survival - cases.outcomes) ** 2).measured(low=0)
            area = ranked.auroc()
            if area is None:
                absent["auroc"] = f"{'every' if cases.outcomes.all() else 'no'} prefix was accepted"
            else:
                values[f"auroc_{when}"] = area.measured(low=0)
        return PositionAssessment(
            position=k + 1,
            samples=cases.outcomes.size,
            accepted=int(cases.outcomes.sum()),
            absent=absent,
            **values,
        )

    def _ece(self, temperatures: ArrayLike) -> dict[int, Estimate]:
        """Of each position that has samples."""
        key = check_temperatures(temperatures, self.records.gamma).tobytes()
        if key not in self._errors:
            self._errors[key] = {
                k: cases.ece(self._survival(k, temperatures), self.bins) for k, cases in self._cases.items()
            }
        return self._errors[key]

    def _survival(self, k: int, temperatures: ArrayLike) -> Floats:
        """At the cases of a position."""
        survival: Floats = self.records.survival(temperatures)[self.records.known[:, k], k]
        return survival
