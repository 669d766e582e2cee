"""`dspark run`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import click

from dspark.cli.options import (
    as_json,
    duration,
    how_to_run,
    one_output,
    print_json,
    print_table,
    request_of,
    which_build,
    workspace_of,
)

if TYPE_CHECKING:
    from dspark.workspace.run import Report


@click.command()
@which_build
@how_to_run
@as_json
@click.pass_context
def run(
    context: click.Context,
    target: str | None,
    build: str | None,
    flags: tuple[str, ...],
    no_publish: bool,
    tracking_uri: str | None,
    quiet: bool,
    events: str | None,
    debug: bool,
    json_output: bool,
) -> None:
    """Make the package of a target or build and register it, doing only what is not done yet.

    Ctrl-C stops at the next safe point; the same command goes on from there.
    """
    from dspark.cli.display import shown
    from dspark.workspace.run import run as run_build

    one_output(json_output, events)
    workspace = workspace_of(context)
    request = request_of(
        target,
        build,
        flags,
        publish=not no_publish,
        debug=debug or context.obj["debug"],
        tracking_uri=tracking_uri,
    )
    with shown(quiet=quiet, events=events) as listener:
        report = run_build(workspace, request, listener)
    if json_output:
        print_json(report.as_json())
    elif events != "-":
        show(report)


def show(report: Report) -> None:
    """The result of a run as text."""
    counts = Counter(outcome.status for outcome in report.stages)
    told = ", ".join(f"{count} {status}" for status, count in counts.items())
    click.echo(f"{report.build}: {len(report.stages)} stages ({told}) in {duration(report.seconds)}")
    summary = report.summary
    if summary is None:
        return
    click.echo(f"{summary.verdict.headline}.")
    for told in summary.verdict.lines:
        click.echo(f"  {told}")
    print_table([(f"  {line.name}", str(line)) for line in summary.lines])
    for note in summary.notes:
        click.echo(f"note     {note}")
    click.echo(f"package  {summary.package}")
    click.echo(f"digest   {summary.package_digest}")
    if summary.model_name:
        click.echo(f"model    {summary.model_name} version {summary.version}, alias candidate")
    click.echo(f"report   dspark report {summary.build}")
    click.echo(f"next     dspark package verify {summary.package} --digest {summary.package_digest}")
