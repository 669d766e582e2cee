"""`dspark plots`."""

from __future__ import annotations

from pathlib import Path

import click

from dspark.cli.completion import names_of
from dspark.cli.options import as_json, print_json, print_table, request_of, short, workspace_of


@click.command()
@click.argument("build", metavar="BUILD", shell_complete=names_of("build", "target"))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A new folder, or one of plots.  [default: builds/BUILD/plots]",
)
@as_json
@click.pass_context
def plots(context: click.Context, build: str, out: Path | None, json_output: bool) -> None:
    """Draw what a build has measured: SVG for people, the same numbers as CSV beside it.

    Acceptance by position, reliability before and after calibration, the threshold sweep, throughput against speed per
    user, verification budget against load, step times. What was not measured is named with its reason.
    """
    from dspark.io.jsonfile import model_json
    from dspark.workspace.plots import plot_build
    from dspark.workspace.results import flags_of
    from dspark.workspace.run import resolve_request

    workspace = workspace_of(context)
    resolved = resolve_request(workspace, request_of(None, build, flags_of(workspace.runs, build))).chosen
    folder, index = plot_build(workspace, resolved, out)
    if json_output:
        print_json({**model_json(index), "folder": str(folder)})
        return
    print_table([(short(folder / f"{name}.svg"), title) for name, title in index.figures.items()])
    for name, reason in index.absent.items():
        click.echo(f"not drawn: {name} ({reason})")
