"""A study: what evaluation measured of every variant, side by side, from files alone.

Acceptance comes from the records of the decoding loop on the eval prompts, never from training's view of the dev split.
All variants decoded the same prompts, so differences between them are taken prompt by prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from dspark.config.models import Name
from dspark.config.studies import Study, Variant
from dspark.decoding.records import RecordSet, read_records
from dspark.errors import DataError
from dspark.evaluation.acceptance import measure_acceptance, read_sweep_csv
from dspark.evaluation.paired import Counts, relative_difference
from dspark.evaluation.results import EvaluationMetrics, Model
from dspark.io.jsonfile import read_model
from dspark.measured import Measured
from dspark.training.metrics import TrainMetrics, training_seconds

DRAFTED = "torch fixed"  # the arm of the throughput comparison that every drafter has
_AGAIN = "make it again: dspark evaluate --study NAME --build NAME"


# ---------------------------------------------------------------- what is compared


class VariantAcceptance(Model):
    """At one temperature, on the domains that were trained on; intervals over prompts."""

    includes_bonus: Literal[True] = True
    tau: Measured  # unweighted mean of the domains
    conditional: tuple[Measured, ...]  # position k given those before it, all prompts pooled
    # Pooled tau / pooled tau of the study's first variant - 1, prompts paired; absent for that one itself.
    against_first: Measured | None = None


class VariantTraining(Model):
    """What it took to make a drafter."""

    geometry: str
    parameters: int  # that were trained
    steps: int
    seen_tokens: int  # of the sequences of all steps, as often as they came
    seconds: float


class StudyVariant(Model):
    """One build of a study."""

    build: Name
    choices: dict[str, str]  # label on each axis
    gamma: int
    temperatures: dict[str, VariantAcceptance]
    training: VariantTraining | None = None  # absent where nothing varies: it may be an imported drafter's build
    draft_seconds: Measured | None = None  # of a block, in torch, one request; includes taking up features
    speed: Measured | None = None  # tokens per second against no drafts, whole blocks drafted in torch
    sweep: tuple[dict[str, Any], ...] = ()  # rows of `threshold_sweep.csv`, if the study is about them
    absent: dict[str, str] = Field(default_factory=dict)


class StudyReport(Model):
    """`studies/<build>/<study>/study.json`."""

    schema_: Literal["dspark/study/1"] = Field(default="dspark/study/1", alias="schema")
    study: Name
    description: str
    target: Name
    build: Name  # that the variants are made from
    axes: tuple[str, ...]
    sweep: Literal["threshold"] | None = None
    domains: tuple[Name, ...]  # that were trained on
    variants: tuple[StudyVariant, ...]

    @property
    def temperatures(self) -> tuple[str, ...]:
        """Of the target, ascending."""
        return tuple(sorted({key for variant in self.variants for key in variant.temperatures}, key=float))


# ---------------------------------------------------------------- collecting


def collect(study: Study, builds: Path) -> StudyReport:
    """What `train` and `evaluate` left of every variant.

    Args:
        study: its builds are made.
        builds: the folder of all builds.
    Raises:
        DataError: a file is missing or damaged, variants decoded different prompts, or there is nothing to compare.
    """
    chosen = study.pipeline.chosen.build
    domains = chosen.corpus.domains
    first: dict[str, RecordSet] = {}
    variants = []
    for variant in study.variants:
        folder = builds / variant.name
        metrics = read_model(folder / "evaluate" / "metrics.json", EvaluationMetrics, DataError, _AGAIN)
        records = _records(folder / "evaluate", metrics, domains)
        first = first or records
        variants.append(_variant(study, variant, folder, metrics, records, first))
    report = StudyReport(
        study=study.spec.name,
        description=study.spec.description,
        target=chosen.target.name,
        build=chosen.name,
        axes=tuple(axis.name for axis in study.spec.axes),
        sweep="threshold" if study.spec.sweep == "threshold" else None,
        domains=domains,
        variants=tuple(variants),
    )
    if not report.temperatures:
        raise DataError(
            f"study {study.spec.name}: no variant drafted anything on {', '.join(domains)}",
            "the answers end with their first token: give the corpus other prompts, or evaluation longer answers",
        )
    return report


def _records(evaluate: Path, metrics: EvaluationMetrics, domains: Sequence[str]) -> dict[str, RecordSet]:
    """By temperature, the prompts of the domains that were trained on."""
    found = {}
    for temperature in metrics.temperatures:
        records = read_records(evaluate / "records" / f"temperature-{temperature}.safetensors")
        found[temperature] = records.only([i for i, domain in enumerate(records.domains) if domain in domains])
    return found


def _variant(
    study: Study,
    variant: Variant,
    folder: Path,
    metrics: EvaluationMetrics,
    records: dict[str, RecordSet],
    first: dict[str, RecordSet],
) -> StudyVariant:
    acceptance: dict[str, VariantAcceptance] = {}
    absent: dict[str, str] = {}
    for temperature, found in metrics.temperatures.items():
        if found.mean_of_domains is None:
            absent[f"temperature {temperature}"] = found.absent.get("mean_of_domains", "there was no cycle")
            continue
        mine = records[temperature]
        acceptance[temperature] = VariantAcceptance(
            tau=found.mean_of_domains.tau,
            conditional=measure_acceptance(mine.decoded, seed=metrics.seed).conditional,
            against_first=None if records is first else _difference(mine, first.get(temperature), metrics.seed),
        )
    arm = metrics.throughput.arms.get(DRAFTED) if metrics.throughput is not None else None
    if arm is None:
        absent["speed"] = "throughput was not measured"
    return StudyVariant(
        build=variant.name,
        choices=variant.choices,
        gamma=metrics.gamma,
        temperatures=acceptance,
        training=_trained(folder / "train") if study.spec.vary else None,
        draft_seconds=arm.cycle.draft_seconds if arm is not None and arm.cycle is not None else None,
        speed=arm.against_none if arm is not None else None,
        sweep=tuple(_sweep(folder / "evaluate", study, variant)) if study.spec.sweep else (),
        absent=absent,
    )


def _trained(train: Path) -> VariantTraining:
    metrics = read_model(train / "metrics.json", TrainMetrics, DataError, _AGAIN)
    return VariantTraining(
        geometry=metrics.geometry,
        parameters=metrics.trainable_parameters,
        steps=metrics.steps,
        seen_tokens=metrics.seen_tokens,
        seconds=training_seconds(train / "curves.csv"),
    )


def _difference(mine: RecordSet, first: RecordSet | None, seed: int) -> Measured | None:
    if first is None:
        return None
    if mine.ids != first.ids:
        raise DataError("variants of a study decoded different prompts", _AGAIN)
    return relative_difference(_counts(mine), _counts(first), seed=seed)


def _counts(records: RecordSet) -> Counts:
    committed = [float(one.cycles.committed.sum()) for one in records.decoded]
    return np.array(committed), np.array([float(len(one.cycles)) for one in records.decoded])


def _sweep(evaluate: Path, study: Study, variant: Variant) -> Iterator[dict[str, Any]]:
    """The rows of the domains that were trained on, of calibrated confidences where there are some.

    Raises:
        DataError: the drafter states no confidence.
    """
    domains = study.pipeline.chosen.build.corpus.domains
    rows = [row for row in read_sweep_csv(evaluate / "threshold_sweep.csv") if row.domain in domains]
    if not rows:
        raise DataError(
            f"build {variant.name}: the drafter has no confidence head, so no threshold cuts its blocks",
            "name a build whose drafter has one (recipe dspark): --build NAME",
        )
    calibrated = {row.temperature for row in rows if row.confidence == "calibrated"}
    for row in rows:
        if row.confidence == ("calibrated" if row.temperature in calibrated else "raw"):
            yield asdict(row)
