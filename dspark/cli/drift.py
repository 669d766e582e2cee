"""`dspark drift`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dspark.cli.options import as_json, end_with_verdict, package_option, print_table

if TYPE_CHECKING:
    from dspark.evaluation.drift import Quantity
    from dspark.workspace.drift import DriftReport

CODES = {"within": 0, "drifted": 9, "not comparable": 6}


@click.command()
@package_option
@click.option("--metrics", required=True, metavar="URL|FILE", help="A server, or what its /metrics answered.")
@click.option("--since", type=click.Path(path_type=Path), metavar="FILE", help="An earlier scrape of that server.")
@click.option(
    "--seconds", type=click.FloatRange(min=0, min_open=True), metavar="N", help="Scrape twice, N seconds apart."
)
@click.option("--profile", metavar="NAME", help="Serving profile that was certified (default: the nearest one).")
@as_json
@click.pass_context
def drift(
    context: click.Context,
    folder: Path,
    metrics: str,
    since: Path | None,
    seconds: float | None,
    profile: str | None,
    json_output: bool,
) -> None:
    """Hold a server's live acceptance against the certificate; exit code 9 if it has drifted.

    One scrape holds everything since the server started; --since or --seconds makes a window. Exit code 6 if nothing
    can be compared, 8 if the server does not answer. Needs neither a workspace nor the pipeline.
    """
    from dspark.workspace.drift import check_drift

    report = check_drift(folder, metrics, since=since, seconds=seconds, profile=profile)
    end_with_verdict(context, report, _show, CODES[report.drift.verdict], json_output=json_output)


def _show(report: DriftReport) -> None:
    found, window = report.drift, report.drift.window
    took = f", {window.seconds:g} s" if window.seconds is not None else ""
    expired = f", which held until {report.expired}" if report.expired else ""
    print_table(
        [
            ("package", f"{report.package} {report.subject}"),
            ("engine", f"{report.engine}, against the entry {report.profile}{expired}"),
            (
                "window",
                f"{window.kind}{took}: {window.requests} requests, {window.steps} steps, {window.tokens} tokens",
            ),
        ]
    )
    click.echo()
    print_table(
        [(one.name, str(one.live or "-"), str(one.certified or "-"), _verdict(one)) for one in found.quantities],
        ("quantity", "live", "certified", "verdict"),
    )
    click.echo(f"\n{found.verdict}: {report.cause.text}")
    click.echo(f"an unchanged server is said to have drifted in {found.false_alarms:.0%} of checks, assuming:")
    for line in found.assumptions:
        click.echo(f"  {line}")


def _verdict(one: Quantity) -> str:
    parts = [one.verdict if one.reason is None else f"{one.verdict}: {one.reason}"]
    if one.unsure:
        parts.append(f"up to {one.unsure:.3f} may be missing in the live value")
    if one.verdict == "within" and one.detectable is not None:
        parts.append(f"{one.detectable:.3f} would mostly have been seen")
    if one.more_requests:
        parts.append(f"{one.more_requests} more requests would decide")
    elif one.verdict == "within":
        parts.append("more requests would not tell so small a difference")
    return "; ".join(parts)
