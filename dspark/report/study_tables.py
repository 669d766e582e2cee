"""A study in columns: a CSV with every number of its charts, and a table for a terminal."""

from __future__ import annotations

from typing import Any

from dspark.evaluation.acceptance import SweepRow
from dspark.io.csvfile import csv_text
from dspark.measured import Measured
from dspark.report.study import StudyReport, StudyVariant
from dspark.report.words import NOTHING, interval, percent

_TRAINING = ("geometry", "parameters", "steps", "seen_tokens")


def study_csv(report: StudyReport) -> str:
    """A row for each variant and temperature; of a sweep for each variant, temperature, domain and threshold.

    A measured number takes four columns: value, both ends of its 95 % interval, and how many prompts (of the speed:
    rounds or prompts) it rests on. What was not measured is empty.
    """
    rows: list[list[object]] = []
    if report.sweep is not None:
        columns = list(SweepRow.__dataclass_fields__)
        for variant in report.variants:
            for row in variant.sweep:
                rows.append([variant.build, *variant.choices.values(), *(row[name] for name in columns)])
        return csv_text(["build", *report.axes, *columns], rows)
    gamma = max(variant.gamma for variant in report.variants)
    measured = ["tau", "against_first", *(f"conditional_{k + 1}" for k in range(gamma)), "speed", "draft_seconds"]
    header = [cell for name in measured for cell in (name, f"{name}_low", f"{name}_high", f"{name}_n")]
    for variant in report.variants:
        for temperature, found in variant.temperatures.items():
            conditional = [*found.conditional, *[None] * (gamma - len(found.conditional))]
            values = [found.tau, found.against_first, *conditional, variant.speed, variant.draft_seconds]
            cells = [cell for value in values for cell in _cells(value)]
            about = [variant.gamma, *_trained(variant)]
            rows.append([variant.build, *variant.choices.values(), temperature, *cells, *about])
    columns = ["build", *report.axes, "temperature", *header, "gamma", *_TRAINING, "training_seconds"]
    return csv_text(columns, rows)


def study_table(report: StudyReport) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows for a terminal; intervals are 95 %, over prompts."""
    return _sweep_table(report) if report.sweep is not None else _variant_table(report)


def _variant_table(report: StudyReport) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    header = (*report.axes, "temperature", "tau", "to the first", "acceptance by position", "speed")
    rows = []
    for variant in report.variants:
        trained = variant.training
        for temperature, found in variant.temperatures.items():
            cells = [
                *variant.choices.values(),
                temperature,
                interval(found.tau),
                percent(found.against_first),
                " ".join(f"{rate.value:.2f}" for rate in found.conditional) or NOTHING,
                interval(variant.speed, 2),
            ]
            if trained is not None:
                cells += [f"{trained.seen_tokens:,}", f"{trained.seconds:.0f} s", f"{trained.parameters:,}"]
            rows.append(tuple(cells))
    return (*header, "tokens seen", "training", "parameters"), rows


def _sweep_table(report: StudyReport) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    header = (*report.axes, "temperature", "domain", "threshold", "verified", "accepted", "rate", "tau")
    return header, [
        (
            *variant.choices.values(),
            f"{row['temperature']:g}",
            row["domain"],
            f"{row['threshold']:g}",
            f"{row['verified_per_cycle']:.2f}",
            f"{row['accepted_per_cycle']:.2f}",
            NOTHING if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.1%}",
            f"{row['tau']:.3f}",
        )
        for variant in report.variants
        for row in variant.sweep
    ]


def _trained(variant: StudyVariant) -> list[Any]:
    trained = variant.training
    return [""] * 5 if trained is None else [*(getattr(trained, name) for name in _TRAINING), trained.seconds]


def _cells(measured: Measured | None) -> list[Any]:
    return [""] * 4 if measured is None else [measured.value, *measured.ci95, measured.n]
