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
    scales = check_temperatures(temperatures, records.gamma)
    fixed = {
        "temperatures": tuple(scales.tolist()),
        "bins": bins,
        "rows": len(records),
        "conversations": records.conversations,
    }
    if not records.known.any():
        nothing = {"samples": "no block reached a position whose outcome is known"}
        positions = tuple(
            PositionAssessment(position=k + 1, samples=0, accepted=0, absent=nothing) for k in range(records.gamma)
        )
        return Assessment(**fixed, positions=positions, absent=nothing)
    resampling = Resampling.of(records, seed=seed)
    before, after = records.survival(np.ones(records.gamma)), records.survival(scales)
    rows = [_position(records, k, before[:, k], after[:, k], resampling, bins) for k in range(records.gamma)]
    errors = [pair for _, pair in rows if pair is not None]
    mean_before, mean_after = mean_of([pair[0] for pair in errors]), mean_of([pair[1] for pair in errors])
    return Assessment(
        **fixed,
        positions=tuple(position for position, _ in rows),
        mean_ece_before=mean_before.measured(low=0),
        mean_ece_after=mean_after.measured(low=0),
        mean_ece_change=(mean_after - mean_before).measured(),
    )


def _position(
    records: Records, k: int, before: Floats, after: Floats, resampling: Resampling, bins: int
) -> tuple[PositionAssessment, tuple[Estimate, Estimate] | None]:
    known = records.known[:, k]
    outcomes = records.survived[known, k]
    if outcomes.size == 0:
        absent = {"samples": "no block reached a position whose outcome is known"}
        return PositionAssessment(position=k + 1, samples=0, accepted=0, absent=absent), None
    values: dict[str, Measured] = {}
    errors: list[Estimate] = []
    absent = {}
    for when, survival in (("before", before[known]), ("after", after[known])):
        errors.append(resampling.ece(survival, outcomes, known, bins, "width"))
        values[f"ece_{when}"] = errors[-1].measured(low=0)
        values[f"ece_equal_mass_{when}"] = resampling.ece(survival, outcomes, known, bins, "mass").measured(low=0)
        values[f"brier_{when}"] = resampling.mean((survival - outcomes) ** 2, known).measured(low=0)
        area = resampling.auroc(survival, outcomes, known)
        if area is None:
            absent["auroc"] = f"{'every' if outcomes.all() else 'no'} prefix was accepted"
        else:
            values[f"auroc_{when}"] = area.measured(low=0)
    position = PositionAssessment(
        position=k + 1,
        samples=outcomes.size,
        accepted=int(outcomes.sum()),
        ece_change=(errors[1] - errors[0]).measured(),
        absent=absent,
        **values,
    )
    return position, (errors[0], errors[1])


def mean_ece(records: Records, temperatures: ArrayLike, resampling: Resampling, bins: int) -> Estimate:
    """ECE of the survival, unweighted mean over the positions that have samples; there must be one."""
    survival = records.survival(temperatures)
    errors = []
    for k in np.flatnonzero(records.known.any(axis=0)):
        known = records.known[:, k]
        errors.append(resampling.ece(survival[known, k], records.survived[known, k], known, bins, "width"))
    return mean_of(errors)
