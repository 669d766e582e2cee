"""`dspark promote` and `dspark rollback`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dspark.cli.options import (
    as_json,
    print_json,
    print_table,
    quiet_option,
    require_place,
    tracking_address,
    which_registry,
    workspace_of,
)
from dspark.errors import GateError

if TYPE_CHECKING:
    from dspark.registry.gate_report import GateReport
    from dspark.registry.promotion import Promotion

_STAGES = click.Choice(("staging", "production"))


@click.command()
@click.argument("model")
@click.option("--to", "stage", required=True, type=_STAGES, help="The stage to promote into.")
@click.option("--version", type=click.IntRange(1), help="Of the model.  [default: what --from names]")
@click.option(
    "--from",
    "alias",
    default="candidate",
    show_default=True,
    type=click.Choice(("candidate", "staging", "production")),
    help="Promote what holds this.",
)
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    metavar="NAME",
    help="A serving profile that it shall run on. Can be repeated.  [default: those of the build]",
)
@click.option("--dry-run", is_flag=True, help="Ask the gates and change nothing.")
@click.option("--force", is_flag=True, help="Promote what the gates refuse; the mark of it stays. Needs --reason.")
@click.option("--reason", metavar="TEXT", help="Why; stays with the promotion.")
@click.option(
    "--summary",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Append what the gates said, as Markdown; in CI the summary of the job.",
)
@quiet_option
@which_registry
@as_json
@click.pass_context
def promote(
    context: click.Context,
    model: str,
    stage: str,
    version: int | None,
    alias: str,
    profiles: tuple[str, ...],
    dry_run: bool,
    force: bool,
    reason: str | None,
    summary: Path | None,
    quiet: bool,
    tracking_uri: str | None,
    json_output: bool,
) -> None:
    """Promote a registered version of MODEL (a build, or dspark-BUILD) if its gates are open; exit code 6 if not.

    Nothing of the package is run: its digests are verified, and the gates of pipeline/gates.yaml read its evidence.
    """
    from dspark.cli.display import shown
    from dspark.workspace.promote import PromoteRequest
    from dspark.workspace.promote import promote as promote_version

    if summary is not None:
        require_place("--summary", summary)
    request = PromoteRequest(
        model,
        "production" if stage == "production" else "staging",
        tracking_address(context, tracking_uri),
        version=version,
        alias=alias,
        profiles=profiles,
        reason=reason,
        force=force,
        dry_run=dry_run,
    )
    with shown(quiet=quiet, events=None) as listener:
        promotion = promote_version(workspace_of(context), request, listener)
    if summary is not None and promotion.gates is not None:
        from dspark.report.gates import gate_markdown

        with summary.open("a", encoding="utf-8") as out:
            out.write(gate_markdown(promotion.gates))
    _report(promotion, json_output)
    if promotion.outcome == "refused" and promotion.gates is not None:
        shut = [row.gate for row in promotion.gates.refusals]
        count = f"{len(shut)} of {len(promotion.gates.rows)} gates"
        raise GateError(
            f"{promotion.model} version {promotion.source_version}: {count} are shut: {', '.join(shut)}",
            "measure what is undecided on more prompts, or train on; --force --reason TEXT leaves a permanent mark",
        )


@click.command()
@click.argument("model")
@click.option("--stage", default="production", show_default=True, type=_STAGES, help="The stage to roll back.")
@click.option("--reason", required=True, metavar="TEXT", help="Why; stays with the rollback.")
@click.option("--dry-run", is_flag=True, help="Say what it would go back to and change nothing.")
@quiet_option
@which_registry
@as_json
@click.pass_context
def rollback(
    context: click.Context,
    model: str,
    stage: str,
    reason: str,
    dry_run: bool,
    quiet: bool,
    tracking_uri: str | None,
    json_output: bool,
) -> None:
    """Let what held a stage of MODEL before hold it again; history keeps both. No gates are asked.

    Rolling back twice goes back two promotions.
    """
    from dspark.cli.display import shown
    from dspark.workspace.promote import PromoteRequest
    from dspark.workspace.promote import rollback as roll_back

    request = PromoteRequest(
        model,
        "production" if stage == "production" else "staging",
        tracking_address(context, tracking_uri),
        reason=reason,
        dry_run=dry_run,
    )
    with shown(quiet=quiet, events=None) as listener:
        promotion = roll_back(workspace_of(context), request, listener)
    _report(promotion, json_output)


def _report(promotion: Promotion, json_output: bool) -> None:
    if json_output:
        print_json(promotion.as_json())
        return
    for line in promotion.mended:
        click.echo(f"mended: {line}", err=True)
    if promotion.gates is not None:
        show_gates(promotion.gates)
    before = f"version {promotion.replaces}" if promotion.replaces is not None else "nobody"
    name = f"{promotion.model} version {promotion.source_version}"
    if promotion.outcome == "done" and promotion.link is not None:
        forced = ", against the gates" if promotion.link.forced else ""
        click.echo(f"{name} holds {promotion.stage} now, in place of {before}{forced}")
        click.echo(f"next     dspark package pull models:/{promotion.model}@{promotion.stage} DIR")
    elif promotion.outcome == "already":
        click.echo(f"{name} holds {promotion.stage} already")
    elif promotion.outcome == "would":
        click.echo(f"{name} would hold {promotion.stage}, in place of {before}; nothing was changed")


def show_gates(report: GateReport) -> None:
    """The gates as a table, and what they come to."""
    from dspark.report.gates import HEADER, gate_cells, gate_conclusion

    print_table(gate_cells(report), HEADER)
    click.echo(gate_conclusion(report))
