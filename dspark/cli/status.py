"""`dspark status`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dspark.cli.options import as_json, duration, print_json, print_table, short, workspace_of
from dspark.errors import PreflightError

if TYPE_CHECKING:
    from dspark.workspace.status import Standing


@click.command()
@as_json
@click.pass_context
def status(context: click.Context, json_output: bool) -> None:
    """Show how the newest run and the last exports stand; works while they run, from any terminal."""
    from dspark.io.jsonfile import model_json
    from dspark.workspace.exports import read_exports
    from dspark.workspace.status import status as read_status

    workspace = workspace_of(context)
    exports = read_exports(workspace)
    try:
        standing = read_status(workspace)
    except PreflightError:
        if not exports:
            raise
        standing = None
    if json_output:
        told = standing.as_json() if standing else {"schema": "dspark/status/1"}
        print_json({**told, **({"exports": [model_json(one) for one in exports]} if exports else {})})
        return
    if standing is not None:
        _show(standing)
    rows = [(f"export of {one.target}", one.state, duration(one.seconds), one.message or one.out) for one in exports]
    if rows:
        print_table(rows)


def _show(standing: Standing) -> None:
    from dspark.cli.display import sentence

    record = standing.record
    since = "for" if standing.state == "running" else "after"
    took = duration(standing.seconds)
    click.echo(f"build {record.build}: {standing.state} {since} {took}  ({short(standing.folder)})")
    rows = []
    for outcome in standing.stages:
        running = outcome.name == standing.running
        took = duration(outcome.seconds) if outcome.seconds is not None else ""
        detail = sentence(standing.progress) if running and standing.progress else outcome.message
        rows.append((f"  {outcome.name}", "running" if running else outcome.status, took, detail))
    print_table(rows)
    if standing.state in ("killed", "interrupted"):
        click.echo(f"go on from where it stopped: {record.command}")
    elif standing.state == "failed" and record.message:
        click.echo(f"failed: {record.message}")
