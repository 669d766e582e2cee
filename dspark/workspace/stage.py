"""What every stage script shares: `@stage("train")` turns `main(inputs, paths, progress)` into a command.

The stage works in `.dspark/work/<stage>/<input digest>/`: `paths.work` survives kills and is taken up again by a run
with the same inputs; `paths.out` becomes the stage's output by one rename when `main` returns. DVC deletes outputs
before it runs a command and records them after it, so a copy of a finished output is kept until it is recorded: a
kill in between costs nothing.

Under torchrun or `accelerate launch` every process runs `main`; the one of rank 0 does everything else, and only what
it writes counts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from dspark.config.stages import BY_NAME, Stage
from dspark.device import VARIABLE, memory_error
from dspark.errors import DataError, DsparkError, Interrupted, StageError
from dspark.io.atomic import replace_tree
from dspark.io.digest import digest_json, digest_tree
from dspark.io.disk import disk_error, disk_errors
from dspark.io.jsonfile import model_json, write_model
from dspark.io.progress import EventProgress, Progress, install_stop_signals, request_stop
from dspark.workspace import finished
from dspark.workspace.inputs import StageInputs, read_entry, read_inputs
from dspark.workspace.layout import Workspace, find_workspace
from dspark.workspace.process import DEBUG, EVENTS, RUN_ID, RUN_PID
from dspark.workspace.results import StageResult, log_path, result_path
from dspark.workspace.stores import feature_store, store_settings

_STORING = ("responses", "features")  # these keep every finished batch or shard in a store

Main = Callable[[Any, "StagePaths", Progress], None]


@dataclass(frozen=True)
class StagePaths:
    """Where a stage reads and writes.

    Args:
        workspace: the workspace.
        stage: the stage's line in the table.
        key: its key.
        entry: its fields in `.dspark/dag.json`.
        out: the folder (or file) to make; it becomes the stage's output.
        work: a folder for resumable state.
    """

    workspace: Workspace
    stage: Stage
    key: str
    entry: dict[str, str]
    out: Path
    work: Path

    @property
    def root(self) -> Path:
        """The workspace's folder."""
        return self.workspace.root

    @property
    def store(self) -> Path:
        """Expensive results by digest: `targets`, `responses`, `gguf`, `packages`."""
        return self.workspace.store

    @property
    def features(self) -> Path:
        """The feature store."""
        return feature_store(self.workspace)

    @property
    def read_budget(self) -> int:
        """Bytes of memory for reading features."""
        return store_settings(self.workspace).read_budget_mib << 20

    @property
    def domains(self) -> Path:
        """The folder of the declared domains."""
        return self.root / "pipeline" / "domains"

    @property
    def target(self) -> Path:
        """The target's record."""
        return self.workspace.target_record(self.entry["target"])

    @property
    def corpus(self) -> Path:
        """Outputs of the corpus."""
        return self.root / "corpora" / self.entry.get("corpus", self.key)

    @property
    def build(self) -> Path:
        """Outputs of the build."""
        return self.workspace.build(self.entry.get("build", self.key))

    @property
    def cost(self) -> Path:
        """The cost report of the stage's serving profile; missing for a profile without access."""
        return self.cost_of(self.entry["profile"])

    def cost_of(self, profile: str) -> Path:
        """The cost report of one of the build's serving profiles."""
        return self.root / BY_NAME["profile"].output("", {**self.entry, "profile": profile}) / "cost.json"

    @property
    def fingerprint(self) -> Path:
        """The fingerprint of the stage's serving profile."""
        return self.workspace.fingerprint(self.entry["profile"])


def stage(name: str) -> Callable[[Main], Callable[[], NoReturn]]:
    """Make a command of a stage's `main(inputs, paths, progress)`; the command's one argument is the key."""

    def decorate(main: Main) -> Callable[[], NoReturn]:
        def command() -> NoReturn:
            if len(sys.argv) != 2:
                print(f"usage: {sys.argv[0]} KEY   (stage {name}; see .dspark/dag.json for keys)", file=sys.stderr)
                raise SystemExit(2)
            end_process(run_stage(name, sys.argv[1], main))

        return command

    return decorate


def end_process(code: int) -> NoReturn:
    """End at once: everything is on disk, and taking torch apart object by object takes longer than a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_stage(name: str, key: str, main: Main) -> int:
    """Run one stage, leave its result for the run that asked for it, and return the exit code."""
    return reported(name, key, lambda progress: [_execute(name, key, main, progress)])


def reported(name: str, key: str, work: Callable[[Progress], list[str]]) -> int:
    """Do `work` in this process: stoppable, its output in the run's log, its result in the run's folder.

    Args:
        work: returns the paths it made.
    Returns:
        the exit code.
    """
    started = time.monotonic()
    run = _run_folder()
    if run is not None:
        with contextlib.suppress(OSError):  # on a full disk DVC's log may take it
            _redirect_output(log_path(run, name, key))
    install_stop_signals()
    _stop_with_the_run()
    outputs: list[str] = []
    failure: BaseException | None = None
    try:
        with disk_errors():
            outputs = work(_progress(name, key))
    except (Exception, Interrupted, KeyboardInterrupt) as error:
        failure = error
    result = _result(name, key, failure, outputs, time.monotonic() - started)
    if failure is not None:
        _print(result, failure)
    if run is not None and not _follows():
        try:
            write_model(result_path(run, name, key), result)
        except OSError as reason:
            print(f"this result could not be written down: {reason}", file=sys.stderr)
    return result.exit_code


def _execute(name: str, key: str, main: Main, progress: Progress) -> str:
    workspace = find_workspace(Path(os.environ.get("DVC_ROOT", ".")))
    spec = BY_NAME[name]
    entry = read_entry(workspace, name, key)
    inputs, settings = read_inputs(workspace, name, key)
    output = spec.output(key, entry)
    folder = workspace.work(name, _input_digest(workspace, spec, key, entry, inputs))
    staged = folder / "out" / Path(output).name
    paths = StagePaths(workspace, spec, key, entry, out=staged, work=folder / "state")
    kept = folder / finished.FOLDER
    if _follows():
        if not finished.intact(kept, staged.name):
            main(settings, paths, Progress())
        return output
    if kept.exists() and not finished.intact(kept, staged.name):
        progress.note(f"the finished output of {name} that was kept is damaged: it is made again")
        shutil.rmtree(kept, ignore_errors=True)
    if not kept.exists():
        _make(spec, main, settings, paths, progress)
        if not staged.exists():
            raise StageError(f"stage {name} finished without making its output {output}", "please report this")
        try:
            finished.keep(staged, kept)
        except OSError as reason:  # the copy is an insurance against kills, not worth failing for
            progress.note(f"no copy of the output is kept until DVC has recorded it: {reason}")
    else:
        shutil.rmtree(staged.parent, ignore_errors=True)
        staged.parent.mkdir(parents=True)
        finished.copy(kept / staged.name, staged)
    replace_tree(staged, workspace.root / output)
    shutil.rmtree(paths.work, ignore_errors=True)
    shutil.rmtree(staged.parent, ignore_errors=True)
    return output


def _make(spec: Stage, main: Main, settings: Any, paths: StagePaths, progress: Progress) -> None:
    """Let the stage make its output from what it has of it."""
    folder = paths.out.parent
    if folder.exists():
        progress.note(f"an earlier {spec.name} was stopped on its way: {_kept(spec, paths)}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if not spec.writes_file:
        paths.out.mkdir()
    paths.work.mkdir(parents=True, exist_ok=True)
    try:
        main(settings, paths, progress)
    except Exception as error:
        if disk_error(error):  # on a full disk this makes room to say so
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _kept(spec: Stage, paths: StagePaths) -> str:
    """What of a stage that was stopped is not done again."""
    if spec.name in _STORING:
        return "what it finished is in the store and is not done again"
    if paths.work.is_dir() and any(paths.work.iterdir()):
        return "what it kept of its work is still there"
    return "it begins again; what other stages finished is not done again"


def remove_finished(workspace: Workspace) -> None:
    """Drop the copies of finished outputs that DVC has recorded meanwhile; call when `dvc repro` succeeded."""
    for kept in workspace.state.glob(f"work/*/*/{finished.FOLDER}"):
        shutil.rmtree(kept.parent, ignore_errors=True)


def _input_digest(workspace: Workspace, spec: Stage, key: str, entry: dict[str, str], inputs: StageInputs) -> str:
    """What unfinished work is keyed by: settings, code and the contents of everything the stage depends on."""
    contents: dict[str, str] = {}
    for dependency in spec.dependencies(key, entry)[1:]:
        path = workspace.root / dependency
        if not path.exists():
            raise DataError(f"{dependency} is missing: stage {spec.name} reads it", "make it: dspark run --target NAME")
        contents[dependency] = digest_tree(path)
    return digest_json([model_json(inputs), contents])


def _result(name: str, key: str, failure: BaseException | None, outputs: list[str], seconds: float) -> StageResult:
    result = StageResult(stage=name, key=key, status="ran", seconds=round(seconds, 3), outputs=outputs)
    if failure is None:
        return result
    result.category = type(failure).__name__
    result.message = str(failure) or result.category
    if isinstance(failure, Interrupted | KeyboardInterrupt):
        result.status, result.exit_code = "interrupted", Interrupted.exit_code
        result.hint = "the same command goes on from here"
        return result
    result.status, result.exit_code = "failed", StageError.exit_code
    if isinstance(failure, DsparkError):
        result.exit_code, result.hint = failure.exit_code, failure.hint
    elif isinstance(failure, ModuleNotFoundError):
        result.hint = "install what the pipeline needs: pip install 'dspark[pipeline,cpu]'"
    elif memory_error(failure):
        result.hint = f"lower the batch size of this stage (see params.yaml); if a GPU is too small, {VARIABLE}=cpu"
    else:
        result.message = f"{result.category}: {result.message}"
        result.hint = "this is a fault in dspark: please report it with the log"
    return result


def _print(result: StageResult, failure: BaseException) -> None:
    expected = isinstance(failure, DsparkError | Interrupted | KeyboardInterrupt)
    if not expected or os.environ.get(DEBUG):
        traceback.print_exception(failure)
    print(f"Error: {result.message}", file=sys.stderr)
    if result.hint:
        print(f"  {result.hint}", file=sys.stderr)


def _run_folder() -> Path | None:
    """The folder of the `dspark run` that this stage belongs to, None under plain DVC."""
    run = os.environ.get(RUN_ID)
    if not run:
        return None
    folder = find_workspace(Path(os.environ.get("DVC_ROOT", "."))).runs / run
    return folder if folder.is_dir() else None


def _redirect_output(log: Path) -> None:
    """Send everything that this process prints, C libraries included, to its log."""
    sys.stdout.flush()
    sys.stderr.flush()
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


def _stop_with_the_run(interval_seconds: float = 0.5) -> None:
    """Stop at the next safe point when the `dspark run` that started this stage is gone, however it went."""
    owner = os.environ.get(RUN_PID)
    if not owner:
        return

    def watch() -> None:
        while os.path.exists(f"/proc/{owner}"):  # noqa: PTH110  # a plain call: this loop runs for hours
            time.sleep(interval_seconds)
        request_stop()

    threading.Thread(target=watch, daemon=True, name="watch-run").start()


def _follows() -> bool:
    """True in all processes of a distributed launch but the first; torchrun and accelerate set the variable."""
    return os.environ.get("RANK", "0") != "0"


def _progress(name: str, key: str) -> Progress:
    events = os.environ.get(EVENTS)
    return EventProgress(Path(events), f"{name}@{key}") if events else Progress()
