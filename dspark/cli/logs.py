"""`dspark logs`."""

from __future__ import annotations

import sys

import click

from dspark.cli.completion import stage_names
from dspark.cli.options import print_table, short, workspace_of


@click.command()
@click.argument("stage", required=False, metavar="[STAGE]", shell_complete=stage_names)
@click.option("--follow", "-f", is_flag=True, help="Go on with what it prints until it ends.")
@click.option("--lines", "-n", type=click.IntRange(min=0), metavar="N", help="The last N lines only.")
@click.option("--path", "only_path", is_flag=True, help="Print where the file lies instead.")
@click.pass_context
def logs(context: click.Context, stage: str | None, follow: bool, lines: int | None, only_path: bool) -> None:
    """Print what a stage printed when it last ran; without a name, list the logs.

    STAGE is a stage such as `train`, with its key (`train@tiny`) where several ran; `dvc` is DVC's own output.
    """
    from dspark.workspace.logs import contents, log_of
    from dspark.workspace.logs import logs as all_logs

    workspace = workspace_of(context)
    if stage is None:
        if follow or lines is not None or only_path:
            raise click.UsageError("name the stage: dspark logs STAGE (dspark logs lists them)")
        print_table([(log.stage, short(log.path)) for log in all_logs(workspace)])
        return
    log = log_of(workspace, stage)
    if only_path:
        click.echo(short(log.path))
        return
    out = sys.stdout.buffer
    for data in contents(log, lines=lines, follow=follow):
        out.write(data)
        out.flush()
