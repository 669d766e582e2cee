"""`dspark status`."""

from __future__ import annotations

import click

from dspark.cli.options import as_json, duration, print_json, print_table, short, workspace_of


@click.command()
@as_json
@click.pass_context
def status(context: click.Context, json_output: bool) -> None:
    """Show how the newest run stands; works while it runs, from any terminal."""
    from dspark.cli.display import sentence
    from dspark.workspace.status import status as read_status

    standing = read_status(workspace_of(context))
    if json_output:
        print_json(standing.as_json())
        return
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
