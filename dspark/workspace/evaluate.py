"""`dspark evaluate --suite`: a finished build on benchmark sets. Nothing of the build is changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.config.build import FOLDERS, ResolvedBuild
from dspark.config.declared import suggestion
from dspark.config.models import DType, EvaluationSettings
from dspark.config.suites import BenchmarkSet, SuiteSpec, read_suite
from dspark.corpus.benchmarks import SetReading, benchmark_files, read_benchmark
from dspark.corpus.catalogue import read_domain_spec
from dspark.corpus.domains import domain_file, read_domain
from dspark.errors import PreflightError, SettingsError
from dspark.evaluation.acceptance import read_sweep_csv
from dspark.io.digest import digest_file
from dspark.io.jsonfile import read_model
from dspark.io.progress import Progress, install_stop_signals
from dspark.profiling.cost import CostReport
from dspark.report.build_plots import Drawn, write_plots
from dspark.report.plots import acceptance_figure, threshold_figures
from dspark.scheduling.cost import StepCost
from dspark.workspace.graph import instances
from dspark.workspace.layout import Workspace
from dspark.workspace.listener import ListenedProgress, Listener
from dspark.workspace.lock import run_lock
from dspark.workspace.plots import FOLDER as PLOTS

if TYPE_CHECKING:
    from dspark.drafters.base import Drafter
    from dspark.evaluation.suite import PreparedSet, SuiteReport
    from dspark.targets.loading import Target
    from dspark.targets.record import TargetRecord

STAGE, FOLDER = "suite", "suites"


@dataclass(frozen=True)
class SuiteRequest:
    """What was asked for.

    Attributes:
        suite: of pipeline/suites.
        data: the folder with the sets' files.
        out: for the results; None: `builds/<build>/suites/<suite>`.
        only: sets to evaluate; empty: all.
        prompts: of each set at most; None: as the suite says.
        new_tokens: of each reply at most; None: as the suite says.
        temperatures: of the target; empty: as the suite says.
        throughput: measure tokens per second on the suite's prompts too.
    """

    suite: str
    data: Path
    out: Path | None = None
    only: tuple[str, ...] = ()
    prompts: int | None = None
    new_tokens: int | None = None
    temperatures: tuple[float, ...] = ()
    throughput: bool = False


def evaluate_on_suite(
    workspace: Workspace, resolved: ResolvedBuild, request: SuiteRequest, listener: Listener
) -> tuple[Path, SuiteReport]:
    """Evaluate the drafter of a finished build on a suite; the same request goes on where an earlier one stopped.

    Returns:
        the folder of the results, and the report.
    Raises:
        SettingsError: no such suite or set, or the folder holds something else.
        PreflightError: the build is not finished, or files of sets are missing: all are named, with where to get them.
        DataError, IntegrityError: a set of which nothing can be asked, a damaged drafter.
        Interrupted: stopped at a safe point.
    """
    from dspark.calibration import read_report
    from dspark.device import accelerator, serving_device
    from dspark.evaluation.suite import SuiteInputs, evaluate_suite
    from dspark.profiling.fingerprint import threads
    from dspark.targets.record import read_record

    suite = _wanted(read_suite(workspace.root, request.suite), request)
    build = workspace.build(resolved.name)
    _require_finished(build, resolved.name)
    _require_files(workspace, suite, request.data)
    profile = resolved.profiles[0]
    # Acceptance is the same wherever it is computed; what is timed is timed where the build's evidence was.
    device, serving = accelerator(), serving_device(profile)
    install_stop_signals()
    progress = ListenedProgress(listener, f"{STAGE}@{resolved.name}")
    started = time.monotonic()
    with run_lock(workspace, f"dspark evaluate of build {resolved.name!r}", listener.note):
        record = read_record(workspace.target_record(resolved.build.target.name))
        settings = _settings(resolved.build.evaluation, suite)
        sets = _prepared(workspace, suite, request, record, settings.seed, progress)
        drafter = build / "train" / "drafter"
        inputs = SuiteInputs(
            suite=suite.name,
            build=resolved.name,
            target=record.name,
            target_digest=record.digest,
            drafter_weights_sha256=digest_file(drafter / "model.safetensors"),
            prompts={one.spec.name: one.digest for one in sets},
            settings=settings,
        )
        out = request.out or build / FOLDER / suite.name
        report = evaluate_suite(
            _loader(workspace, record, drafter, device, threads(profile)),
            device,
            sets,
            inputs,
            out,
            calibration=read_report(build / "calibrate" / "calibration.json"),
            cost=_cost(workspace, resolved),
            timed=_loader(workspace, record, drafter, serving, threads(profile)) if request.throughput else None,
            progress=progress,
        )
        _plot(report, out)
    progress.end(time.monotonic() - started)
    return out, report


def _wanted(suite: SuiteSpec, request: SuiteRequest) -> SuiteSpec:
    """The suite with what the request changes of it.

    Raises:
        SettingsError: a set that the suite does not have.
    """
    names = [one.name for one in suite.sets]
    for name in request.only:
        if name not in names:
            raise SettingsError(f"suite {suite.name!r} has no set {name!r}", suggestion(name, names))
    changes = {
        "sets": tuple(one for one in suite.sets if not request.only or one.name in request.only),
        "temperatures": tuple(dict.fromkeys(request.temperatures)) or suite.temperatures,
        "max_new_tokens": request.new_tokens or suite.max_new_tokens,
    }
    return suite.model_copy(update=changes)


def _settings(evaluation: EvaluationSettings, suite: SuiteSpec) -> EvaluationSettings:
    """The build's own settings of decoding, with the suite's temperatures and lengths."""
    return evaluation.model_copy(
        update={
            "temperatures": suite.temperatures,
            "max_new_tokens": suite.max_new_tokens,
            "throughput_new_tokens": min(evaluation.throughput_new_tokens, suite.max_new_tokens),
        }
    )


def _require_finished(build: Path, name: str) -> None:
    needed = ("train/drafter/config.json", "calibrate/calibration.json")
    missing = [path for path in needed if not (build / path).is_file()]
    if missing:
        raise PreflightError(
            f"build {name!r} has no {' and no '.join(missing)} yet: only a finished one can be evaluated",
            f"dspark run --build {name}",
        )


def _require_files(workspace: Workspace, suite: SuiteSpec, data: Path) -> None:
    """Refuse a suite of which files are missing, before anything heavy is loaded; all are named."""
    if not data.is_dir():
        raise PreflightError(f"--data {data}: there is no such folder", "name the folder that holds the sets' files")
    problems: list[PreflightError] = []
    for one in suite.sets:
        try:
            _files(workspace, one, data)
        except PreflightError as problem:
            problems.append(problem)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        lines = [f"{len(problems)} of {len(suite.sets)} sets of suite {suite.name!r} are not there"]
        for missing in problems:
            lines += [f"  {missing.message}", f"    {missing.hint}"]
        hint = "fetch them (nothing is fetched for you), or evaluate others: --only SET"
        raise PreflightError("\n".join(lines), hint)


def _files(workspace: Workspace, one: BenchmarkSet, data: Path) -> list[Path]:
    if one.domain is None:
        return benchmark_files(one, data)
    folder = workspace.root / FOLDERS["domain"]
    return [domain_file(read_domain_spec(folder, one.domain, root=workspace.root), folder)]


def _read(workspace: Workspace, one: BenchmarkSet, data: Path) -> SetReading:
    if one.domain is None:
        return read_benchmark(one, data)
    folder = workspace.root / FOLDERS["domain"]
    reading = read_domain(read_domain_spec(folder, one.domain, root=workspace.root), folder)
    return SetReading(reading.prompts, reading.rejections, outside=0, turns_left_out=0)


def _prepared(
    workspace: Workspace,
    suite: SuiteSpec,
    request: SuiteRequest,
    record: TargetRecord,
    seed: int,
    progress: Progress,
) -> list[PreparedSet]:
    from dspark.evaluation.suite import prepare_set
    from dspark.targets.loading import load_tokenizer
    from dspark.targets.template import ChatTemplate

    encoder = ChatTemplate(load_tokenizer(record.folder(workspace.root)), record.thinking_mode)
    progress.start("read the sets", len(suite.sets), unit="sets")
    prepared = []
    for one in suite.sets:
        files = {path.name: digest_file(path) for path in _files(workspace, one, request.data)}
        found = prepare_set(
            one,
            _read(workspace, one, request.data),
            files,
            encoder,
            suite,
            limit=request.prompts,
            max_position=record.max_position,
            seed=seed,
        )
        if found.origin.rows != one.rows:
            progress.note(f"{one.name}: {found.origin.rows} rows, {one.rows} were released")
        prepared.append(found)
        progress.advance()
    return prepared


def _loader(
    workspace: Workspace, record: TargetRecord, folder: Path, device: str, threads: int
) -> Callable[[DType], tuple[Target, Drafter]]:
    """Loads the target and the trained drafter, as the stage `evaluate` does."""

    def load(dtype: DType) -> tuple[Target, Drafter]:
        import torch

        from dspark.drafters.checkpoint import read_checkpoint
        from dspark.targets.loading import load_target

        torch.set_num_threads(threads)
        target = load_target(record, workspace.root, dtype=dtype, device=device)
        drafter = read_checkpoint(folder, target.embedding, target.head, record=record)
        return target, drafter.to(target.dtype)

    return load


def _cost(workspace: Workspace, resolved: ResolvedBuild) -> StepCost | None:
    """The measured cost of the build's first serving profile, if there is one."""
    profile = next(instance for instance in instances(resolved) if instance.stage.name == "profile")
    path = workspace.root / profile.stage.output(profile.key, profile.entry) / "cost.json"
    return read_model(path, CostReport).scheduling if path.is_file() else None


def _plot(report: SuiteReport, out: Path) -> None:
    """`plots/`: acceptance by position of every group of sets, and the threshold sweep."""
    panels = {
        f"{group}, temperature {temperature}": {
            name: figures for name, figures in found.sets.items() if report.origins[name].group == group
        }
        for temperature, found in report.temperatures.items()
        for group in found.groups
    }
    drawn = Drawn()
    title = f"Acceptance by draft position, suite {report.inputs.suite}"
    drawn.add("acceptance", lambda: acceptance_figure("acceptance", title, panels))
    drawn.add("threshold", lambda: threshold_figures(read_sweep_csv(out / "threshold_sweep.csv")))
    write_plots(drawn, out / PLOTS)
