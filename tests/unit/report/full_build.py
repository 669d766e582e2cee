"""The made-up build of package tests with every table, record and curve in its real format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import fake_build
import numpy as np

from dspark.calibration import ReliabilityRow
from dspark.calibration.results import Calibration, STSResult, write_results
from dspark.decoding.records import Cycles, Decoded, RecordSet, write_records
from dspark.evaluation.acceptance import SweepRow, write_sweep_csv
from dspark.evaluation.results import Pareto, ParetoPoint
from dspark.io.jsonfile import write_model
from dspark.package.sources import Sources

DOMAINS = ("math", "chat", "code")


def sweep(temperature: float, domain: str, kind: str) -> list[SweepRow]:
    return [
        SweepRow(temperature, domain, kind, threshold, 50, 3 - 3 * threshold, 1.5, 0.5, rate, 2.5 - threshold)
        for threshold, rate in ((0.0, 0.5), (0.4, 0.7 if kind == "raw" else 0.75), (0.8, None))
    ]


def points(result: Calibration) -> STSResult:
    rows = tuple(
        ReliabilityRow(result.key, position, when, low / 2, (low + 1) / 2, 40 + low, low / 2 + 0.25, 0.3 + low / 4)
        for position in (1, 2, 3)
        for when in ("before", "after")
        for low in (0, 1)
    )
    return STSResult(result, rows)


def records(temperature: float, accepted: Sequence[int], domains: Sequence[str] = DOMAINS) -> RecordSet:
    """Two prompts of each domain, each with cycles that accept so many of three drafts."""
    taken = np.array(accepted, np.int32)
    count = len(taken)
    cycles = Cycles(
        drafted=np.full((count, 3), 7, np.int32),
        verified=np.full(count, 3, np.int32),
        accepted=taken,
        committed=taken + 1,
        known=np.full(count, 3, np.int32),
        confidence_logits=np.full((count, 3), 1.0, np.float32),
        draft_seconds=np.full(count, 0.1),
        verify_seconds=np.full(count, 0.2),
        rows=np.ones(count, np.int32),
    )
    one = Decoded(4, [5] * (1 + int(taken.sum()) + count), "length", temperature, "fixed", 0.1, cycles)
    names = [(domain, number) for domain in domains for number in range(2)]
    ids = tuple(f"{domain}/{number}" for domain, number in names)
    return RecordSet(ids, tuple(domain for domain, _ in names), (one,) * len(names))


def make(root: Path, *, accepted: Sequence[int] = (1, 2)) -> Sources:
    """Every file that a finished build leaves.

    Args:
        accepted: drafts in the cycles of every prompt.
    """
    made = fake_build.make(root)
    write_results(made.calibrate, [points(result) for result in fake_build.calibration().results])
    rows = [row for t in (0.0, 1.0) for domain in ("math", "chat") for row in sweep(t, domain, "raw")]
    rows += [row for domain in ("math", "chat") for row in sweep(0.0, domain, "calibrated")]
    write_sweep_csv(made.evaluate / "threshold_sweep.csv", rows)
    load = [
        fake_build.load_point(arm, speed, at) for at, speed in ((1, 100.0), (4, 300.0)) for arm in ("none", "fixed")
    ]
    found = tuple(ParetoPoint(**vars(point), on_frontier=True) for point in load)
    write_model(made.evaluate / "pareto.json", Pareto(dtype="float32", threads=1, points=found))
    for temperature in (0.0, 1.0):
        path = made.evaluate / "records" / f"temperature-{temperature:g}.safetensors"
        write_records(path, records(temperature, accepted))
    return made
