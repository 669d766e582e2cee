"""A load study in columns and charts: CSV with every number, SVG, and tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from dspark.evaluation.load_report import AgainstBest, LoadReport
from dspark.io.csvfile import csv_text
from dspark.measured import Measured
from dspark.report.chart import Axis, Figure, Panel, Point, Series
from dspark.report.drawing import render
from dspark.report.plots import budget_figure, pareto_figure

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]

_NOTHING = "–"
_PARTS = ("p50", "p95", "p99")


# ---------------------------------------------------------------- files


def load_texts(report: LoadReport) -> dict[str, str]:
    """File names and texts: `study.csv`, `gains.csv`, `predictions.csv` and the charts."""
    return {
        "study.csv": _study_csv(report),
        "gains.csv": _gains_csv(report),
        "predictions.csv": _predictions_csv(report),
        **{f"{figure.name}.svg": render(figure) for figure in load_figures(report)},
    }


def load_figures(report: LoadReport) -> Iterator[Figure]:
    """Throughput against speed per user, verified drafts against load, predicted against measured throughput."""
    points = {f"{report.build}, reference engine": [arm.load for one in report.loads for arm in one.arms.values()]}
    yield pareto_figure(points)
    yield budget_figure(points)
    yield _prediction_figure(report)


def _study_csv(report: LoadReport) -> str:
    measured = ["tokens_per_second", "tokens_per_second_per_user", "against_none", "against_best"]
    columns = ["concurrency", "arm", "policy", *(cell for name in measured for cell in _columns(name)), "best"]
    columns += ["verified_tokens_per_request", "tau", "draft_seconds", "verify_seconds", "same_text"]
    columns += [f"{kind}_{part}_seconds" for kind in ("ttft", "itl") for part in _PARTS]
    best = {(one.concurrency, one.arm): one for one in report.against_best}
    rows: list[list[object]] = []
    for one in report.loads:
        for name, arm in one.arms.items():
            load, cycle, judged = arm.load, arm.cycle, best.get((arm.load.concurrency, name))
            values = [load.tokens_per_second, load.tokens_per_second_per_user, arm.against_none]
            values.append(judged.ratio if judged is not None else None)
            quantiles = [getattr(found, part) for found in (load.ttft_seconds, load.itl_seconds) for part in _PARTS]
            rows.append(
                [
                    load.concurrency,
                    name,
                    load.policy,
                    *(cell for value in values for cell in _cells(value)),
                    judged.best if judged is not None else None,
                    load.verified_tokens_per_request,
                    cycle.tau if cycle is not None else None,
                    cycle.draft_seconds.value if cycle is not None else None,
                    cycle.verify_seconds.value if cycle is not None else None,
                    arm.same_text,
                    *quantiles,
                ]
            )
    return csv_text(columns, rows)


def _gains_csv(report: LoadReport) -> str:
    columns = ["form", "arm", "against", "concurrency", "level", "value", *_columns("ratio"), "at_least", "reason"]
    return csv_text(
        columns,
        [
            [one.form, one.arm, one.against, one.concurrency, one.level, one.value, *_cells(one.ratio), one.at_least,
             one.reason]
            for one in report.gains
        ],
    )  # fmt: skip


def _predictions_csv(report: LoadReport) -> str:
    measured = ["tokens_per_second", "latency_per_token_seconds"]
    columns = ["concurrency", "arm", *(f"predicted_{name}" for name in ("tau", *measured)), "tau"]
    columns += [*(cell for name in measured for cell in _columns(name))]
    columns += ["tokens_per_second_error", "latency_per_token_error"]
    return csv_text(
        columns,
        [
            [
                one.concurrency,
                one.arm,
                one.predicted.tau,
                one.predicted.tokens_per_second,
                one.predicted.latency_per_token_seconds,
                one.tau,
                *_cells(one.tokens_per_second),
                *_cells(one.latency_per_token_seconds),
                one.tokens_per_second_error,
                one.latency_per_token_error,
            ]
            for one in report.compared
        ],
    )


def _prediction_figure(report: LoadReport) -> Figure:
    panels = []
    for name in dict.fromkeys(one.arm for one in report.compared):
        mine = [one for one in report.compared if one.arm == name]
        measured = tuple(
            Point(one.concurrency, one.tokens_per_second.value, one.tokens_per_second.ci95, one.tokens_per_second.n)
            for one in mine
        )
        predicted = tuple(Point(one.concurrency, one.predicted.tokens_per_second) for one in mine)
        panels.append(Panel(name, (Series("measured", measured), Series("predicted", predicted))))
    return Figure(
        name="predicted",
        title="Throughput as predicted before it was measured",
        caption=f"Tokens per second of all requests after everybody's first token. Predicted from other prompts' "
        f"records and from step times; the median of the errors is "
        f"{report.median_tokens_per_second_error:.1%} over {len(report.compared)} points. Bars are 95 % intervals.",
        x=Axis("requests", "concurrent requests", kind="values"),
        y=Axis("tokens_per_second", "tokens/s of all users", low=0),
        panels=tuple(panels),
        columns=min(len(panels), 3),
    )


# ---------------------------------------------------------------- a terminal


def load_table(report: LoadReport) -> Table:
    """A row for each load and policy."""
    header = ("requests", "policy", "tokens/s", "of one user", "verified", "to none", "to the best fixed or none")
    best = {(one.concurrency, one.arm): one for one in report.against_best}
    rows: list[tuple[str, ...]] = []
    for one in report.loads:
        for name, arm in one.arms.items():
            judged = best.get((arm.load.concurrency, name))
            rows.append(
                (
                    str(arm.load.concurrency),
                    name,
                    _shown(arm.load.tokens_per_second),
                    _shown(arm.load.tokens_per_second_per_user),
                    f"{arm.load.verified_tokens_per_request:.2f}",
                    _shown(arm.against_none),
                    _NOTHING if judged is None else _judged(judged),
                )
            )
    return header, rows


def gains_table(report: LoadReport) -> Table:
    """The paper's two forms, for what is chosen by confidence; all others are in `gains.csv`."""
    chosen = {one.arm for one in report.against_best}
    header = ("policy", "against", "at", "throughput at that speed", "speed at that throughput")
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for one in report.gains:
        if one.arm in chosen:
            at = f"{one.level:.3g} tokens/s" if one.concurrency is None else f"its {one.concurrency} requests"
            shown = _shown(one.ratio) if one.ratio is not None else one.reason or _NOTHING
            rows.setdefault((one.arm, one.against, at), {})[one.form] = f">= {shown}" if one.at_least else shown
    forms = ("throughput_at_sla", "speed_at_matched_throughput")
    return header, [(*place, *(found.get(form, _NOTHING) for form in forms)) for place, found in rows.items()]


def prediction_table(report: LoadReport) -> Table:
    """Every prediction beside what was measured."""
    compared = ("predicted", "measured", "off by")
    header = ("requests", "policy", *(f"{unit} {kind}" for unit in ("tokens/s", "s/token") for kind in compared))
    return header, [
        (
            str(one.concurrency),
            one.arm,
            f"{one.predicted.tokens_per_second:.3g}",
            _shown(one.tokens_per_second),
            f"{one.tokens_per_second_error:+.1%}",
            f"{one.predicted.latency_per_token_seconds:.3g}",
            _shown(one.latency_per_token_seconds),
            f"{one.latency_per_token_error:+.1%}",
        )
        for one in report.compared
    ]


def _columns(name: str) -> list[str]:
    return [name, f"{name}_low", f"{name}_high"]


def _cells(measured: Measured | None) -> list[object]:
    return [None] * 3 if measured is None else [measured.value, *measured.ci95]


def _judged(one: AgainstBest) -> str:
    return f"{_shown(one.ratio) if one.ratio is not None else 'too few rounds to judge'} ({one.best})"


def _shown(measured: Measured | None) -> str:
    if measured is None:
        return _NOTHING
    return f"{measured.value:.3g} [{measured.ci95[0]:.3g}, {measured.ci95[1]:.3g}]"
