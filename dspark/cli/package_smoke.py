"""`dspark package smoke`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dspark.cli.options import as_json, end_with_verdict, package_option, print_table

if TYPE_CHECKING:
    from dspark.evaluation.smoke import Latency
    from dspark.workspace.smoke import SmokeReport

CODES = {"healthy": 0, "unhealthy": 9, "not comparable": 6}


@click.command()
@click.argument("url")
@package_option
@click.option("--prompts", type=click.IntRange(min=1), default=20, show_default=True, help="How many are asked.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="Until all must have been answered.",
)
@click.option("--profile", metavar="NAME", help="Serving profile that was certified (default: the nearest one).")
@as_json
@click.pass_context
def smoke(
    context: click.Context,
    url: str,
    folder: Path,
    prompts: int,
    timeout: float,
    profile: str | None,
    json_output: bool,
) -> None:
    """Ask a server that has just been started some prompts; exit code 0 if it is as certified: a readiness probe.

    Exit code 9 if it accepts less than it should or answers slowly, 6 if it does not speculate as certified, 8 if it
    does not answer in time. Others should not use the server meanwhile.
    """
    from dspark.workspace.smoke import smoke as smoke_server

    report = smoke_server(folder, url, prompts=prompts, timeout=timeout, profile=profile)
    end_with_verdict(context, report, _show, CODES[report.smoke.verdict], json_output=json_output)


def _show(report: SmokeReport) -> None:
    from dspark.report.words import percent

    found = report.smoke
    rows = [
        ("package", f"{report.package} {report.subject}"),
        ("engine", f"{report.engine}, against the entry {report.profile}"),
        ("prompts", f"{found.prompts}, each against its own records" if found.compared_with == "records" else
         f"{found.prompts}, against their domains' certified tau"),
    ]  # fmt: skip
    if found.tau is not None:
        rows += [
            ("tau", f"{found.tau.engine_tau}, expected {found.tau.offline_tau}"),
            ("difference", percent(found.tau.relative_difference)),
            ("first token", _latency(found.first_token)),
            ("between tokens", _latency(found.between_tokens)),
        ]
    rows += [("not as certified", field) for field in report.fields]
    print_table(rows)
    click.echo(f"{found.verdict}{': ' if found.reasons else ''}{'; '.join(found.reasons)}")


def _latency(latency: Latency | None) -> str:
    if latency is None:
        return "not certified"
    return f"{latency.seconds:.3g} s, certified {latency.certified_seconds:.3g} s"
