"""`dspark run`: from a name to a registered package, doing only what is not done yet."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dspark.config.build import ResolvedBuild
from dspark.config.layers import Overlay
from dspark.config.resolve import Pipeline, resolve
from dspark.config.stages import BY_NAME
from dspark.errors import DsparkError, Interrupted, StageError
from dspark.io.atomic import write_if_changed
from dspark.io.disk import disk_errors
from dspark.io.jsonfile import pretty_json
from dspark.registry.address import tracking_address
from dspark.registry.reach import shown
from dspark.workspace import fetch, preflight, shards
from dspark.workspace.dvc import Watcher, invalid_pipeline, prepare_cache, repro_command
from dspark.workspace.ending import set_room_aside, writing_the_end
from dspark.workspace.graph import leading_to, write_all_inputs, write_dag
from dspark.workspace.layout import Workspace
from dspark.workspace.listener import Listener, Outcome
from dspark.workspace.lock import keep_dvc_lock, repair_dvc, run_lock
from dspark.workspace.process import Stopper, check_stop, child_environment, stopping
from dspark.workspace.publisher import Publisher
from dspark.workspace.results import RunRecord, log_path, new_run, write_record
from dspark.workspace.stage import remove_finished
from dspark.workspace.stores import join_store
from dspark.workspace.summary import Registered, Summary, summarise

PACKAGE = BY_NAME["package"].name


@dataclass(frozen=True)
class Request:
    """What the user asked for.

    Args:
        target, build: see `config.resolve`.
        flags: `--set` values.
        environment: variables that may hold settings.
        publish: register the package afterwards, and let the tracking server know of the run.
        tracking_uri: `--tracking-uri`.
        debug: tracebacks.
        overlay: what a verb lays over the build's file.
        verb: the words after `dspark` that asked for it, without build and flags.
    """

    target: str | None = None
    build: str | None = None
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    publish: bool = True
    debug: bool = False
    overlay: Overlay | None = None
    verb: tuple[str, ...] = ("run",)
    tracking_uri: str | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """The words that say where the package goes, without a password."""
        address = ("--tracking-uri", shown(self.tracking_uri)) if self.tracking_uri is not None else ()
        return (*address, *(() if self.publish else ("--no-publish",)))


@dataclass(frozen=True)
class Report:
    """How a run ended."""

    run: str
    build: str
    target: str
    seconds: float
    stages: tuple[Outcome, ...]
    summary: Summary | None

    def as_json(self) -> dict[str, Any]:
        """One JSON document for `--json`."""
        stages = [
            {key: str(value) if isinstance(value, Path) else value for key, value in asdict(outcome).items() if value}
            for outcome in self.stages
        ]
        return {
            "schema": "dspark/run/1",
            "run": self.run,
            "build": self.build,
            "target": self.target,
            "seconds": round(self.seconds, 3),
            "stages": stages,
            "result": self.summary.as_json() if self.summary else None,
        }


def resolve_request(workspace: Workspace, request: Request) -> Pipeline:
    """The builds of the workspace with the asked-for one chosen; nothing is written."""
    return resolve(
        workspace.root,
        target=request.target,
        build=request.build,
        flags=request.flags,
        environment=request.environment,
        overlay=request.overlay,
    )


def run(workspace: Workspace, request: Request, listener: Listener) -> Report:
    """Make the package of a build and register it.

    Raises:
        SettingsError, PreflightError, ServiceError: before anything is changed.
        DsparkError: a stage failed (its own exit code), or publishing did; what there is to tell the tracking server is
            kept for the next run or `dspark registry sync` then.
        Interrupted: stopped at a safe point; the same command goes on from there.
    """
    return make(workspace, request, resolve_request(workspace, request), listener)


def make(
    workspace: Workspace, request: Request, pipeline: Pipeline, listener: Listener, *, goal: str = PACKAGE
) -> Report:
    """Make a stage of the builds that are wanted, and everything it depends on; a package is registered, too.

    Args:
        request: what the user asked for.
        pipeline: what that came to.
        goal: the stage.
    Raises:
        DsparkError, Interrupted: as `run`.
    """
    started = time.monotonic()
    uri = tracking_address(workspace.root, request.tracking_uri, request.environment)
    for resolved in pipeline.wanted:
        preflight.check(workspace, resolved)
    purpose = f"dspark {request.verb[0]} of build {pipeline.chosen.name!r}"
    with stopping(listener.note) as stopper, run_lock(workspace, purpose, listener.note) as lock:
        set_room_aside(workspace)
        folder = new_run(workspace.runs, os.getpid())
        record = RunRecord(
            id=folder.name,
            build=pipeline.chosen.name,
            pid=os.getpid(),
            started=time.time(),
            stages=[instance.name for instance in leading_to(goal, pipeline.wanted)],
            flags=list(request.flags),
            options=list(request.options) if goal == PACKAGE else [],
            verb=list(request.verb),
        )
        write_record(folder, record)
        publisher = Publisher(workspace, uri, listener) if request.publish and goal == PACKAGE else None
        journal = publisher.begin(folder, record) if publisher is not None else None
        stopped: DsparkError | Interrupted | None = None
        try:
            with disk_errors():
                current = _Run(workspace, request, pipeline, goal, journal or listener, stopper, lock, folder)
                current.listener.run_started(record.stages, folder)
                outcomes = current.make()
                receipt = None
                if publisher is not None and journal is not None:
                    receipt = publisher.publish(pipeline.chosen.name, journal)
                report = current.report(outcomes, receipt, started)
            record.state, record.exit_code = "done", 0
            return report
        except (DsparkError, Interrupted) as error:
            record.state = "interrupted" if isinstance(error, Interrupted) else "failed"
            record.exit_code, record.message = error.exit_code, str(error)
            stopped = error
            raise
        finally:
            if record.state == "running":
                record.state, record.message = "failed", "ended by a fault"
            with writing_the_end(workspace, listener):
                try:
                    if publisher is not None and journal is not None and stopped is not None:
                        publisher.failed(journal, stopped)
                    elif journal is not None:
                        journal.end("FAILED", 1, record.message)
                finally:
                    record.finished = time.time()
                    write_record(folder, record)


def prepare(workspace: Workspace, pipeline: Pipeline) -> list[str]:
    """Write what DVC reads: fingerprints, `.dspark/dag.json`, the inputs of every stage; each only if it changed.

    Returns:
        the stages whose inputs changed.
    """
    from dspark.profiling.fingerprint import fingerprint

    profiles = {profile.name: profile for resolved in pipeline.wanted for profile in resolved.profiles}
    for profile in profiles.values():
        found = {"absent": profile.reason} if profile.access == "none" else fingerprint(profile)
        write_if_changed(workspace.fingerprint(profile.name), pretty_json(found))
    join_store(workspace)
    write_dag(workspace, pipeline)
    prepare_cache(workspace)
    return [name for resolved in pipeline.wanted for name in write_all_inputs(workspace, resolved)]


class _Run:
    """One run under way, with the lock held."""

    def __init__(
        self,
        workspace: Workspace,
        request: Request,
        pipeline: Pipeline,
        goal: str,
        listener: Listener,
        stopper: Stopper,
        lock: int,
        folder: Path,
    ) -> None:
        self.workspace = workspace
        self.request = request
        self.pipeline = pipeline
        self.goal = goal
        self.listener = listener
        self.stopper = stopper
        self.lock = lock
        self.folder = folder
        self.environment = child_environment(workspace, folder, debug=request.debug)
        self.planned = leading_to(goal, pipeline.wanted)
        self.targets = [f"{goal}@{resolved.name}" for resolved in pipeline.wanted]

    @property
    def chosen(self) -> ResolvedBuild:
        return self.pipeline.chosen

    def make(self) -> list[Outcome]:
        for line in repair_dvc(self.workspace):
            self.listener.note(line)
        if not fetch.is_current(self.workspace, self.chosen.build.target):
            self._child(fetch.STAGE, self.chosen.build.target.name, fetch.fetch_command(self.chosen.build.target.name))
        check_stop()
        prepare(self.workspace, self.pipeline)
        self._heal_features()
        outcomes = self._reproduce()
        # Features that DVC restored may name shards that are gone since, and damage may show only in the digest.
        failed = _failed(outcomes)
        if failed is not None and shards.reads(failed.name) and self._heal_features(deep=True):
            outcomes = self._reproduce()
        self._raise_failure(outcomes)
        remove_finished(self.workspace)
        keep_dvc_lock(self.workspace)
        return outcomes

    def report(self, outcomes: list[Outcome], receipt: Registered | None, started: float) -> Report:
        summary = summarise(self.workspace, self.chosen.build, receipt) if self.goal == PACKAGE else None
        return Report(
            run=self.folder.name,
            build=self.chosen.name,
            target=self.chosen.build.target.name,
            seconds=time.monotonic() - started,
            stages=tuple(outcomes),
            summary=summary,
        )

    def _reproduce(self) -> list[Outcome]:
        """`dvc repro` of what is wanted; how every stage ended."""
        watcher = Watcher(self.folder, [instance.name for instance in self.planned], self.listener)
        try:
            code = self.stopper.run(
                repro_command(self.targets),
                workspace=self.workspace,
                environment=self.environment,
                log=self.folder / "dvc.log",
                keep_open=(self.lock,),
                tick=watcher.tick,
            )
        except Interrupted:
            watcher.finish("interrupted")
            raise
        outcomes = watcher.finish("ran" if code == 0 else "failed")
        if code and _failed(outcomes) is None:  # DVC itself failed
            outcomes.append(Outcome("dvc", "failed", None, *_dvc_error(self.folder / "dvc.log")))
        return outcomes

    def _raise_failure(self, outcomes: list[Outcome]) -> None:
        failed = _failed(outcomes)
        if failed is None:
            return
        if failed.status == "interrupted":
            raise Interrupted(f"stage {failed.name} was stopped")
        log = f"log: {_short(failed.log or self.folder / 'dvc.log', self.workspace)}"
        error = StageError(f"stage {failed.name}: {failed.message}", f"{failed.hint}\n{log}" if failed.hint else log)
        error.exit_code = failed.exit_code or StageError.exit_code
        raise error

    def _heal_features(self, *, deep: bool = False) -> bool:
        """Make feature shards again that are missing from the store or damaged, if a stage that reads them is to run.

        Args:
            deep: a stage missed some: compare digests too, which reads every byte.
        Returns:
            True if some were made.
        """
        missing = shards.damaged(self.workspace, self.planned, deep=deep)
        if not missing:
            return False
        found = f"{len(missing)} feature shards are missing or damaged"
        if not deep and not shards.are_read(self.workspace, self.targets):
            self.listener.note(f"{found}; nothing that reads them is to be made")
            return False
        self.listener.note(f"{found}: making them again")
        shards.remove(self.workspace, missing)
        instance = next(item for item in self.planned if item.stage.name == "features")
        script = f"stages/{instance.stage.script}.py"
        self._child(instance.stage.name, instance.key, [sys.executable, "-P", script, instance.key])
        return True

    def _child(self, stage: str, key: str, command: list[str]) -> None:
        """Run one step outside DVC, shown like a stage.

        Raises:
            DsparkError: as the child reported, with its exit code.
        """
        name = f"{stage}@{key}"
        watcher = Watcher(self.folder, [name], self.listener)
        watcher.follow(name)
        try:
            self.stopper.run(
                command,
                workspace=self.workspace,
                environment=self.environment,
                log=log_path(self.folder, stage, key),
                keep_open=(self.lock,),
                tick=watcher.tick,
            )
        except Interrupted:
            watcher.finish("interrupted")
            raise
        self._raise_failure(watcher.finish("failed"))


def _failed(outcomes: list[Outcome]) -> Outcome | None:
    return next((outcome for outcome in outcomes if outcome.status in ("failed", "interrupted")), None)


def _dvc_error(log: Path) -> tuple[str, str, int]:
    """Message, hint and exit code of a failure of DVC itself, from the end of its log."""
    said = log.read_text(encoding="utf-8", errors="replace")
    if invalid := invalid_pipeline(said):
        return invalid.message, invalid.hint, invalid.exit_code
    lines = [line for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    message = errors[-1] if errors else (lines[-1] if lines else "DVC said nothing")
    return message, "dspark doctor", StageError.exit_code


def _short(path: Path, workspace: Workspace) -> str:
    return path.relative_to(workspace.root).as_posix() if path.is_relative_to(workspace.root) else str(path)
