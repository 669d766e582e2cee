"""What `dspark evaluate --study` does and shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dspark.cli.options import duration, print_json, print_table, short

if TYPE_CHECKING:
    from dspark.evaluation.load_report import LoadReport
    from dspark.report.study import StudyReport
    from dspark.workspace.layout import Workspace
    from dspark.workspace.run import Request
    from dspark.workspace.study import Studied


def evaluate_study(
    workspace: Workspace, request: Request, name: str, *, quiet: bool, events: str | None, json_output: bool
) -> None:
    """Make the builds of a study, as far as that is not done, and show them side by side.

    Args:
        request: the build it is about, and flags for all variants.
        name: of the study.
        events: a file for progress as JSON lines, or `-`.
    """
    from dspark.cli.display import shown
    from dspark.workspace.study import study

    with shown(quiet=quiet, events=events) as listener:
        studied = study(workspace, request, name, listener)
    if json_output:
        print_json(studied.as_json())
    elif events != "-":
        _show(studied)


def _show(studied: Studied) -> None:
    from dspark.evaluation.load_report import LoadReport

    report, run = studied.report, studied.run
    ran = sum(outcome.status == "ran" for outcome in run.stages)
    took = f"{ran} of {len(run.stages)} stages ran in {duration(run.seconds)}"
    click.echo(f"study {report.study} of {report.build}: {took}")
    if isinstance(report, LoadReport):
        _show_load(report)
    else:
        _show_variants(report)
    for file in studied.files:
        click.echo(short(studied.folder / file))


def _show_variants(report: StudyReport) -> None:
    from dspark.report.study_tables import study_table

    header, rows = study_table(report)
    print_table(rows, header)
    for variant in report.variants:
        for what, reason in variant.absent.items():
            click.echo(f"not measured: {what} of {variant.build} ({reason})")


def _show_load(report: LoadReport) -> None:
    from dspark.report.load_study import gains_table, load_table, prediction_table

    for make in (load_table, gains_table, prediction_table):
        header, rows = make(report)
        print_table(rows, header)
        click.echo()
    for name, reason in report.absent.items():
        click.echo(f"not measured: policy {name} ({reason})")
    click.echo(
        f"predictions of {len(report.compared)} points are off by {report.median_tokens_per_second_error:.1%} in "
        f"tokens/s and {report.median_latency_per_token_error:.1%} in seconds per token (medians)"
    )
