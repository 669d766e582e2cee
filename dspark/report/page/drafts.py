"""How far drafts get, whether confidences mean what they say, and how training went."""

from __future__ import annotations

from collections.abc import Iterator

from dspark.calibration import Assessment, CalibrationReport
from dspark.evaluation.results import EvaluationMetrics
from dspark.report.page.charts import charts
from dspark.report.page.evidence import Evidence
from dspark.report.page.model import Block, Items, Missing, Section, Table
from dspark.report.words import NOTHING, count, interval

_POSITION = ("position", "blocks", "ECE before", "ECE after", "change", "AUROC after", "Brier before", "Brier after",
             "n")  # fmt: skip


def acceptance(evidence: Evidence) -> Section:
    """tau by domain and acceptance by position."""
    blocks: list[Block] = [*charts(evidence.drawn, "tau")]
    metrics = evidence.metrics
    if metrics is not None:
        blocks.append(_tau(metrics))
        blocks += charts(evidence.drawn, "acceptance")
        blocks += [Missing(name, reason) for name, reason in _absences(metrics)]
    else:
        blocks.append(Missing("evaluation", evidence.absent["evaluation"]))
    return Section("acceptance", "How far drafts get", tuple(blocks))


def confidence(evidence: Evidence) -> Section:
    """Calibration before and after, and what a threshold would do."""
    blocks: list[Block] = [*charts(evidence.drawn, "reliability")]
    report = evidence.calibration
    if report is None:
        blocks.append(Missing("calibration", evidence.absent["calibration"]))
    elif report.absent is not None:
        blocks.append(Missing("calibration", f"{report.absent}: whole blocks, or fixed parts of them, are verified"))
    else:
        blocks += _calibration(report, evidence.metrics)
    blocks += charts(evidence.drawn, "threshold")
    return Section("confidence", "Do confidences mean what they say?", tuple(blocks))


def training(evidence: Evidence) -> Section:
    """Loss and the dev split."""
    return Section("training", "Training", tuple(charts(evidence.drawn, "training")))


def _tau(metrics: EvaluationMetrics) -> Table:
    rows: list[tuple[str, ...]] = []
    for temperature, found in metrics.temperatures.items():
        at = f"{temperature} ({found.label.replace('_', ' ')}, {found.dtype})"
        for name, domain in found.domains.items():
            trained = "yes" if domain.role == "training" else "no"
            rate = interval(domain.acceptance_rate)
            rows.append((at, name, trained, interval(domain.tau), count(domain.tau), rate, str(domain.cycles)))
        if found.mean_of_domains is not None:
            mean = found.mean_of_domains.tau
            rows.append((at, "mean of those trained on", "yes", interval(mean), count(mean), NOTHING, NOTHING))
    return Table(
        "Tokens per cycle",
        ("temperature", "domain", "trained on", "tau", "n prompts", "accepted / verified", "cycles"),
        tuple(rows),
        f"gamma {metrics.gamma}, whole blocks verified, replies of up to {metrics.max_new_tokens} tokens, seed "
        f"{metrics.seed}. tau includes the bonus token. Brackets are 95 % intervals over prompts.",
    )


def _absences(metrics: EvaluationMetrics) -> Iterator[tuple[str, str]]:
    yield from metrics.absent.items()
    for temperature, found in metrics.temperatures.items():
        for name, reason in found.absent.items():
            yield f"temperature {temperature}, {name}", reason
        for domain, measured in found.domains.items():
            for name, reason in measured.absent.items():
                yield f"temperature {temperature}, {domain}, {name}", reason


def _expectations(metrics: EvaluationMetrics) -> Table:
    rows = [
        (temperature, name, interval(one.tau), interval(one.measured), f"{one.error.value:+.1%}", count(one.error))
        for temperature, found in metrics.temperatures.items()
        for name, domain in found.domains.items()
        if (one := domain.expectation) is not None
    ]
    return Table(
        "Tokens per cycle that confidences promise",
        ("temperature", "domain", "promised", "came", "off by", "n"),
        tuple(rows),
        "1 + the sum of calibrated survival, over cycles whose whole block was judged. A scheduler spends time on it.",
    )


def _calibration(report: CalibrationReport, metrics: EvaluationMetrics | None) -> Iterator[Block]:
    rows = []
    for result in report.results:
        rows.append((f"held-out conversations, {result.key}", *_errors(result.held_out)))
    for temperature, found in metrics.temperatures.items() if metrics is not None else ():
        if found.confidence is not None:
            rows.append((f"evaluation, temperature {temperature}", *_errors(found.confidence)))
    yield Table(
        "Expected calibration error of prefix survival, mean over positions",
        ("records", "before", "after", "change", "n conversations"),
        tuple(rows),
        "None of these records was fitted on. The change is paired; below 0 is better.",
    )
    if metrics is not None:
        yield _expectations(metrics)
    for result in report.results:
        yield Table(
            f"By position, {result.key}",
            _POSITION,
            tuple(
                (
                    str(one.position),
                    str(one.samples),
                    interval(one.ece_before),
                    interval(one.ece_after),
                    interval(one.ece_change),
                    interval(one.auroc_after),
                    interval(one.brier_before),
                    interval(one.brier_after),
                    count(one.ece_before),
                )
                for one in result.held_out.positions
            ),
            f"Temperatures by position: {', '.join(f'{value:.3g}' for value in result.temperatures)}.",
        )
        if result.warnings:
            yield Items(result.warnings)


def _errors(found: Assessment) -> tuple[str, str, str, str]:
    before, after = found.mean_ece_before, found.mean_ece_after
    return interval(before, 4), interval(after, 4), interval(found.mean_ece_change, 4), count(before)
