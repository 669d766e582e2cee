"""`dspark report`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from dspark.cli.options import as_json, print_json, short, size, tracking_address, which_registry, workspace_of


@click.command()
@click.argument("subject", metavar="[BUILD|PACKAGE]", required=False)
@click.option(
    "--against", metavar="BUILD|PACKAGE|champion", help="Compare with it; `champion` is what holds production."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="- prints it.  [default: builds/BUILD/report.html, or a file here; Markdown is printed]",
)
@click.option("--format", "form", type=click.Choice(("html", "md")), help="[default: what FILE ends in, or html]")
@which_registry
@as_json
@click.pass_context
def report(
    context: click.Context,
    subject: str | None,
    against: str | None,
    out: Path | None,
    form: Literal["html", "md"] | None,
    tracking_uri: str | None,
    json_output: bool,
) -> None:
    """Tell what a build or package is worth: one HTML file for a browser, or Markdown for the summary of a CI job.

    First whether it pays, where and by how much, then everything that was measured, what it was made from, and what is
    missing. Without an argument it is about the build of the newest run.
    """
    from dspark.io.atomic import write_text
    from dspark.report.page import render_html, render_markdown
    from dspark.workspace.report import Reporter, require_outside_packages

    form = form or ("md" if out is not None and out.suffix == ".md" else "html")
    printed = str(out) == "-" if out is not None else form == "md"
    if printed and json_output:
        raise click.UsageError("--json and the report both print to stdout: name a file with --out")
    if out is not None and not printed:
        require_outside_packages(out)
    reporter = Reporter(lambda: workspace_of(context), lambda: tracking_address(context, tracking_uri))
    page, evidence = reporter.page(subject, against)
    text = render_html(page) if form == "html" else render_markdown(page)
    if printed:
        click.echo(text, nl=False)
        return
    path = out if out is not None else reporter.destination(evidence)
    write_text(path, text)
    if json_output:
        print_json(
            {
                "schema": "dspark/report/1",
                "file": str(path),
                "format": form,
                "verdict": page.verdict.as_json(),
                "absent": page.absent,
            }
        )
        return
    click.echo(f"{page.verdict.headline}.")
    for line in page.verdict.lines:
        click.echo(f"  {line}")
    click.echo(f"report   {short(path.absolute())} ({size(len(text.encode()))})")
    click.echo(f"next     {page.steps[0].command}")
