"""`dspark package smoke`: is a server that has just been started the one that its package's certificate is about?"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field

from dspark.config.models import Digest, Name
from dspark.corpus.prompts import PreparedPrompt, read_prompts
from dspark.decoding.records import RecordSet
from dspark.engines.connect import connect
from dspark.errors import DataError, GateError, ServiceError
from dspark.evaluation.results import Model
from dspark.evaluation.smoke import Smoke, ask, judge_smoke, records_for
from dspark.package.certificate import CertificateEntry
from dspark.package.evidence import certificate_of, listed_file, metrics_of, records_of
from dspark.package.layout import SMOKE
from dspark.package.manifest import Manifest
from dspark.package.staleness import measured_entry, served_entry
from dspark.package.verify import read_manifest

Value = TypeVar("Value")


class SmokeReport(Model):
    """`dspark/smoke/1`."""

    schema_: Literal["dspark/smoke/1"] = Field(default="dspark/smoke/1", alias="schema")
    package: Name
    subject: Digest  # the package_digest
    profile: Name
    engine: str
    fields: tuple[str, ...]  # in which the server is not what was certified; not judged
    smoke: Smoke


def smoke(
    folder: Path, address: str, *, prompts: int = 20, timeout: float = 120.0, profile: str | None = None
) -> SmokeReport:
    """Ask a server some of the evaluated prompts and judge how it drafted, and how fast.

    Others should not use it meanwhile: most engines count for everybody together, and times are an idle server's.

    Args:
        folder: the package.
        address: of a llama.cpp, SGLang or vLLM server.
        prompts: how many, as far as the package has them.
        timeout: seconds until all must have been answered.
        profile: serving profile whose entry is meant; None: the one that is most about this server.
    Raises:
        GateError: nothing was measured in this engine or on this profile, the package has no prompts, or one does not
            fit into the server's context.
        IntegrityError: no package, or a file of it was changed.
        ServiceError: the server does not answer, or not in time.
    """
    manifest = read_manifest(folder)
    chosen = _prompts(folder, manifest)[:prompts]
    return within(timeout, address, lambda: _smoke(folder, manifest, address, chosen, timeout, profile))


def within(seconds: float, address: str, work: Callable[[], Value]) -> Value:
    """What some work comes to, if it does in time: a probe must end, whatever a server does with a connection.

    Raises:
        ServiceError: it does not; and whatever the work raises.
    """
    done: list[Value] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as reason:  # handed on to the caller
            failed.append(reason)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not done:
        raise ServiceError(
            f"{address} has not answered everything within {seconds:g} s",
            "give it longer with --timeout, or fewer prompts with --prompts",
        )
    return done[0]


def _smoke(
    folder: Path, manifest: Manifest, address: str, prompts: list[PreparedPrompt], patience: float, profile: str | None
) -> SmokeReport:
    client = connect(address, patience=patience)
    certificate = certificate_of(folder, manifest)
    if profile is not None:
        certificate = certificate.model_copy(update={"entries": (measured_entry(certificate, profile),)})
    today = datetime.datetime.now(datetime.UTC).date()
    served = client.served()
    entry, found = served_entry(certificate, client.name, client.facts(), today=today)
    gamma = manifest.drafter.gamma
    if served.gamma not in (None, gamma):
        raise GateError(
            f"{served.engine} at {address} drafts blocks of {served.gamma}, the drafter has gamma {gamma}",
            client.how_to_draft,
        )
    records, length = _records(folder, manifest, entry, prompts)
    try:
        answered = ask(client, prompts, length)
    except DataError as reason:
        raise GateError(f"the server is started for shorter requests: {reason.message}", reason.hint) from None
    return SmokeReport(
        package=manifest.name,
        subject=manifest.digests.package_digest,
        profile=entry.profile,
        engine=served.engine,
        fields=tuple(map(str, found)),
        smoke=judge_smoke(answered, prompts, entry, gamma, engine=client.name, records=records),
    )


def _prompts(folder: Path, manifest: Manifest) -> list[PreparedPrompt]:
    path = listed_file(folder, manifest, SMOKE)
    found = read_prompts(path) if path is not None else []
    if not found:
        again = f"assemble it again: dspark run --build {manifest.build}"
        raise GateError(f"{folder} has no prompts to ask ({SMOKE})", again)
    return found


def _records(
    folder: Path, manifest: Manifest, entry: CertificateEntry, prompts: list[PreparedPrompt]
) -> tuple[RecordSet | None, int]:
    """Records of these very prompts, and the length limit to ask with: the evaluation's, else the certificate's."""
    metrics = metrics_of(folder, manifest)
    records = records_for(records_of(folder, manifest, entry), prompts)
    if records is not None and metrics is not None:
        return records, metrics.max_new_tokens
    assert entry.workload is not None  # a measured entry has one
    return None, entry.workload.max_new_tokens
