"""`dspark drift`: what a running server accepts against what its package's certificate says."""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from dspark.config.models import Digest, Name
from dspark.engines.scrape import Scrape, base_of, between, fetch_metrics, parse_scrape, read_metrics
from dspark.errors import ServiceError, SettingsError
from dspark.evaluation.cause import Cause, cause_of
from dspark.evaluation.drift import Drift, Window, judge_drift
from dspark.evaluation.results import EvaluationMetrics, Model
from dspark.measured import Measured
from dspark.package.certificate import Certificate, CertificateEntry
from dspark.package.evidence import certificate_of, metrics_of, records_of
from dspark.package.manifest import Manifest
from dspark.package.staleness import Difference, measured_entry, served_entry
from dspark.package.verify import read_manifest


class DriftReport(Model):
    """`dspark/drift/1`."""

    schema_: Literal["dspark/drift/1"] = Field(default="dspark/drift/1", alias="schema")
    package: Name
    subject: Digest  # the package_digest
    profile: Name
    engine: str
    expired: str | None = None  # until when the certificate held, if that is over
    drift: Drift
    cause: Cause


@dataclass(frozen=True)
class _Engine:
    """What a server says of itself.

    Attributes:
        name: of it and its version.
        fields: in which it is not what was certified; None: it says nothing that could be compared.
        silent: why not.
        gamma: of the blocks that it drafts, if it says so.
    """

    name: str
    entry: CertificateEntry
    fields: tuple[str, ...] | None
    silent: str
    gamma: int | None
    expired: str | None


def check_drift(
    folder: Path,
    metrics: str,
    *,
    since: Path | None = None,
    seconds: float | None = None,
    profile: str | None = None,
    today: datetime.date | None = None,
) -> DriftReport:
    """Compare a server's counters with a package's certificate; the package's other files are not looked at.

    Args:
        folder: the package.
        metrics: address of the server, or a file with what its /metrics answered.
        since: an earlier scrape of the same server; what lies between is judged.
        seconds: scrape twice, so far apart.
        profile: serving profile whose entry is meant; None: the one that is most about this server.
    Raises:
        GateError: nothing was measured in this engine, or on this profile.
        IntegrityError: no package, or a file of it was changed.
        DataError: no metrics of an engine that is known, or two scrapes of two engines.
        SettingsError: both `since` and `seconds`, or `seconds` with a file.
        ServiceError: the server does not answer.
    """
    manifest = read_manifest(folder)
    certificate = certificate_of(folder, manifest)
    remote = "://" in metrics
    if since is not None and seconds is not None:
        raise SettingsError("--since and --seconds are two ways to name one window", "give one of them")
    if seconds is not None and not remote:
        raise SettingsError("--seconds needs the address of a server", "with a file, give an earlier one with --since")
    live, window = _window(metrics, remote, since, seconds)
    if profile is not None:
        certificate = certificate.model_copy(update={"entries": (measured_entry(certificate, profile),)})
    engine = _engine(metrics if remote else None, live.engine, certificate, manifest, today or _today())
    entry = engine.entry
    drift = judge_drift(
        live,
        window,
        entry,
        manifest.drafter.gamma,
        served_gamma=engine.gamma,
        records=records_of(folder, manifest, entry),
    )
    elsewhere = _elsewhere(metrics_of(folder, manifest), entry)
    return DriftReport(
        package=manifest.name,
        subject=manifest.digests.package_digest,
        profile=entry.profile,
        engine=engine.name,
        expired=engine.expired,
        drift=drift,
        cause=cause_of(drift, engine.fields, elsewhere, silent=engine.silent),
    )


def _window(metrics: str, remote: bool, since: Path | None, seconds: float | None) -> tuple[Scrape, Window]:
    earlier = parse_scrape(read_metrics(since), str(since)) if since is not None else None
    took = None
    if seconds is not None:
        earlier, began = parse_scrape(fetch_metrics(metrics), metrics), time.monotonic()
        time.sleep(seconds)
        took = round(time.monotonic() - began, 1)
    live = parse_scrape(fetch_metrics(metrics) if remote else read_metrics(Path(metrics)), metrics)
    kind: Literal["since the server started", "between two scrapes", "since a restart between the scrapes"] = (
        "since the server started"
    )
    if earlier is not None:
        live, restarted = between(earlier, live)
        kind = "since a restart between the scrapes" if restarted else "between two scrapes"
    return live, Window(kind=kind, steps=live.steps, requests=live.requests, tokens=live.tokens, seconds=took)


def _engine(
    address: str | None, name: str, certificate: Certificate, manifest: Manifest, today: datetime.date
) -> _Engine:
    """The entry that is most about the server, and in what the two differ."""
    entry, found = served_entry(certificate, name, {}, today=today)
    silent = "a saved scrape does not say which engine wrote it"
    served, facts = None, {}
    if address is not None:
        from dspark.engines.connect import connect

        silent = f"{name} tells nothing of itself that could be compared"
        try:
            client = connect(base_of(address), name)
            served, facts = client.served(), client.facts()
            entry, found = served_entry(certificate, name, facts, today=today)
        except ServiceError as reason:  # an exporter or a proxy may answer /metrics alone
            silent = f"the engine could not be asked ({reason.message})"
    expired = next((str(one.certified) for one in found if one.field == "holds until"), None)
    fields = [one for one in found if one.field != "holds until"]
    gamma = served.gamma if served is not None else None
    if served is not None and facts:
        fields += _target(manifest, served.target)
    return _Engine(
        name=served.engine if served is not None else name,
        entry=entry,
        fields=tuple(map(str, fields)) if facts else None,
        silent=silent,
        gamma=gamma,
        expired=expired,
    )


def _target(manifest: Manifest, served: str) -> list[Difference]:
    """No server tells digests of its weights; the name of the model is what there is."""
    certified = manifest.inputs.target.public_id.rsplit("/", 1)[-1]
    plain = [name.lower().replace("_", "-") for name in (certified, served)]
    return [] if plain[0] in plain[1] else [Difference("name of the target", certified, served)]


def _elsewhere(metrics: EvaluationMetrics | None, entry: CertificateEntry) -> dict[str, Measured]:
    """tau of the evaluation, over the domains trained on, at other temperatures than the entry's."""
    if metrics is None or entry.workload is None:
        return {}
    certified = f"{entry.workload.sampling.temperature:g}"
    return {
        temperature: found.mean_of_domains.tau
        for temperature, found in metrics.temperatures.items()
        if temperature != certified and found.mean_of_domains is not None
    }


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()
