"""Everything that a build or a package has on record: each file read once, or the reason why it is not there.

A package has the files of its build, elsewhere. Nothing is measured here and nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from dspark.calibration import CalibrationReport, read_report
from dspark.calibration.results import RELIABILITY, REPORT
from dspark.errors import DsparkError, IntegrityError
from dspark.evaluation.entry import CertificateEntry
from dspark.evaluation.paired import PairedReport
from dspark.evaluation.results import EvaluationMetrics, LosslessReport
from dspark.export.report import ParityReport
from dspark.io.jsonfile import read_model
from dspark.package.layout import LINEAGE
from dspark.package.lineage import Lineage
from dspark.package.manifest import Manifest
from dspark.report.build_plots import AGAIN, Drawn, PlotSources, draw

Value = TypeVar("Value")


@dataclass(frozen=True)
class Files:
    """Where the records of a build or package lie; any of them may be missing.

    Attributes:
        name: of the build or package.
        plots: of its stages.
        parity, lineage: `parity.json` and `lineage.json`.
        manifest: of the package; None: there is none yet.
        package: where the package lies, as a reader may type it.
        target: digest of the target's weights; None: it is not known.
        is_build: it lies in a workspace, where it can be made again.
    """

    name: str
    build: str
    plots: PlotSources
    parity: Path
    lineage: Path
    manifest: Manifest | None = None
    package: str | None = None
    target: str | None = None
    is_build: bool = False


@dataclass(frozen=True)
class Evidence:
    """What is on record.

    Attributes:
        files: where it was read.
        entries: certificates by serving profile, as far as there are some.
        drawn: every figure.
        absent: what is not on record, and why; figures say so themselves.
    """

    files: Files
    metrics: EvaluationMetrics | None
    lossless: LosslessReport | None
    calibration: CalibrationReport | None
    entries: dict[str, CertificateEntry]
    paired: PairedReport | None
    parity: ParityReport | None
    lineage: Lineage | None
    drawn: Drawn
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def nothing(self) -> bool:
        """True if no stage has left anything to tell."""
        return not (self.metrics or self.entries or self.calibration or self.drawn.figures)

    @property
    def digest(self) -> str | None:
        """The package_digest, if there is a package."""
        return self.files.manifest.digests.package_digest if self.files.manifest is not None else None


def package_files(folder: Path, manifest: Manifest, shown: str) -> Files:
    """The files of a package.

    Args:
        folder: that was verified.
        shown: the folder as a reader may type it.
    """
    evidence = folder / "evidence"
    prefix, suffix = "evidence/certify/", ".json"
    profiles = [
        entry.path.removeprefix(prefix).removesuffix(suffix)
        for entry in manifest.files
        if entry.path.startswith(prefix)
    ]
    return Files(
        name=manifest.name,
        build=manifest.build,
        plots=PlotSources(
            evidence / "evaluate",
            folder / "scheduler",
            {name: evidence / "certify" / f"{name}.json" for name in profiles},
            {name: folder / "scheduler" / "cost" / f"{name}.json" for name in profiles},
            folder,
            reliability=evidence / "calibrate" / RELIABILITY,
            train=evidence / "train",
        ),
        parity=evidence / "parity.json",
        lineage=folder / LINEAGE,
        manifest=manifest,
        package=shown,
        target=manifest.inputs.target.weights_digest,
    )


def read_evidence(files: Files) -> Evidence:
    """Read all there is."""
    absent: dict[str, str] = {}
    root = files.plots.root

    def read(name: str, make: Callable[[], Value]) -> Value | None:
        try:
            return make()
        except DsparkError as reason:
            absent[name] = reason.message.replace(f"{root}/", "") if root is not None else reason.message
            return None

    evaluate, calibration = files.plots.evaluate, files.plots.calibrate / REPORT
    entries = {
        profile: read(f"certificate of {profile}", partial(read_model, path, CertificateEntry, hint=AGAIN))
        for profile, path in files.plots.certificates.items()
    }
    against = evaluate / "paired.json"  # written only by builds that name something to measure against
    return Evidence(
        files=files,
        metrics=read("evaluation", lambda: read_model(evaluate / "metrics.json", EvaluationMetrics, hint=AGAIN)),
        lossless=read("losslessness", lambda: read_model(evaluate / "lossless.json", LosslessReport, hint=AGAIN)),
        calibration=read("calibration", lambda: read_report(calibration)),
        entries={profile: entry for profile, entry in entries.items() if entry is not None},
        paired=read("paired comparison", lambda: read_model(against, PairedReport)) if against.is_file() else None,
        parity=read("export parity", lambda: read_model(files.parity, ParityReport, hint=AGAIN)),
        lineage=read("lineage", lambda: read_model(files.lineage, Lineage, IntegrityError, AGAIN)),
        drawn=draw(files.plots),
        absent=absent,
    )
