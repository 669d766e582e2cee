"""The figures of a build, from files as its stages write them."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "package"))  # fake_build.py
sys.path.insert(0, str(Path(__file__).parent))  # drawn.py

import fake_build
from drawn import of_class, parsed
from full_build import sweep

from dspark.calibration import write_absence
from dspark.cli.boundary import run_command
from dspark.errors import DataError
from dspark.evaluation.acceptance import read_sweep_csv, write_sweep_csv
from dspark.io.jsonfile import read_model, write_json
from dspark.report.build_plots import Drawn, PlotIndex, PlotSources, draw, write_plots
from dspark.report.chart import Figure
from dspark.workspace.layout import Workspace

CPU, ELSEWHERE = fake_build.CPU, fake_build.ELSEWHERE
NAMES = [
    "tau", "acceptance", "reliability-temperature-0-greedy-match", "reliability-temperature-1-sampled",
    "threshold-acceptance", "threshold-tau", "pareto", "budget", f"cost-{CPU}", "training-loss", "training-tau",
]  # fmt: skip


def drawn_of(sources: PlotSources) -> dict[str, Figure]:
    return {figure.name: figure for figure in draw(sources).figures}


def numbers_of(figure: Figure, panel: int, series: str) -> list[tuple[float, float]]:
    found = next(one for one in figure.panels[panel].series if one.name == series)
    return [(point.x, point.y) for point in found.points]


def test_a_finished_build_has_every_figure(sources: PlotSources, tmp_path: Path):
    drawn = draw(sources)
    assert [figure.name for figure in drawn.figures] == NAMES
    assert drawn.absent == {f"load, {ELSEWHERE}": "no GPU | at hand"}
    index = write_plots(drawn, tmp_path / "plots")
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {
        "plots.json", *(f"{name}.{kind}" for name in NAMES for kind in ("svg", "csv"))}  # fmt: skip
    assert read_model(tmp_path / "plots" / "plots.json", PlotIndex) == index
    for name in NAMES:
        root = parsed((tmp_path / "plots" / f"{name}.svg").read_text())
        rows = list(csv.DictReader((tmp_path / "plots" / f"{name}.csv").open()))
        assert len(of_class(root, "mark")) == len(rows) > 0


def test_acceptance_is_that_of_the_metrics(sources: PlotSources):
    figure = drawn_of(sources)["acceptance"]
    assert [panel.title for panel in figure.panels] == ["temperature 0 (greedy match)", "temperature 1 (sampled)"]
    assert numbers_of(figure, 0, "math") == [(1, 0.6), (2, 0.5), (3, 0.4)]
    rate = fake_build.metrics().temperatures["0"].domains["math"].conditional[0]
    point = figure.panels[0].series[0].points[0]
    assert (point.interval, point.n) == (rate.ci95, rate.n)
    assert figure.names == ["chat", "code", "math"]


def test_reliability_stands_on_both_sides_of_calibration_with_its_error(sources: PlotSources):
    figure = drawn_of(sources)["reliability-temperature-1-sampled"]
    assert [panel.title for panel in figure.panels] == [f"position {k}: ECE 8.0 → 2.0 %" for k in (1, 2, 3)]
    assert numbers_of(figure, 2, "before calibration") == [(0.25, 0.3), (0.75, 0.55)]
    assert figure.panels[0].series[0].reference, "the diagonal"
    assert [point.n for point in figure.panels[0].series[1].points] == [40, 41]


def test_the_sweep_shows_calibrated_confidences_where_there_are_some(sources: PlotSources):
    rates, taus = (drawn_of(sources)[f"threshold-{name}"] for name in ("acceptance", "tau"))
    assert [panel.title for panel in rates.panels] == ["temperature 0, calibrated", "temperature 1, raw"]
    assert numbers_of(rates, 0, "math") == [(0.0, 0.5), (0.4, 0.75)], "a rate of nothing is no point"
    assert numbers_of(rates, 1, "math") == [(0.0, 0.5), (0.4, 0.7)]
    assert numbers_of(taus, 1, "chat") == [(0.0, 2.5), (0.4, 2.1), (0.8, 1.7)]


def test_throughput_stands_against_speed_per_user_with_the_requests_beside(sources: PlotSources):
    figure = drawn_of(sources)["pareto"]
    assert [panel.title for panel in figure.panels] == ["evaluation, reference engine", CPU]
    assert numbers_of(figure, 0, "fixed") == [(100, 100), (300, 300)]
    assert [point.note for point in figure.panels[0].series[0].points] == ["1", "4"]
    assert figure.panels[0].series[0].points[0].interval == fake_build.number(100, 10).ci95


def test_the_budget_leaves_out_plain_decoding(sources: PlotSources):
    figure = drawn_of(sources)["budget"]
    assert numbers_of(figure, 0, "fixed") == [(1, 3.0), (4, 3.0)]
    assert "none" not in figure.names


def test_step_times_are_milliseconds_beside_the_fitted_curve(sources: PlotSources):
    figure = drawn_of(sources)[f"cost-{CPU}"]
    assert numbers_of(figure, 0, "1 request") == [(4, 10.0)]
    assert figure.panels[0].series[1].points[0].interval == pytest.approx((9, 11))
    curve = figure.panels[0].series[0]
    assert curve.reference and [(p.x, round(p.y, 3)) for p in curve.points] == [(1, 10), (4, 10.526), (8, 16.667)]


@pytest.mark.parametrize("missing, absent", [
    ("evaluate/metrics.json", ["tau", "acceptance"]), ("evaluate/threshold_sweep.csv", ["threshold"]),
    ("calibrate/calibration.json", ["reliability"]), ("evaluate/pareto.json", ["load, evaluation"]),
    ("cost.json", [f"cost-{CPU}"]), ("train/curves.csv", ["training"]),
])  # fmt: skip
def test_what_is_missing_is_named_and_the_rest_is_drawn(
    sources: PlotSources, tmp_path: Path, missing: str, absent: list[str]
):
    (tmp_path / "build" / missing).unlink()
    drawn = draw(sources)
    assert drawn.absent.keys() == {*absent, f"load, {ELSEWHERE}"}
    assert {drawn.absent[name] for name in absent} == {f"build/{missing}: file not found"}
    assert len(drawn.figures) >= len(NAMES) - 2


def test_tau_stands_over_domains_that_were_trained_on_and_others(sources: PlotSources):
    figure = drawn_of(sources)["tau"]
    assert [panel.title for panel in figure.panels] == ["temperature 0 (greedy match)", "temperature 1 (sampled)"]
    names = figure.x.names
    assert {names[int(x)]: y for x, y in numbers_of(figure, 0, "trained on")} == {"math": 2.0, "chat": 1.5}
    assert {names[int(x)]: y for x, y in numbers_of(figure, 1, "not trained on")} == {"code": 1.4}
    point = figure.panels[0].series[0].points[0]
    assert (point.interval, point.n) == (fake_build.number(point.y).ci95, 12)


def test_losses_are_averaged_over_windows_of_steps(sources: PlotSources, tmp_path: Path):
    """150 steps in at most 60 points: three each. The loss of step s is s, so a window's mean is its middle step."""
    assert numbers_of(drawn_of(sources)["training-loss"], 0, "loss") == [(1, 3.5), (2, 3.25)]
    assert numbers_of(drawn_of(sources)["training-tau"], 0, "greedy") == [(2, 1.5)], "an empty cell is no point"
    lines = ["step,loss", *(f"{step},{step}" for step in range(1, 151))]
    (tmp_path / "build/train/curves.csv").write_text("\n".join(lines) + "\n")
    figure = drawn_of(sources)["training-loss"]
    assert numbers_of(figure, 0, "loss")[:2] == [(3, 2), (6, 5)] and len(figure.panels[0].series[0].points) == 50
    assert {point.n for point in figure.panels[0].series[0].points} == {3}
    assert "training-tau" not in drawn_of(sources)


@pytest.mark.parametrize("text, said", [
    ("step,loss\n", "nothing was trained"), ("step,loss\n1,x\n", "no curves of a training run"),
    ("step,loss\n1,nan\n", "no loss"),
])  # fmt: skip
def test_curves_that_hold_nothing_are_a_reason(sources: PlotSources, tmp_path: Path, text: str, said: str):
    (tmp_path / "build/train/curves.csv").write_text(text)
    assert said in draw(sources).absent["training"]


def test_a_damaged_file_is_a_reason_too(sources: PlotSources, tmp_path: Path):
    (tmp_path / "build/evaluate/metrics.json").write_text('{"schema": "dspark/other/1"}')
    assert "schema is 'dspark/other/1'" in draw(sources).absent["acceptance"]


def test_a_profile_without_access_says_why(sources: PlotSources, tmp_path: Path):
    (tmp_path / "build/cost.json").unlink()
    write_json(tmp_path / "build/absent.json", {"profile": CPU, "reason": "no such GPU"})
    assert draw(sources).absent[f"cost-{CPU}"] == "no such GPU"


def test_a_drafter_without_a_confidence_head_has_no_reliability_and_no_sweep(sources: PlotSources):
    write_absence(sources.calibrate, 3, "the drafter has no confidence head")
    write_sweep_csv(sources.evaluate / "threshold_sweep.csv", [])
    absent = draw(sources).absent
    assert absent["reliability"] == "nothing was calibrated: the drafter has no confidence head"
    assert absent["threshold"] == "no threshold was swept: the drafter has no confidence head"


def test_figures_that_are_not_made_any_more_go_and_other_files_stay(sources: PlotSources, tmp_path: Path):
    out = tmp_path / "plots"
    write_plots(draw(sources), out)
    (out / "notes.md").write_text("mine")
    (sources.evaluate / "threshold_sweep.csv").unlink()
    before = (out / "pareto.svg").read_bytes()
    write_plots(draw(sources), out)
    names = {path.stem for path in out.iterdir()}
    assert names == {*NAMES, "plots", "notes"} - {"threshold-acceptance", "threshold-tau"}
    assert (out / "pareto.svg").read_bytes() == before


def test_a_folder_of_something_else_is_left_alone(sources: PlotSources, tmp_path: Path):
    drawn = draw(sources)
    with pytest.raises(DataError, match="holds something else than plots"):
        write_plots(drawn, tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(DataError, match="holds something else than plots"):
        write_plots(drawn, file)
    assert file.read_text() == ""


def test_only_what_dspark_expects_becomes_a_reason():
    """A fault of the program is none."""
    with pytest.raises(ZeroDivisionError):
        Drawn().add("x", lambda: [1 / 0])  # type: ignore[list-item]


def test_the_sweep_is_read_as_it_was_written(tmp_path: Path):
    rows = [*sweep(0.0, "math", "raw"), *sweep(0.7, "chat", "calibrated")]
    path = tmp_path / "threshold_sweep.csv"
    write_sweep_csv(path, rows)
    assert read_sweep_csv(path) == rows
    text = path.read_text()
    path.write_text(text.replace("math", "math,1"))
    with pytest.raises(DataError, match=r"threshold_sweep\.csv:2: "):
        read_sweep_csv(path)
    path.write_text("threshold,rate\n0,1\n")
    with pytest.raises(DataError, match=r"threshold_sweep\.csv:1: columns are \['threshold', 'rate'\], expected"):
        read_sweep_csv(path)


def test_nothing_heavy_is_loaded():
    code = (
        "import sys, dspark.report.build_plots, dspark.workspace.plots, dspark.cli.plots\n"
        "print(sorted({'torch', 'transformers', 'mlflow', 'dvc', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# ---------------------------------------------------------------- dspark plots


def test_the_verb_draws_what_there_is(workspace: Workspace, sources: PlotSources, capsys: pytest.CaptureFixture[str]):
    build = workspace.build("demo")
    build.mkdir(parents=True)
    sources.evaluate.rename(build / "evaluate")
    assert run_command(["-C", str(workspace.root), "plots", "demo"]) == 0
    out = capsys.readouterr().out
    assert f"{build}/plots/pareto.svg" in out and "Throughput against speed per user" in out
    assert "not drawn: reliability (builds/demo/calibrate/calibration.json: file not found)" in out
    assert (build / "plots" / "acceptance.svg").is_file()
    assert run_command(["-C", str(workspace.root), "plots", "demo", "--json", "--out", str(build / "other")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "dspark/plots/1" and document["figures"].keys() >= {"acceptance", "pareto"}
    assert (build / "other" / "pareto.csv").is_file()


def test_a_build_that_has_measured_nothing_is_told_what_to_do(workspace: Workspace, capsys: pytest.CaptureFixture[str]):
    assert run_command(["-C", str(workspace.root), "plots", "demo"]) == 3
    error = capsys.readouterr().err
    assert "build 'demo' has nothing to draw yet" in error and "dspark run --build demo" in error
    assert "builds/demo/evaluate/metrics.json: file not found" in error
    assert not workspace.build("demo").exists()
    assert run_command(["-C", str(workspace.root), "plots", "dem"]) == 2
    assert "did you mean 'demo'?" in capsys.readouterr().err
