"""`dspark plots`: the figures of a build, from what its stages have written so far."""

from __future__ import annotations

from pathlib import Path

from dspark.config.build import ResolvedBuild
from dspark.errors import PreflightError
from dspark.io.atomic import write_if_changed
from dspark.report.build_plots import Drawn, PlotIndex, PlotSources, draw, write_plots
from dspark.workspace.graph import instances
from dspark.workspace.layout import Workspace

FOLDER = "plots"


def plot_build(workspace: Workspace, resolved: ResolvedBuild, out: Path | None = None) -> tuple[Path, PlotIndex]:
    """Write the figures of a build.

    Args:
        out: a folder that is new, empty, or holds plots; None: `builds/<build>/plots`.
    Returns:
        the folder, and what is in it.
    Raises:
        PreflightError: no stage has written anything that can be drawn.
        DataError: `out` holds something else.
    """
    drawn = draw_build(workspace, resolved)
    if not drawn.figures:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in drawn.absent.items())
        what = f"build {resolved.name!r} has nothing to draw yet\n  {reasons}"
        raise PreflightError(what, f"dspark run --build {resolved.name}")
    folder = (out or workspace.build(resolved.name) / FOLDER).absolute()
    index = write_plots(drawn, folder)
    if folder.is_relative_to(workspace.root):
        write_if_changed(folder / "dvc.yaml", dvc_plots(index))
    return folder, index


def dvc_plots(index: PlotIndex) -> str:
    """A `dvc.yaml` that lies beside the figures, so that `dvc plots show` has them; no stage, nothing that DVC runs."""
    lines = [f"  - {name}.svg" for name in index.figures]
    return "\n".join(["# Written by `dspark plots`, for `dvc plots show`.", "plots:", *lines]) + "\n"


def draw_build(workspace: Workspace, resolved: ResolvedBuild) -> Drawn:
    """The figures of a build, and the reasons for those that cannot be drawn."""
    return draw(plot_sources(workspace, resolved))


def plot_sources(workspace: Workspace, resolved: ResolvedBuild) -> PlotSources:
    """Where the stages of a build write, or would."""
    folder = workspace.build(resolved.name)
    costs: dict[str, Path] = {}
    certificates: dict[str, Path] = {}
    for instance in instances(resolved):
        output = workspace.root / instance.stage.output(instance.key, instance.entry)
        if instance.stage.name == "profile":
            costs[instance.entry["profile"]] = output / "cost.json"
        elif instance.stage.name == "certify":
            certificates[instance.entry["profile"]] = output
    return PlotSources(
        folder / "evaluate", folder / "calibrate", certificates, costs, workspace.root, train=folder / "train"
    )
