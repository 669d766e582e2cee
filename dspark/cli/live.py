"""`dspark live`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dspark.cli.completion import names_of
from dspark.cli.options import (
    as_json,
    print_json,
    print_table,
    quiet_option,
    request_of,
    short,
    which_finished_build,
    workspace_of,
)

if TYPE_CHECKING:
    from dspark.evaluation.live_report import LiveReport


@click.command()
@which_finished_build
@click.option(
    "--load",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="YAML that declares the load: seconds or requests, peak, rounds, policies, ...",
)
@click.option(
    "--rival",
    "rivals",
    multiple=True,
    metavar="BUILD",
    shell_complete=names_of("build", "target"),
    help="A build of the same target whose drafter takes turns too, mtp1 for instance. Can be repeated.",
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="For the report.")
@quiet_option
@as_json
@click.pass_context
def live(
    context: click.Context,
    build: str | None,
    target: str | None,
    load: Path | None,
    rivals: tuple[str, ...],
    out: Path | None,
    quiet: bool,
    json_output: bool,
) -> None:
    """Ask a trained build a load that rises and falls, under every policy in turn, in the reference engine.

    Requests come at random, whether or not others are done, so a faster policy has fewer of them at a time. Writes
    live.json, timeline.csv and summary.csv. Let nothing else run meanwhile: it is timed.
    """
    from dspark.cli.display import shown
    from dspark.io.jsonfile import model_json
    from dspark.workspace.live import live_load_of, read_load
    from dspark.workspace.run import resolve_request

    workspace = workspace_of(context)
    settings = read_load(load, workspace)
    name = resolve_request(workspace, request_of(target, build, ())).chosen.build.name
    with shown(quiet=quiet, events=None) as listener:
        report, folder = live_load_of(workspace, name, settings, listener, rivals=rivals, out=out)
    if json_output:
        print_json(model_json(report))
    else:
        _show(report, folder)


def _show(report: LiveReport, folder: Path) -> None:
    from dspark.report.words import significant

    lowest, highest = report.requests_per_second
    print_table(
        [
            ("load", f"{lowest:.3g} to {highest:.3g} and back requests/s for {report.seconds:.0f} s, "
             f"{report.settings.rounds} rounds, {report.requests} requests, {report.slots} slots"),
            ("best fixed length", f"{report.best_fixed} of {report.gamma}"),
        ]
    )  # fmt: skip
    click.echo()
    header = ("policy", "tokens/s", "p95 first s", "p95 between s", "s/token", "verified/s", "tokens/s against best")
    rows = []
    for name, arm in report.arms.items():
        against = arm.against.get(report.best_fixed)
        rows.append(
            (
                name,
                significant(arm.tokens_per_second),
                significant(arm.ttft_seconds.p95),
                significant(arm.itl_seconds.p95),
                significant(arm.seconds_per_token),
                significant(arm.verified_tokens_per_second),
                significant(against.tokens_per_second) if against is not None else "",
            )
        )
    print_table(rows, header)
    click.echo(f"\n95 % intervals over rounds; all figures and the timeline: {short(folder)}")
