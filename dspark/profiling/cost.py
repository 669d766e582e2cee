"""What a profile found: step times of one engine on one machine, and the cost curve made from them.

Models only: schedulers, packages and reports read them where no torch is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from dspark.config.models import DType, Name
from dspark.errors import CostCurveError, DataError
from dspark.measured import bootstrap
from dspark.scheduling.cost import CostCurve, isotonic


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)


class CostRow(_Model):
    """Medians over repeated steps of one shape.

    A step drafts a block for every request and verifies `verify_tokens` tokens, anchors included; the target's pass is
    as wide as the longest row, which here is every row.
    """

    requests: int
    verify_tokens: int  # of all requests together: requests x (1 + verified drafts)
    context: int  # tokens before the step, on average over the repeats
    draft_seconds: float
    verify_seconds: float
    step_seconds: float  # of the whole step
    n: int  # repeats
    ci95: tuple[float, float]  # of step_seconds


class DraftRow(_Model):
    """Median drafting time of one backend."""

    backend: str
    requests: int
    context: int
    draft_seconds: float
    n: int
    ci95: tuple[float, float]


class CurveChange(_Model):
    """A point of the curve that measured faster than one with fewer tokens: noise, flattened."""

    tokens: int
    steps_per_second_before: float
    steps_per_second_after: float


class CostReport(_Model):
    """`profiles/<target>@<geometry>@<profile>/cost.json`, and `scheduler/cost/<profile>.json` of a package."""

    schema_: Literal["dspark/cost/1"] = Field(default="dspark/cost/1", alias="schema")
    profile: Name
    target: Name
    target_digest: str
    geometry: str
    gamma: int
    dtype: DType
    threads: int
    draft_backend: str  # whose drafting is in `rows`
    warmup: int
    repeats: int
    fingerprint: dict[str, Any]
    rows: tuple[CostRow, ...]
    plain: tuple[CostRow, ...]  # policy none: one token per request, nothing drafted
    drafting: tuple[DraftRow, ...]  # every backend that was measured
    curve: CostCurve | None = None
    curve_changes: tuple[CurveChange, ...] = ()
    absent: dict[str, str] = Field(default_factory=dict)


def median(seconds: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """The median of some timings and its 95 % interval.

    Raises:
        DataError: there are none.
    """
    values = np.asarray(seconds)
    measured = bootstrap(len(values), lambda chosen: float(np.median(values[chosen])))
    if measured is None:
        raise DataError("no step was timed")
    return measured.value, measured.ci95


def curve_fields(rows: Sequence[CostRow], max_batch_tokens: int) -> dict[str, Any]:
    """The fields of a report that `fit_curve` fills: a curve with its changes, or the reason why there is none."""
    try:
        curve, changes = fit_curve(rows, max_batch_tokens)
    except CostCurveError as reason:
        return {"absent": {"curve": reason.message}}
    return {"curve": curve, "curve_changes": changes}


def fit_curve(rows: Sequence[CostRow], max_batch_tokens: int) -> tuple[CostCurve, tuple[CurveChange, ...]]:
    """Steps per second against tokens per step: the median step of each token count, made to fall.

    Returns:
        the curve, and every point that had to be moved.
    Raises:
        CostCurveError: one token count only, or a curve that comes out flat.
    """
    by_tokens: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        by_tokens[row.verify_tokens].append(row.step_seconds)
    if not by_tokens:
        raise CostCurveError("cost curve: no step was measured")
    tokens = sorted(by_tokens)
    measured = [1 / float(np.median(by_tokens[count])) for count in tokens]
    repaired = isotonic(tokens, measured, [len(by_tokens[count]) for count in tokens])
    curve = CostCurve(
        sample_batch_tokens=tuple(tokens),
        sample_steps_per_second=repaired.steps_per_second,
        max_batch_tokens=max_batch_tokens,
    )
    changes = tuple(CurveChange(**vars(change)) for change in repaired.changes)
    return curve, changes
