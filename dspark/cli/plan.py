"""`dspark plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dspark.cli.options import (
    as_json,
    duration,
    print_json,
    print_table,
    request_of,
    size,
    which_build,
    workspace_of,
)

if TYPE_CHECKING:
    from dspark.workspace.plan import Plan


@click.command()
@which_build
@click.option("--settings", is_flag=True, help="Show every setting of the build instead, and where it comes from.")
@click.option(
    "--estimate", is_flag=True, help="Show tokens, bytes, memory and time instead, before anything is fetched or run."
)
@click.option("--tokens", type=click.IntRange(min=1), metavar="N", help="With --estimate: of so many tokens.")
@click.option(
    "--what-if",
    "change",
    metavar="KEY=VALUE[,...]",
    help="Predict what the finished build would do with gamma=N, profile=NAME, concurrency=N instead.",
)
@as_json
@click.pass_context
def plan(
    context: click.Context,
    target: str | None,
    build: str | None,
    flags: tuple[str, ...],
    settings: bool,
    estimate: bool,
    tokens: int | None,
    change: str | None,
    json_output: bool,
) -> None:
    """Show which stages a run would do and why, what they took last time and what they leave."""
    from dspark.workspace.plan import plan as make_plan
    from dspark.workspace.run import resolve_request

    if sum((settings, estimate, change is not None)) > 1:
        raise click.UsageError("--settings, --estimate and --what-if show different things: give one of them")
    if tokens is not None and not estimate:
        raise click.UsageError("--tokens goes with --estimate")
    workspace = workspace_of(context)
    pipeline = resolve_request(workspace, request_of(target, build, flags))
    if settings:
        from dspark.cli.config import print_settings

        print_settings(pipeline.chosen, json_output=json_output)
        return
    if estimate:
        from dspark.cli.estimate import print_estimate
        from dspark.workspace.estimate import estimate as make_estimate

        print_estimate(make_estimate(workspace, pipeline.chosen, tokens), json_output=json_output)
        return
    if change is not None:
        from dspark.cli.what_if import print_what_if

        print_what_if(workspace, pipeline.chosen.name, change, json_output=json_output)
        return
    found = make_plan(workspace, pipeline)
    if json_output:
        print_json(found.as_json())
        return
    click.echo(f"build {found.build}, target {found.target}, {size(found.free_bytes)} free on the disk")
    rows = [
        (
            step.name,
            step.action,
            duration(step.last_seconds) if step.last_seconds is not None else "",
            size(step.bytes) if step.bytes is not None else "",
            step.reason,
        )
        for step in found.steps
    ]
    print_table(rows, ("stage", "plan", "took", "on disk", "why"))
    for problem in found.problems:
        click.echo(f"in the way: {problem.what}")
        for line in problem.hint.splitlines():
            click.echo(f"  {line}")
    _sum_up(found, flags)


def _sum_up(found: Plan, flags: tuple[str, ...]) -> None:
    """How much is to be done, how long that took when it was last done here, and the next command."""
    from dspark.workspace.results import command_line

    acting = [step for step in found.steps if step.action != "up to date"]
    known = [step.last_seconds for step in acting if step.last_seconds is not None]
    told = f"{len(acting)} of {len(found.steps)} to do"
    if known:
        told += f"; {len(known)} of them took {duration(sum(known))} last time"
    click.echo(told if acting else "nothing to do")
    if len(known) < len(acting):
        estimate = command_line(["plan"], found.build, flags, ["--estimate"])
        click.echo(f"what the others may take: {estimate}")
    if acting and not found.problems:
        click.echo(f"next  {command_line(['run'], found.build, flags)}")
