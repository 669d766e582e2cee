"""Deliver the spool: every event of every run that has ended, in order, each exactly once.

A run is found on the server by the random name of its journal, and how much of it was delivered by a tag that stands
there with it. So nothing depends on a note of ours being written after an answer of the server's: a kill or a lost
answer anywhere means that one event is done again, and each event is such that doing it again changes nothing.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark.errors import DsparkError, IntegrityError
from dspark.io.progress import Progress
from dspark.package.manifest import Manifest
from dspark.package.verify import read_manifest, verify
from dspark.registry.events import Ended, Event, PackageMade, RunStatus, StageEnded, waiting_name
from dspark.registry.lock import locked
from dspark.registry.reach import PATIENCE_SECONDS, AwayError
from dspark.registry.receipts import Receipt, write_receipt
from dspark.registry.register import register, set_candidate, version_of
from dspark.registry.runs import EVENTS_TAG, create_run, find_run, log_event, milliseconds
from dspark.registry.spool import Journal, Spool
from dspark.registry.tracking import Registry, opened

_STEPS_OF_A_PACKAGE = 3  # beside its own
_PAUSE_SECONDS = 0.5
_SYNC = "deliver what waits: dspark registry sync"


@dataclass(frozen=True)
class DeliveredRun:
    """One run that the server knows completely now.

    Attributes:
        run: its id in the workspace.
        build: what it made.
        status: how it ended.
        run_id: its id on the server.
        receipts: of the packages that it registered.
    """

    run: str
    build: str
    status: RunStatus
    run_id: str
    receipts: tuple[Receipt, ...] = ()

    @property
    def registered(self) -> tuple[str, ...]:
        """Its model versions, `name/version`."""
        return tuple(f"{receipt.model_name}/{receipt.version}" for receipt in self.receipts)


@dataclass
class Delivery:
    """What came of a delivery.

    Attributes:
        runs: that were delivered, in order.
        problems: what will not be delivered: packages that are gone or damaged, journals that cannot be read.
    """

    runs: list[DeliveredRun] = field(default_factory=list)
    problems: list[DsparkError] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "schema": "dspark/registry-sync/1",
            "runs": [
                {
                    "run": run.run,
                    "build": run.build,
                    "status": run.status,
                    "mlflow_run": run.run_id,
                    "registered": list(run.registered),
                }
                for run in self.runs
            ],
            "problems": [{"error": problem.message, "hint": problem.hint} for problem in self.problems],
        }


def deliver(
    spool: Spool,
    *,
    workspace: Path,
    tracking_uri: str,
    receipts: Path,
    verified: Collection[str] = (),
    progress: Progress | None = None,
    patience_seconds: float = PATIENCE_SECONDS,
) -> Delivery:
    """Deliver the journals of all runs that have ended and remove them.

    Args:
        workspace: packages are looked for here, and the registry's lock is.
        receipts: folder of the receipts.
        verified: self digests of packages that were verified a moment ago.
        progress: reported to between events, each a safe point.
        patience_seconds: after that long without a step forward the server counts as away.
    Raises:
        AwayError: the server is away; the message says what is pending. All of it is kept.
        PreflightError: there is no room to register a package; what waits is kept.
        ServiceError: the server refused something.
        Interrupted: at a safe point.
    """
    progress = progress or Progress()
    with locked(workspace / "mlflow" / ".lock", progress):
        journals, broken = spool.journals()
        ended = [journal for journal in journals if journal.ended is not None]
        delivery = Delivery(problems=list(broken))
        if not ended:
            return delivery
        courier = _Courier(spool, workspace, receipts, frozenset(verified), progress, delivery)
        last_step = time.monotonic()
        while ended:
            before = courier.done
            steps = sum(len(one.events) + _STEPS_OF_A_PACKAGE * len(one.packages) for one in ended)
            progress.start("publish", steps, unit="events")
            try:
                with opened(tracking_uri, patience_seconds=patience_seconds, again=_SYNC) as registry:
                    while ended:
                        courier.deliver(registry, ended[0])
                        del ended[0]
            except AwayError as error:
                now = time.monotonic()
                # A server that answers, and whose database or object store is away, gets no further each time.
                last_step = now if courier.done > before else last_step
                if now + _PAUSE_SECONDS >= last_step + patience_seconds:
                    raise AwayError(error.message, pending_text(ended)) from error
                progress.advance(0)
                time.sleep(_PAUSE_SECONDS)
    return delivery


def pending_text(journals: Collection[Journal]) -> str:
    """What waits to be delivered, and the command that does it."""
    lines = ["nothing is lost: `dspark registry sync` delivers it, and so does the next run. pending:"]
    for journal in journals:
        packages = "".join(f", package {package.package_digest[:12]}" for package in journal.packages)
        status = journal.ended.status if journal.ended is not None else "under way"
        lines.append(f"  run {journal.started.run} of build {journal.started.build}, {status}{packages}")
    return "\n".join(lines)


class _Courier:
    """Delivers one journal after the other."""

    def __init__(
        self,
        spool: Spool,
        workspace: Path,
        receipts: Path,
        verified: frozenset[str],
        progress: Progress,
        delivery: Delivery,
    ) -> None:
        self.spool = spool
        self.workspace = workspace
        self.receipts = receipts
        self.verified = verified
        self.progress = progress
        self.delivery = delivery
        self.done = 0  # grows with everything new that the server confirmed

    def deliver(self, registry: Registry, journal: Journal) -> None:
        started, ended = journal.started, journal.ended
        written: list[Receipt] = []
        found = find_run(registry, started)
        if found is None and self._was_published(registry, journal, written):
            found = written[-1].run_id, len(journal.events)
        if found is None:
            found = create_run(registry, started), 1
            self.done += 1
        run_id, done = found
        untold, over = 0, False
        for number, event in enumerate(journal.events, start=1):
            if number > done:
                self._event(registry, run_id, journal, event, number, written)
                self.done += 1
            elif isinstance(event, PackageMade) and not written:
                self._receipt_again(registry, event, written)
            untold, over = untold + 1, over or isinstance(event, Ended)
            if over:  # no safe point before: the run would stand there as running
                self.progress.advance(untold)
                untold = 0
        status = ended.status if ended is not None else "KILLED"
        self.spool.remove(journal)
        self.delivery.runs.append(DeliveredRun(started.run, started.build, status, run_id, tuple(written)))

    def _event(
        self, registry: Registry, run_id: str, journal: Journal, event: Event, number: int, written: list[Receipt]
    ) -> None:
        tags, metrics = {EVENTS_TAG: str(number)}, {}
        if isinstance(event, StageEnded):
            name = f"stage.{event.stage}.{event.key}"
            metrics = {f"{name}.{key}": value for key, value in event.metrics.items()}
            tags[f"dspark.{name}"] = event.status
            if event.message:
                tags[f"dspark.{name}.message"] = event.message
        elif isinstance(event, Ended):
            if event.message:
                tags["dspark.message"] = event.message
            if event.exit_code is not None:
                tags["dspark.exit_code"] = str(event.exit_code)
            registry.client.set_terminated(run_id, event.status, milliseconds(event.time))
        elif isinstance(event, PackageMade):
            try:
                receipt = self._register(registry, run_id, journal, event)
            except IntegrityError as reason:
                self.delivery.problems.append(reason)
                tags["dspark.package_absent"] = reason.message
            else:
                written.append(receipt)
                tags["dspark.model_version"] = f"{receipt.model_name}/{receipt.version}"
        # Last, and in one call: with the number all of the event is there.
        log_event(registry, run_id, event.time, metrics, tags)

    def _was_published(self, registry: Registry, journal: Journal, written: list[Receipt]) -> bool:
        """A run that made nothing and whose package the registry has already: it becomes the candidate, that is all."""
        if any(isinstance(event, StageEnded) and event.status != "up to date" for event in journal.events):
            return False
        receipts = [_version_of(registry, event) for event in journal.packages]
        if not receipts or None in receipts:
            return False
        for receipt in receipts:
            if receipt is not None:
                set_candidate(registry, receipt)
                write_receipt(self.receipts, receipt)
                written.append(receipt)
        return True

    def _receipt_again(self, registry: Registry, event: PackageMade, written: list[Receipt]) -> None:
        """The package is registered, but a kill may have come before its receipt."""
        receipt = _version_of(registry, event)
        if receipt is not None:
            write_receipt(self.receipts, receipt)
            written.append(receipt)

    def _register(self, registry: Registry, run_id: str, journal: Journal, event: PackageMade) -> Receipt:
        package, manifest = _found(self.workspace, event)
        if manifest.digests.self_digest not in self.verified:
            verify(package, digest=manifest.digests.self_digest)
        receipt = register(
            registry,
            run_id,
            package,
            manifest,
            journal=journal.started.journal,
            stages=_stages(journal),
            at_milliseconds=milliseconds(event.time),
            progress=self.progress,
        )
        write_receipt(self.receipts, receipt)
        shutil.rmtree(waiting_copy(self.workspace, event), ignore_errors=True)
        return receipt


def _version_of(registry: Registry, event: PackageMade) -> Receipt | None:
    return version_of(registry, event.build, event.package_digest, event.evidence_digest)


def waiting_copy(workspace: Path, event: PackageMade) -> Path:
    """Where a copy of a package lies that waits to be registered while others are made in its place."""
    name = waiting_name(event.package_digest, event.evidence_digest)
    return workspace / ".dspark" / "store" / "waiting" / name


def _found(workspace: Path, event: PackageMade) -> tuple[Path, Manifest]:
    """The package that was to be registered: where it was made, or the copy that was kept of it.

    Raises:
        IntegrityError: neither is that package.
    """
    for folder in (workspace / event.folder, waiting_copy(workspace, event)):
        try:
            manifest = read_manifest(folder)
        except IntegrityError:
            continue
        if manifest.build == event.build and event.names(manifest.digests):
            return folder, manifest
    raise IntegrityError(
        f"{event.folder}: package {event.package_digest} is not there any more and was not registered",
        f"make it again, which registers it: dspark run --build {event.build}",
    )


def _stages(journal: Journal) -> list[dict[str, Any]]:
    return [
        {"stage": event.stage, "key": event.key, "status": event.status}
        for event in journal.events
        if isinstance(event, StageEnded)
    ]
