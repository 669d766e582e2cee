"""Publishing as a part of a run: what it has to tell is written down, then delivered together with what waits."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from dspark.config.stages import BY_NAME
from dspark.errors import DsparkError, IntegrityError, Interrupted, PreflightError
from dspark.io.atomic import replace_tree
from dspark.package.verify import read_manifest, verify
from dspark.registry.delivery import Delivery, deliver, pending_text, waiting_copy
from dspark.registry.publish import delivered_receipt, package_to_publish, spool_of
from dspark.registry.reach import PATIENCE_SECONDS, AwayError, shown
from dspark.registry.receipts import Receipt, known_receipt
from dspark.registry.spool import Journal
from dspark.workspace.journal import RunJournal, close_orphans
from dspark.workspace.layout import Workspace
from dspark.workspace.listener import ListenedProgress, Listener
from dspark.workspace.results import RunRecord


class Publisher:
    """What a run does about the tracking server. Until `publish` or `failed` no connection is opened.

    Args:
        workspace: the workspace; its run lock is held.
        uri: address of the tracking server.
        listener: told what happens.
    """

    def __init__(self, workspace: Workspace, uri: str, listener: Listener) -> None:
        self._workspace = workspace
        self._uri = uri
        self._listener = listener
        self._spool = spool_of(workspace.root)
        self._receipts = workspace.state / "receipts"

    def begin(self, run: Path, record: RunRecord) -> RunJournal:
        """Tidy up after runs that were killed, and begin to listen."""
        for journal in close_orphans(self._workspace, self._spool):
            self._listener.note(f"run {journal.started.run} was killed: noted for the tracking server")
        for journal in self._spool.journals()[0]:
            self._keep_packages(journal)
        return RunJournal(self._workspace, self._spool, run, record, self._listener)

    def publish(self, build: str, journal: RunJournal) -> Receipt:
        """End the run's journal, register the package unless the last receipt names it, and deliver what waits.

        With nothing to tell this loads no mlflow.

        Raises:
            IntegrityError: the package is not what its manifest says: the run has failed.
            AwayError: the server is away; everything is kept.
            DsparkError: as `registry.delivery.deliver`.
            Interrupted: at a safe point.
        """
        place = BY_NAME["package"].output(build, {})
        package = self._workspace.root / place
        manifest = read_manifest(package)
        digests = manifest.digests
        receipt = known_receipt(self._receipts, build, digests, shown(self._uri))
        new = receipt is None and not self._spool.awaits(build, digests)
        if receipt is None:
            verify(package, digest=digests.self_digest)
        journal.end("FINISHED", 0)
        if new:
            journal.package(package_to_publish(package, manifest, self._workspace.root))
        if not self._spool.folders():
            return delivered_receipt(Delivery(), self._receipts, manifest, self._uri)
        try:
            delivery = self._deliver((digests.self_digest,) if receipt is None else ())
        except AwayError as error:
            if receipt is not None:  # this run has nothing of its own that waits
                self._listener.note(f"{error.message}\n{error.hint}")
                return receipt
            raise AwayError(f"{place} is made and verified, but not registered: {error.message}", error.hint) from error
        except PreflightError as error:  # no room
            if receipt is not None:
                raise
            told = f"{place} is made and verified, but not registered: {error.message}"
            raise PreflightError(told, error.hint) from error
        for problem in delivery.problems:
            self._listener.note(f"{problem.message}\n{problem.hint}")
        return delivered_receipt(delivery, self._receipts, manifest, self._uri)

    def failed(self, journal: RunJournal, error: DsparkError | Interrupted) -> None:
        """A run that does not come to its end: tell the server that it failed, without a word if that is not possible.

        One that was stopped shall stop: the next run or `dspark registry sync` tells of it.
        """
        if isinstance(error, Interrupted):
            journal.end("KILLED", error.exit_code, str(error))
            return
        if not journal.end("FAILED", error.exit_code, error.message) or not journal.begun:
            return
        try:
            self._deliver()
        except DsparkError as reason:
            waiting = [one for one in self._spool.journals()[0] if one.ended is not None]
            self._listener.note(f"{reason.message}\n{pending_text(waiting)}")

    def _deliver(self, verified: tuple[str, ...] = ()) -> Delivery:
        progress = ListenedProgress(self._listener, "publish")
        started = time.monotonic()
        delivery = deliver(
            self._spool,
            workspace=self._workspace.root,
            tracking_uri=self._uri,
            receipts=self._receipts,
            verified=verified,
            progress=progress,
            patience_seconds=PATIENCE_SECONDS,
        )
        progress.end(time.monotonic() - started)
        return delivery

    def _keep_packages(self, journal: Journal) -> None:
        """Copy packages that wait to be registered: this run may make others in their place."""
        for event in journal.packages:
            package, copy = self._workspace.root / event.folder, waiting_copy(self._workspace.root, event)
            if copy.exists():
                continue
            try:
                if not event.names(read_manifest(package).digests):
                    continue
            except IntegrityError:
                continue
            unfinished = copy.with_name(f".{copy.name}.part")
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.copytree(package, unfinished)
            replace_tree(unfinished, copy)


def sync(workspace: Workspace, uri: str, listener: Listener) -> Delivery:
    """`dspark registry sync`: close the journals of killed runs and deliver everything that waits.

    Raises:
        DsparkError: as `registry.delivery.deliver`.
        Interrupted: at a safe point.
    """
    spool = spool_of(workspace.root)
    close_orphans(workspace, spool)
    progress = ListenedProgress(listener, "publish")
    started = time.monotonic()
    delivery = deliver(
        spool, workspace=workspace.root, tracking_uri=uri, receipts=workspace.state / "receipts", progress=progress
    )
    progress.end(time.monotonic() - started)
    return delivery
