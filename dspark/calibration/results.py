"""What calibration writes: `calibration.json` (schema `dspark/calibration/1`) and `reliability.csv`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from dspark.calibration.assessment import Assessment
from dspark.calibration.records import DECODING, Records
from dspark.calibration.reliability import reliability_table
from dspark.errors import CalibrationError
from dspark.io.csvfile import read_csv, write_csv
from dspark.io.jsonfile import read_model, validation_text, write_model
from dspark.measured import Measured
from dspark.scheduling.config import CalibrationKey, Temperatures
from dspark.scheduling.survival import prefix_survival

REPORT = "calibration.json"
RELIABILITY = "reliability.csv"

Temperature = Annotated[float, Field(gt=0)]
# T = 1 everywhere; the grid search of the paper, from left to right; coordinate descent over all positions at once.
Method = Literal["identity", "sts", "joint"]


class PositionFit(BaseModel):
    """How the temperature of one draft position came about."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    position: int  # counted from 1
    temperature: Temperature  # the candidate fitted again on both halves, or 1
    candidate: Temperature | None = None  # of the fit half, judged on the other; absent where nothing could be fitted
    reached_fit: int  # drafts of the fit half all of whose predecessors were accepted
    reached_held_out: int
    # Held-out, at the candidate less at 1, upon the earlier positions' temperatures:
    log_loss_change: Measured | None = None  # nats per draft that reached the position
    ece_change: Measured | None = None  # of the survival up to this position
    fallback: str | None = None  # why T is 1


class Choice(BaseModel):
    """One way of fitting that was weighed on held-out conversations."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    method: Method
    temperatures: tuple[Temperature, ...]  # of the fit half
    mean_ece: Measured  # held-out, over all positions


class Calibration(BaseModel):
    """The result for one sampling.

    `held_out` assesses the fit half's temperatures on the other half, which has not seen their values, but on which it
    was decided what is kept. `temperatures` are those, fitted again on both.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    key: CalibrationKey
    source: str = DECODING  # who recorded what it was fitted to; files of before do not say
    method: Method = "sts"  # which of `choices` it is
    temperatures: tuple[Temperature, ...] = Field(min_length=1)
    positions: tuple[PositionFit, ...]
    held_out: Assessment
    choices: tuple[Choice, ...] = ()  # nothing to weigh, or a file of before
    rows_fit: int
    conversations_fit: int
    min_samples: int  # per position and half
    seed: int  # of the split and the bootstrap
    warnings: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _agrees(self) -> Calibration:
        if self.temperatures != tuple(position.temperature for position in self.positions):
            raise ValueError("temperatures differ from those of the positions")
        if len(self.temperatures) != len(self.held_out.temperatures):
            raise ValueError("another number of positions was assessed")
        return self


class CalibrationReport(BaseModel):
    """`calibration.json`: one result per sampling, or why there is none."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)

    schema_: Literal["dspark/calibration/1"] = Field(default="dspark/calibration/1", alias="schema")
    gamma: int = Field(ge=1)
    results: tuple[Calibration, ...] = ()
    absent: str | None = None  # why nothing was calibrated: temperatures are 1 then, and nothing reads them

    @model_validator(mode="after")
    def _one_gamma_and_different_keys(self) -> CalibrationReport:
        if bool(self.results) == (self.absent is not None):
            raise ValueError("there are results, or it says why there are none")
        for result in self.results:
            if len(result.temperatures) != self.gamma:
                raise ValueError(f"{len(result.temperatures)} temperatures for gamma {self.gamma} at {result.key}")
            if sum(other.key == result.key for other in self.results) > 1:
                raise ValueError(f"two results for {result.key}")
        return self

    @property
    def temperatures(self) -> tuple[Temperatures, ...]:
        """Key and temperatures of each result, as `scheduler.json` carries them."""
        return tuple(
            Temperatures(**result.key.model_dump(), temperatures=result.temperatures) for result in self.results
        )


@dataclass(frozen=True)
class ReliabilityRow:
    """One bar of a reliability diagram of the survival up to a position, on held-out conversations."""

    key: CalibrationKey
    position: int  # counted from 1
    when: Literal["before", "after"]  # calibration
    low: float
    high: float
    count: int
    mean_confidence: float
    accepted_rate: float


_ROW = TypeAdapter(ReliabilityRow)
_COLUMNS = (
    *CalibrationKey.model_fields,
    *(field.name for field in fields_of(ReliabilityRow) if field.name != "key"),
)


@dataclass(frozen=True)
class STSResult:
    """What `fit_temperatures` returns: the result and the reliability diagrams behind it."""

    calibration: Calibration
    reliability: tuple[ReliabilityRow, ...]

    @property
    def temperatures(self) -> tuple[float, ...]:
        """T per draft position."""
        return self.calibration.temperatures

    @property
    def warnings(self) -> tuple[str, ...]:
        """What could not be fitted, by position."""
        return self.calibration.warnings

    def apply(self, logits: ArrayLike) -> NDArray[np.float64]:
        """Calibrated prefix survival of raw logits, [n, gamma]."""
        return prefix_survival(logits, self.temperatures)


def reliability_rows(records: Records, temperatures: ArrayLike, *, bins: int = 15) -> tuple[ReliabilityRow, ...]:
    """Reliability diagrams of every position, before (T = 1) and after, on records that were not fitted on."""
    rows = []
    stages: tuple[tuple[Literal["before", "after"], ArrayLike], ...] = (
        ("before", np.ones(records.gamma)),
        ("after", temperatures),
    )
    for when, scales in stages:
        survival = records.survival(scales)
        for k in np.flatnonzero(records.known.any(axis=0)):
            known = records.known[:, k]
            for bar in reliability_table(survival[known, k], records.survived[known, k], bins):
                rows.append(ReliabilityRow(records.key, int(k) + 1, when, **vars(bar)))
    return tuple(rows)


def write_results(folder: Path, results: Sequence[STSResult]) -> CalibrationReport:
    """Write `calibration.json` and `reliability.csv`, each atomically, and return the report.

    Raises:
        CalibrationError: no results, results of different gamma, or two of one sampling.
    """
    if not results:
        raise CalibrationError("there is no calibration result to write")
    try:
        report = CalibrationReport(
            gamma=len(results[0].temperatures), results=tuple(result.calibration for result in results)
        )
    except ValidationError as reason:
        raise CalibrationError(validation_text(reason)) from None
    write_model(folder / REPORT, report)
    rows = ({**row.key.model_dump(), **vars(row)} for result in results for row in result.reliability)
    write_csv(folder / RELIABILITY, _COLUMNS, ([row[column] for column in _COLUMNS] for row in rows))
    return report


def write_absence(folder: Path, gamma: int, reason: str) -> CalibrationReport:
    """Write `calibration.json` and an empty `reliability.csv` for a drafter with nothing to calibrate."""
    report = CalibrationReport(gamma=gamma, absent=reason)
    write_model(folder / REPORT, report)
    write_csv(folder / RELIABILITY, _COLUMNS, [])
    return report


def read_report(path: Path) -> CalibrationReport:
    """Read `calibration.json`.

    Raises:
        CalibrationError: missing, not JSON, another schema, or fields that do not validate.
    """
    return read_model(path, CalibrationReport, CalibrationError, "make it again with `dspark run`")


def read_reliability(path: Path) -> tuple[ReliabilityRow, ...]:
    """Read `reliability.csv`.

    Raises:
        CalibrationError: missing, other columns, or a value that does not parse; names file and line.
    """
    return tuple(read_csv(path, _COLUMNS, _row, CalibrationError))


def _row(cells: dict[str, str]) -> ReliabilityRow:
    key = {name: cells[name] for name in CalibrationKey.model_fields}
    return _ROW.validate_python({"key": key} | {name: cells[name] for name in _COLUMNS if name not in key})
