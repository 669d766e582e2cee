"""The gates of promotion: what a package's own evidence must show (package.md, "Gates").

Reads JSON in the package and nothing else: no tracking server, no model is loaded, nothing is executed. Whatever cannot
be evaluated is a shut gate that says why.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark.config.gates import GatePolicy
from dspark.config.models import ServingProfile
from dspark.errors import IntegrityError
from dspark.evaluation.paired import PairedReport
from dspark.evaluation.results import EvaluationMetrics, LosslessReport
from dspark.io.jsonfile import read_model
from dspark.package.certificate import Certificate
from dspark.package.layout import CERTIFICATE, LOSSLESS, METRICS, PAIRED
from dspark.package.verify import read_manifest, verify
from dspark.registry.gate_report import GateReport, GateRow, Stage
from dspark.registry.gate_rows import Evidence, ece_rows, lossless_row, tau_rows
from dspark.registry.profile_gates import profile_rows


def judge(
    package: Path,
    policy: GatePolicy,
    *,
    champion: str | None,
    baseline: str | None = None,
    profiles: Sequence[ServingProfile],
    stage: Stage = "production",
    fingerprints: Mapping[str, Mapping[str, Any]] | None = None,
    today: datetime.date | None = None,
) -> GateReport:
    """Hold a package against every gate.

    Args:
        package: the candidate's folder.
        policy: `pipeline/gates.yaml`.
        champion: package_digest of whoever holds the stage now; None: nobody, so it is held against no speculation.
        baseline: package_digest that is pinned; None: the one that the policy pins for the build, if any.
        profiles: what it is promoted to; at least one.
        stage: for the report.
        fingerprints: of the machines that serve, by profile; where there is none, the profile's own demands are what a
            certificate is held against.
        today: when it is asked; None: now, UTC.
    Raises:
        IntegrityError: the manifest cannot be read, so that nobody can say what the package is.
    """
    manifest = read_manifest(package)
    pinned = baseline or policy.baselines.get(manifest.build)

    def report(rows: Sequence[GateRow]) -> GateReport:
        return GateReport.of(
            rows,
            build=manifest.build,
            package_digest=manifest.digests.package_digest,
            champion=champion,
            baseline=pinned,
            stage=stage,
        )

    try:
        verify(package, digest=manifest.digests.self_digest)
        evidence = Evidence(
            manifest=manifest,
            metrics=read_model(package / METRICS, EvaluationMetrics, IntegrityError),
            lossless=_optional(package / LOSSLESS, LosslessReport),
            certificate=read_model(package / CERTIFICATE, Certificate, IntegrityError),
            paired=_optional(package / PAIRED, PairedReport),
        )
    except IntegrityError as error:
        # What is not what its manifest says has no evidence: there is nothing to hold the other gates against.
        return report([GateRow(gate="package", verdict="fail", reason=f"{error.message}; nothing else was judged")])
    rows = [GateRow(gate="package", verdict="pass", reason="every file, every digest and every number agree")]
    rows += tau_rows(evidence, policy, champion)
    if pinned is not None:
        rows += tau_rows(evidence, policy, pinned, baseline=True)
    rows += ece_rows(evidence, policy.ece)
    rows.append(lossless_row(evidence.lossless, policy.lossless))
    rows += profile_rows(
        evidence,
        policy,
        champion,
        profiles,
        fingerprints=fingerprints or {},
        today=today or datetime.datetime.now(datetime.UTC).date(),
    )
    return report(rows)


def _optional(path: Path, model: type[Any]) -> Any:
    return read_model(path, model, IntegrityError) if path.is_file() else None
