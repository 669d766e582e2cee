"""The plots of a build, from what its stages wrote: one SVG each, and its numbers as CSV beside it.

| figure | from |
|---|---|
| `tau`, `acceptance` | `evaluate/metrics.json` |
| `reliability-<sampling>` | `calibrate/reliability.csv`, `calibration.json` |
| `threshold-acceptance`, `threshold-tau` | `evaluate/threshold_sweep.csv` |
| `pareto`, `budget` | `evaluate/pareto.json`, `certify/<profile>.json` |
| `cost-<profile>` | `profiles/.../cost.json` |
| `training-loss`, `training-tau` | `train/curves.csv` |

What cannot be drawn is named with its reason. Nothing is measured here, and nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from dspark.calibration import read_reliability, read_report
from dspark.calibration.results import RELIABILITY, REPORT
from dspark.errors import DataError, DsparkError
from dspark.evaluation.acceptance import read_sweep_csv
from dspark.evaluation.entry import CertificateEntry
from dspark.evaluation.results import EvaluationMetrics, LoadPoint, Pareto
from dspark.io.atomic import write_text
from dspark.io.jsonfile import read_json, read_model, write_model
from dspark.profiling.cost import CostReport
from dspark.report import plots
from dspark.report.chart import Figure, table
from dspark.report.drawing import render
from dspark.report.tau_plot import tau_figure
from dspark.report.training_plots import training_figures

INDEX = "plots.json"
CURVES = "curves.csv"
AGAIN = "`dspark run` makes again what is missing or out of date"
Model = TypeVar("Model", bound=BaseModel)


class PlotIndex(BaseModel):
    """`plots.json`: the figures of a folder in their order, and why others are not there."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    schema_: Literal["dspark/plots/1"] = Field(default="dspark/plots/1", alias="schema")
    figures: dict[str, str]  # name, of `<name>.svg` and `<name>.csv`: title
    absent: dict[str, str] = {}


@dataclass(frozen=True)
class PlotSources:
    """Where the files of a build lie; any of them may be missing.

    Attributes:
        evaluate, calibrate: folders of the stages.
        certificates: `certify/<profile>.json` by serving profile.
        costs: `cost.json` by serving profile; `absent.json` beside it says why it is missing.
        root: of the workspace, or of the package; reasons name files below it.
        reliability: the table, where it does not lie beside `calibration.json`.
        train: folder of the stage.
    """

    evaluate: Path
    calibrate: Path
    certificates: Mapping[str, Path] = field(default_factory=dict)
    costs: Mapping[str, Path] = field(default_factory=dict)
    root: Path | None = None
    reliability: Path | None = None
    train: Path | None = None


@dataclass
class Drawn:
    """Figures that could be made, and the reasons for those that could not."""

    figures: list[Figure] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    root: Path | None = None

    def add(self, name: str, make: Callable[[], Figure | Sequence[Figure]]) -> None:
        """Make the figures of one kind, or keep the reason why there is none."""
        try:
            made = make()
        except DsparkError as reason:
            self.leave_out(name, reason.message)
            return
        self.figures += [made] if isinstance(made, Figure) else made

    def leave_out(self, name: str, reason: str) -> None:
        """Keep why something was not drawn."""
        self.absent[name] = reason.replace(f"{self.root}/", "") if self.root is not None else reason


def draw(sources: PlotSources) -> Drawn:
    """All figures that the files of a build hold, in the order of the table above."""
    drawn = Drawn(root=sources.root)
    metrics = sources.evaluate / "metrics.json"
    drawn.add("tau", lambda: tau_figure(_read(metrics, EvaluationMetrics)))
    drawn.add("acceptance", lambda: plots.acceptance_by_temperature(_read(metrics, EvaluationMetrics)))
    drawn.add("reliability", lambda: _reliability(sources))
    drawn.add("threshold", lambda: plots.threshold_figures(read_sweep_csv(sources.evaluate / "threshold_sweep.csv")))
    loads = _loads(sources, drawn)
    drawn.add("pareto", lambda: plots.pareto_figure(loads))
    drawn.add("budget", lambda: plots.budget_figure(loads))
    for profile, path in sources.costs.items():
        drawn.add(f"cost-{profile}", partial(_cost, path))
    if sources.train is not None:
        drawn.add("training", partial(training_figures, sources.train / CURVES))
    return drawn


def write_plots(drawn: Drawn, out: Path) -> PlotIndex:
    """Write `<name>.svg` and `<name>.csv` of every figure and `plots.json` into `out`.

    Figures of an earlier call that are not made any more are removed; other files there are left alone.

    Raises:
        DataError: `out` holds something else than plots.
    """
    if out.exists() and not (out / INDEX).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} holds something else than plots", "name a folder that is new or empty")
    index = PlotIndex(figures={figure.name: figure.title for figure in drawn.figures}, absent=drawn.absent)
    before = read_model(out / INDEX, PlotIndex, hint=f"rm -r {out}").figures if (out / INDEX).is_file() else {}
    for figure in drawn.figures:
        write_text(out / f"{figure.name}.svg", render(figure))
        write_text(out / f"{figure.name}.csv", table(figure))
    write_model(out / INDEX, index)
    for name in before.keys() - index.figures.keys():
        for path in (out / f"{plots.slug(name)}.svg", out / f"{plots.slug(name)}.csv"):
            path.unlink(missing_ok=True)
    return index


def _reliability(sources: PlotSources) -> list[Figure]:
    report = read_report(sources.calibrate / REPORT)
    rows = sources.reliability or sources.calibrate / RELIABILITY
    return plots.reliability_figures(() if report.absent else read_reliability(rows), report)


def _loads(sources: PlotSources, drawn: Drawn) -> dict[str, Sequence[LoadPoint]]:
    """Load points of the evaluation and of every engine that was measured; the reasons for the others are kept."""
    loads: dict[str, Sequence[LoadPoint]] = {}
    try:
        loads["evaluation, reference engine"] = _read(sources.evaluate / "pareto.json", Pareto).points
    except DataError as reason:
        drawn.leave_out("load, evaluation", reason.message)
    for profile, path in sources.certificates.items():
        try:
            entry = _read(path, CertificateEntry)
        except DataError as reason:
            drawn.leave_out(f"load, {profile}", reason.message)
            continue
        if entry.load:
            loads[profile] = entry.load
        else:
            drawn.leave_out(f"load, {profile}", entry.reason or "nothing was measured under load")
    return loads


def _read(path: Path, model: type[Model]) -> Model:
    return read_model(path, model, hint=AGAIN)


def _cost(path: Path) -> Figure:
    absent = path.with_name("absent.json")
    if absent.is_file():
        raise DataError(str(read_json(absent)["reason"]))
    return plots.cost_figure(_read(path, CostReport))
