"""`dspark evaluate --study`: the builds of a study, as far as they are evaluated, and what they come to side by side.

Variants are builds like any other: the stages that make them are DVC's, so a stopped study goes on where it was, a
second one does nothing, and one value more makes one build more. They share the corpus of the build they are made from,
its answers and its features. None is packaged or registered: a study is looked at, and the build of choice declared. A
sweep of the load is timed when its build is there (`workspace.load`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dspark.config.stages import BY_NAME
from dspark.config.studies import resolve_study
from dspark.evaluation.load_report import LoadReport
from dspark.io.atomic import write_text
from dspark.io.jsonfile import model_json, write_model
from dspark.report.study import StudyReport, collect
from dspark.report.study_charts import study_charts
from dspark.report.study_tables import study_csv
from dspark.workspace.layout import Workspace
from dspark.workspace.listener import Listener
from dspark.workspace.load import load_study
from dspark.workspace.run import Report, Request, make

GOAL = BY_NAME["evaluate"].name


@dataclass(frozen=True)
class Studied:
    """What a study came to.

    Attributes:
        run: how the stages went.
        report: the comparison.
        folder: with `study.json`, `study.csv` and the charts.
        files: their names.
    """

    run: Report
    report: StudyReport | LoadReport
    folder: Path
    files: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {**model_json(self.report), "folder": str(self.folder), "files": list(self.files)}


def study(workspace: Workspace, request: Request, name: str, listener: Listener) -> Studied:
    """Make and evaluate the builds of a study, and compare them.

    Args:
        request: the build it is about, and flags for all variants.
        name: of the study.
    Raises:
        SettingsError, PreflightError: before anything is changed; see `config.studies.resolve_study`.
        DsparkError: a stage failed (its own exit code), or what there is cannot be compared.
        Interrupted: stopped at a safe point; the same command goes on from there.
    """
    found = resolve_study(
        workspace.root,
        name,
        target=request.target,
        build=request.build,
        flags=request.flags,
        environment=request.environment,
    )
    chosen = found.pipeline.chosen.name
    request = replace(request, build=chosen, target=None, publish=False, verb=("evaluate", "--study", name))
    listener.note(
        f"study {name}: {len(found.variants)} builds of corpus {found.pipeline.chosen.build.corpus.name}"
        if found.spec.vary
        else f"study {name}: the evaluation of build {chosen}"
    )
    run = make(workspace, request, found.pipeline, listener, goal=GOAL)
    folder = workspace.study(chosen, name)
    if found.spec.sweep == "load":
        timed, files = load_study(workspace, found, folder, listener)
        return Studied(run, timed, folder, files)
    report = collect(found, workspace.root / "builds")
    return Studied(run, report, folder, _write(report, folder))


def _write(report: StudyReport, folder: Path) -> tuple[str, ...]:
    write_model(folder / "study.json", report)
    texts = {"study.csv": study_csv(report), **dict(study_charts(report))}
    for name, text in texts.items():
        write_text(folder / name, text)
    return ("study.json", *texts)
