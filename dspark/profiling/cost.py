"""What a profile found: step times of one engine on one machine, and the cost models made from them.

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
from dspark.scheduling.additive import AdditiveCost, Cell, ModelErrors, fit_additive
from dspark.scheduling.cost import CostCurve, StepCost, isotonic


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
    additive: AdditiveCost | None = None
    model_errors: ModelErrors | None = None  # which of the two explains the rows better
    absent: dict[str, str] = Field(default_factory=dict)

    @property
    def additive_is_closer(self) -> bool:
        """Whether the additive cost predicted steps that it had not seen better than the curve did."""
        return self.additive is not None and self.model_errors is not None and self.model_errors.additive_is_closer

    @property
    def why_no_curve(self) -> str | None:
        """Why there is no cost curve, with the profile's name; None: there is one."""
        if self.curve is not None:
            return None
        return f"serving profile {self.profile}: {self.absent.get('curve', 'no cost curve was fitted')}"

    @property
    def scheduling(self) -> StepCost | None:
        """The model that schedulers go by; None: there is none."""
        return self.additive if self.additive_is_closer else self.curve


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


def cost_row(
    requests: int, verify_tokens: int, context: int, steps: Sequence[float], drafting: Sequence[float]
) -> CostRow:
    """A shape's row from seconds of whole steps and of drafting in them, as a server tells; the rest is verification.

    Raises:
        DataError: no step was timed.
    """
    step, interval = median(steps)
    draft = min(float(np.median(drafting)), step)
    return CostRow(
        requests=requests,
        verify_tokens=verify_tokens,
        context=context,
        draft_seconds=draft,
        verify_seconds=step - draft,
        step_seconds=step,
        n=len(steps),
        ci95=interval,
    )


def draft_row(backend: str, requests: int, context: int, drafting: Sequence[float]) -> DraftRow:
    """A backend's row from seconds of drafting.

    Raises:
        DataError: no step was timed.
    """
    seconds, interval = median(drafting)
    return DraftRow(
        backend=backend, requests=requests, context=context, draft_seconds=seconds, n=len(drafting), ci95=interval
    )


def curve_fields(rows: Sequence[CostRow], max_batch_tokens: int) -> dict[str, Any]:
    """The fields of a report that are fitted to its rows; for each model that there is none of, the reason."""
    fields: dict[str, Any] = {}
    absent = {}
    try:
        fields["curve"], fields["curve_changes"] = fit_curve(rows, max_batch_tokens)
    except CostCurveError as reason:
        absent["curve"] = reason.message
    try:
        fields["additive"] = fit_additive(_cells(rows))
        fields["model_errors"] = compare_models(rows, max_batch_tokens)
    except CostCurveError as reason:
        absent["additive"] = reason.message
    if "additive" in fields and fields["model_errors"] is None:
        absent["model_errors"] = "no shape of a step can be left out and still be predicted by both models"
    return {**fields, "absent": absent}


def compare_models(rows: Sequence[CostRow], max_batch_tokens: int) -> ModelErrors | None:
    """How well the curve and the additive cost predict steps that they have not seen.

    Fitted to all rows the additive cost, which has more numbers to choose, would always look better. So each shape is
    left out once, if others have as many requests and its tokens lie between those of others. The curve is interpolated
    for it: what is asked is whether tokens alone tell what a step costs, not how far off a staircase is between probes.

    Returns:
        None: no shape can be left out.
    """
    cells = _cells(rows)
    errors: list[tuple[float, float]] = []
    for cell in cells:
        rest = [other for other in cells if other is not cell]
        tokens = sorted(other.tokens for other in rest)
        if cell.requests not in {other.requests for other in rest} or not tokens[0] <= cell.tokens <= tokens[-1]:
            continue
        try:
            curve, _ = fit_curve(
                [row for row in rows if (row.requests, row.verify_tokens) != (cell.requests, cell.tokens)],
                max_batch_tokens,
            )
            additive = fit_additive(rest)
        except CostCurveError:
            continue  # what is left is too little for one of them
        probes = curve.sample_batch_tokens
        by_tokens = float(np.interp(cell.tokens, probes, curve.step_seconds(probes)))
        by_both = float(additive.seconds(cell.requests, cell.tokens))
        errors.append((abs(by_tokens / cell.seconds - 1), abs(by_both / cell.seconds - 1)))
    if not errors:
        return None
    of_curve, of_additive = (float(value) for value in np.median(errors, axis=0))
    return ModelErrors(cells=len(errors), curve_relative_error=of_curve, additive_relative_error=of_additive)


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


def _cells(rows: Sequence[CostRow]) -> list[Cell]:
    """One cell per shape: the median over contexts, as in the curve."""
    by_shape: dict[tuple[int, int], list[float]] = defaultdict(list)
    for row in rows:
        by_shape[row.requests, row.verify_tokens].append(row.step_seconds)
    return [Cell(*shape, float(np.median(seconds))) for shape, seconds in sorted(by_shape.items())]
