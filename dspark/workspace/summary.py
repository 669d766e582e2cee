"""What a finished run amounts to, from the files of the build: first whether it pays, as its report says it, too."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from dspark.config.models import Build
from dspark.config.stages import BY_NAME
from dspark.evaluation.entry import CertificateEntry
from dspark.evaluation.results import EvaluationMetrics, LosslessReport
from dspark.io.jsonfile import read_model
from dspark.measured import Measured
from dspark.package.verify import read_manifest
from dspark.profiling.cost import CostReport
from dspark.report.verdict import Verdict, verdict
from dspark.workspace.layout import Workspace


class Registered(Protocol):
    """A package in the registry (`registry.receipts.Receipt`)."""

    @property
    def model_name(self) -> str:
        """Name of the registered model."""

    @property
    def version(self) -> str:
        """Its version."""


@dataclass(frozen=True)
class Line:
    """One measured number, or what there is to say instead."""

    name: str
    measured: Measured | None
    text: str = "not measured"

    def __str__(self) -> str:
        return self.text if self.measured is None else str(self.measured)


@dataclass(frozen=True)
class Summary:
    """The result of a run."""

    build: str
    package: str
    package_digest: str
    model_digest: str
    verdict: Verdict
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()  # what the package lacks, why, and what brings it
    model_name: str | None = None
    version: str | None = None

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        value = {key: item for key, item in asdict(self).items() if item is not None and key != "lines"}
        value["measured"] = {
            line.name: line.measured.model_dump(mode="json") if line.measured else line.text for line in self.lines
        }
        return value


def summarise(workspace: Workspace, build: Build, registered: Registered | None) -> Summary:
    """Read the manifest and the evaluation of a build.

    Raises:
        IntegrityError: the package has no sound manifest.
        DataError: the evaluation's files are missing or not this version's.
    """
    package = BY_NAME["package"].output(build.name, {})
    digests = read_manifest(workspace.root / package).digests
    folder = workspace.build(build.name)
    metrics = read_model(folder / "evaluate" / "metrics.json", EvaluationMetrics)
    lossless = read_model(folder / "evaluate" / "lossless.json", LosslessReport)
    entries = [
        read_model(folder / "certify" / f"{profile}.json", CertificateEntry) for profile in build.serving_profiles
    ]
    return Summary(
        build=build.name,
        package=package,
        package_digest=digests.package_digest,
        model_digest=digests.model_digest,
        verdict=verdict(entries, lossless, metrics.throughput, today=datetime.datetime.now(datetime.UTC).date()),
        lines=tuple(_lines(metrics, lossless, entries)),
        notes=tuple(lacking(workspace.root / package, build)),
        model_name=registered.model_name if registered else None,
        version=registered.version if registered else None,
    )


def _lines(metrics: EvaluationMetrics, lossless: LosslessReport, entries: Sequence[CertificateEntry]) -> Iterator[Line]:
    for entry in entries:
        yield Line(f"certified in {entry.profile}", None, _certified(entry))
    for temperature, part in sorted(metrics.temperatures.items()):
        at = f"at temperature {temperature}"
        yield Line(f"tau {at}, mean", part.mean_of_domains.tau if part.mean_of_domains else None)
        for domain, values in part.domains.items():
            yield Line(f"tau {at}, {domain}", values.tau)
        if part.confidence is not None:
            yield Line(f"ECE {at}, before calibration", part.confidence.mean_ece_before)
            yield Line(f"ECE {at}, after calibration", part.confidence.mean_ece_after)
    greedy = lossless.greedy
    yield Line(
        "lossless",
        None,
        f"{lossless.result}: {greedy.tokens} tokens of {greedy.n} prompts, {len(greedy.violations)} violations, "
        f"{greedy.near_tie_prompts} prompts with near-ties",
    )
    for name, arm in metrics.throughput.arms.items() if metrics.throughput is not None else ():
        yield Line(f"tokens/s, {name}", arm.load.tokens_per_second)
        if arm.against_none is not None:
            yield Line(f"speed against plain, {name}", arm.against_none)


def lacking(package: Path, build: Build) -> Iterator[str]:
    """A scheduler and tables that were to be there and are not: nothing else on the screen would say so."""
    for profile in build.serving_profiles:
        path = package / "scheduler" / "cost" / f"{profile}.json"
        cost = read_model(path, CostReport) if path.is_file() else None
        if cost is not None and cost.why_no_curve is not None and build.drafter.confidence:
            yield (
                f"{cost.why_no_curve}; so there is no scheduler and no cost table for engines: on a quiet machine "
                f"raise `repeats` in serving_profiles/{profile}.yaml and run again"
            )


def _certified(entry: CertificateEntry) -> str:
    """Whether the engine does what the evaluation says; where drafts pay, the verdict tells."""
    found = entry.offline_vs_engine
    if found is None:
        return f"{entry.status}: {entry.reason}" if entry.reason else entry.status
    return f"{entry.status}, tau {found.engine_tau.value:.3f} in the engine, {found.offline_tau.value:.3f} offline"
