"""The figures that stages' results are shown in: from their models to `chart.Figure`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from dspark.calibration import CalibrationReport, ReliabilityRow
from dspark.errors import DataError
from dspark.evaluation.acceptance import SweepRow
from dspark.evaluation.results import Acceptance, EvaluationMetrics, LoadPoint
from dspark.measured import Measured
from dspark.profiling.cost import CostReport
from dspark.report.chart import Axis, Figure, Panel, Point, Series


def acceptance_by_temperature(metrics: EvaluationMetrics) -> Figure:
    """`acceptance_figure` of an evaluation: a panel per temperature, a series per domain.

    Raises:
        DataError: no block was drafted.
    """
    panels = {
        f"temperature {temperature} ({found.label.replace('_', ' ')})": found.domains
        for temperature, found in metrics.temperatures.items()
    }
    return acceptance_figure("acceptance", "Acceptance by draft position", panels)


def acceptance_figure(
    name: str, title: str, panels: Mapping[str, Mapping[str, Acceptance]], *, columns: int | None = None
) -> Figure:
    """Acceptance at each draft position given that all before it were accepted (DSpark, figure 2).

    Args:
        panels: what was measured, by the panel's title and the name of the series.
    Raises:
        DataError: no block was drafted.
    """
    drawn = tuple(
        Panel(
            heading,
            tuple(
                Series(name, tuple(_point(k, rate) for k, rate in enumerate(found.conditional, start=1)))
                for name, found in series.items()
            ),
        )
        for heading, series in panels.items()
    )
    _require_points(drawn, "no block reached a draft position")
    return Figure(
        name=name,
        title=title,
        caption="Share of drafts accepted where all drafts before them in their block were; bars are 95 % intervals "
        "over prompts.",
        x=Axis("position", "draft position", whole=True),
        y=Axis("acceptance", "conditional acceptance", low=0, high=1),
        panels=drawn,
        columns=columns or min(len(drawn), 3),
    )


def reliability_figures(rows: Sequence[ReliabilityRow], report: CalibrationReport) -> list[Figure]:
    """Reliability diagrams of prefix survival before and after the temperatures, one figure per sampling.

    Args:
        rows: of held-out conversations.
        report: whose expected calibration errors stand over the panels.
    Raises:
        DataError: there is nothing to draw, with the reason of the report.
    """
    if report.absent is not None:
        raise DataError(f"nothing was calibrated: {report.absent}")
    if not rows:
        raise DataError("no reliability was measured")
    figures = []
    for key in dict.fromkeys(row.key for row in rows):
        mine = [row for row in rows if row.key == key]
        held_out = next((result.held_out for result in report.results if result.key == key), None)
        errors = {one.position: (one.ece_before, one.ece_after) for one in held_out.positions} if held_out else {}
        panels = []
        for position in sorted({row.position for row in mine}):
            before, after = errors.get(position, (None, None))
            known = f": ECE {100 * before.value:.1f} → {100 * after.value:.1f} %" if before and after else ""
            series = tuple(
                Series(
                    f"{when} calibration",
                    tuple(
                        Point(row.mean_confidence, row.accepted_rate, n=row.count)
                        for row in mine
                        if (row.position, row.when) == (position, when)
                    ),
                )
                for when in ("before", "after")
            )
            diagonal = Series("as confident as right", (Point(0, 0), Point(1, 1)), reference=True)
            panels.append(Panel(f"position {position}{known}", (diagonal, *series)))
        sampling = f"temperature-{key.temperature:g}-{key.label}{_limits(key.top_k, key.top_p)}"
        figures.append(
            Figure(
                name=f"reliability-{slug(sampling)}",
                title=f"Reliability of confidences, temperature {key.temperature:g} ({key.label.replace('_', ' ')})",
                caption="Survival of a draft's prefix up to each position: predicted by the confidences against what "
                "happened, in bins of equal width, on conversations that were not fitted on. On the dashed line "
                "confidences mean what they say; the table has the number of blocks in each bin.",
                x=Axis("confidence", "predicted survival", low=0, high=1),
                y=Axis("accepted", "accepted", low=0, high=1),
                panels=tuple(panels),
                columns=2 if len(panels) == 4 else min(len(panels), 3),
            )
        )
    return figures


def threshold_figures(rows: Sequence[SweepRow]) -> list[Figure]:
    """Acceptance rate and tau against the threshold of policy `threshold` (DSpark, figure 5).

    Calibrated confidences where there are some at a temperature, else raw ones.

    Raises:
        DataError: nothing was swept.
    """
    if not rows:
        raise DataError("no threshold was swept: the drafter has no confidence head")
    chosen = []
    for temperature in dict.fromkeys(row.temperature for row in rows):
        mine = [row for row in rows if row.temperature == temperature]
        kinds = {row.confidence for row in mine}
        kind = "calibrated" if "calibrated" in kinds else "raw"
        chosen.append((f"temperature {temperature:g}, {kind}", [row for row in mine if row.confidence == kind]))

    def panels(value: Callable[[SweepRow], float | None]) -> tuple[Panel, ...]:
        found = []
        for heading, mine in chosen:
            series = []
            for domain in dict.fromkeys(row.domain for row in mine):
                of_domain = [row for row in mine if row.domain == domain]
                points = [(row.threshold, value(row), row.cycles) for row in of_domain]
                known = tuple(Point(at, y, n=cycles) for at, y, cycles in points if y is not None)
                series.append(Series(domain, known))
            found.append(Panel(heading, tuple(series)))
        return tuple(found)

    axis = Axis("threshold", "confidence below which a block is cut")
    rest = (
        "Worked out in one pass over recorded blocks that were verified whole. No intervals: n counts cycles, which "
        "are not independent."
    )
    columns = min(len(chosen), 3)
    rates, taus = panels(lambda row: row.acceptance_rate), panels(lambda row: row.tau)
    _require_points(rates, "at no threshold was a draft verified")
    return [
        Figure(
            name="threshold-acceptance",
            title="Acceptance rate of verified drafts against the confidence threshold",
            caption=f"Accepted drafts over verified ones. {rest}",
            x=axis,
            y=Axis("acceptance_rate", "accepted / verified", low=0, high=1),
            panels=rates,
            columns=columns,
        ),
        Figure(
            name="threshold-tau",
            title="Tokens per cycle against the confidence threshold",
            caption=f"tau, the bonus token included. {rest}",
            x=axis,
            y=Axis("tau", "tokens per cycle", low=0),
            panels=taus,
            columns=columns,
        ),
    ]


def pareto_figure(loads: Mapping[str, Sequence[LoadPoint]]) -> Figure:
    """Throughput of all requests against the speed that one of them sees (DSpark, figure 7).

    Args:
        loads: load points that may be compared, by where they were measured.
    Raises:
        DataError: there are none.
    """
    panels = []
    for heading, points in loads.items():
        series = []
        for arm in dict.fromkeys(point.arm for point in points):
            mine = sorted((point for point in points if point.arm == arm), key=lambda point: point.concurrency)
            series.append(
                Series(
                    arm,
                    tuple(
                        _point(
                            point.tokens_per_second_per_user.value,
                            point.tokens_per_second,
                            note=str(point.concurrency),
                        )
                        for point in mine
                    ),
                )
            )
        panels.append(Panel(heading, tuple(series)))
    _require_points(panels, "no throughput was measured")
    return Figure(
        name="pareto",
        title="Throughput against speed per user",
        caption="Numbers beside the marks are concurrent requests; up and to the right is better. Bars are 95 % "
        "intervals of the throughput.",
        x=Axis("tokens_per_second_per_user", "tokens/s of one user", low=0),
        y=Axis("tokens_per_second", "tokens/s of all users", low=0),
        panels=tuple(panels),
        columns=min(len(panels), 3),
    )


def budget_figure(loads: Mapping[str, Sequence[LoadPoint]]) -> Figure:
    """Drafts verified per request and cycle against the number of requests (DSpark, figure 8).

    Args:
        loads: as of `pareto_figure`.
    Raises:
        DataError: nothing was drafted at any load.
    """
    panels = []
    for heading, points in loads.items():
        drafting = [point for point in points if point.policy != "none"]
        series = [
            Series(
                arm,
                tuple(
                    Point(point.concurrency, point.verified_tokens_per_request)
                    for point in sorted(drafting, key=lambda point: point.concurrency)
                    if point.arm == arm
                ),
            )
            for arm in dict.fromkeys(point.arm for point in drafting)
        ]
        if series:
            panels.append(Panel(heading, tuple(series)))
    _require_points(panels, "nothing that drafts was measured under load")
    return Figure(
        name="budget",
        title="Verification budget against load",
        caption="Draft tokens that the target verified per request and cycle, on average over the rounds.",
        x=Axis("requests", "concurrent requests", kind="values"),
        y=Axis("verified_tokens_per_request", "verified drafts per request", low=0),
        panels=tuple(panels),
        columns=min(len(panels), 3),
    )


def cost_figure(report: CostReport) -> Figure:
    """Milliseconds of a step against its tokens: what was measured, and the curve that schedulers go by.

    Raises:
        DataError: no step was measured.
    """
    panels = []
    for context in sorted({row.context for row in report.rows}):
        mine = [row for row in report.rows if row.context == context]
        series = [
            Series(
                f"{requests} request{'s' if requests > 1 else ''}",
                tuple(
                    Point(row.verify_tokens, 1000 * row.step_seconds, _milliseconds(row.ci95), row.n)
                    for row in sorted(mine, key=lambda row: row.verify_tokens)
                    if row.requests == requests
                ),
            )
            for requests in sorted({row.requests for row in mine})
        ]
        if report.curve is not None:
            probes = report.curve.sample_batch_tokens
            seconds = report.curve.step_seconds(np.asarray(probes))
            fitted = tuple(Point(at, 1000 * float(value)) for at, value in zip(probes, seconds, strict=True))
            series.insert(0, Series("fitted curve of tokens alone", fitted, form="steps", reference=True))
        panels.append(Panel(f"{context} tokens of context", tuple(series)))
    _require_points(panels, "no step was measured")
    fit = "" if report.curve is None else " The dashed staircase is the fitted curve, over all contexts."
    return Figure(
        name=f"cost-{report.profile}",
        title=f"Time of a step in {report.profile} ({report.dtype}, {report.threads} "
        f"thread{'s' if report.threads > 1 else ''})",
        caption=f"A step drafts a block for each request and verifies so many tokens, anchors included: medians with "
        f"95 % intervals over repeats.{fit}",
        x=Axis("verify_tokens", "verified tokens of all requests"),
        y=Axis("step_milliseconds", "milliseconds", low=0),
        panels=tuple(panels),
        columns=min(len(panels), 3),
    )


def slug(text: str) -> str:
    """A text as part of a file's name."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


def _point(x: float, measured: Measured, note: str = "") -> Point:
    return Point(x, measured.value, measured.ci95, measured.n, note)


def _milliseconds(interval: tuple[float, float]) -> tuple[float, float]:
    return 1000 * interval[0], 1000 * interval[1]


def _limits(top_k: int, top_p: float) -> str:
    """What else a sampling limits, as part of a name."""
    return (f"-top-k-{top_k}" if top_k else "") + (f"-top-p-{top_p:g}" if top_p < 1 else "")


def _require_points(panels: Iterable[Panel], reason: str) -> None:
    if not any(series.points for panel in panels for series in panel.series if not series.reference):
        raise DataError(reason)
