"""`dspark doctor`."""

from __future__ import annotations

import click

from dspark.cli.options import as_json, print_json, print_table
from dspark.errors import PreflightError


@click.command()
@click.option("--fix", is_flag=True, help="Mend what can be mended without losing anything.")
@as_json
@click.pass_context
def doctor(context: click.Context, fix: bool, json_output: bool) -> None:
    """Look at the environment and the workspace; exit code 3 if something is broken."""
    from dspark.workspace.doctor import examine
    from dspark.workspace.layout import find_workspace

    try:
        workspace = find_workspace(context.obj["workspace"])
    except PreflightError:
        if context.obj["workspace"] is not None:
            raise
        workspace = None
    diagnosis = examine(workspace, fix=fix)
    if json_output:
        print_json(diagnosis.as_json())
    else:
        for line in diagnosis.repaired:
            click.echo(f"mended: {line}")
        print_table([(check.status, check.name, check.found) for check in diagnosis.checks])
        for check in diagnosis.checks:
            if check.fix:
                click.echo(f"{check.name}: {check.fix}")
    if not diagnosis.healthy:
        context.exit(PreflightError.exit_code)
