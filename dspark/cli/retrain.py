"""`dspark retrain`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dspark.cli.options import (
    as_json,
    how_to_run,
    one_output,
    print_json,
    request_of,
    tracking_address,
    which_build,
    workspace_of,
)

if TYPE_CHECKING:
    from dspark.workspace.retrain import Retrained


@click.command()
@which_build
@click.option("--domain", required=True, metavar="NAME", help="The domain to learn, declared or given by --prompts.")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Declare it from this JSON lines file; a copy is kept in pipeline/domains.",
)
@click.option(
    "--replay",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.5,
    show_default=True,
    help="Share of the training that all other domains get, so that they are not forgotten.",
)
@click.option(
    "--from",
    "source",
    metavar="PACKAGE",
    help="Go on from a package's folder or from models:/NAME@ALIAS.  [default: what is in production]",
)
@how_to_run
@as_json
@click.pass_context
def retrain(
    context: click.Context,
    target: str | None,
    build: str | None,
    flags: tuple[str, ...],
    domain: str,
    prompts: Path | None,
    replay: float,
    source: str | None,
    no_publish: bool,
    quiet: bool,
    events: str | None,
    debug: bool,
    tracking_uri: str | None,
    json_output: bool,
) -> None:
    """Train on from the drafter in production for a new domain, and register the candidate.

    The build's other domains are replayed; their answers and features are in the store and are not made again. All
    domains, old and new, are measured against the champion on the same prompts. No file of the build is changed.
    """
    from dspark.cli.display import shown
    from dspark.cli.run import show
    from dspark.workspace.retrain import Retraining
    from dspark.workspace.retrain import retrain as retrain_build

    one_output(json_output, events)
    workspace = workspace_of(context)
    request = request_of(
        target,
        build,
        flags,
        publish=not no_publish,
        debug=debug or context.obj["debug"],
        tracking_uri=tracking_uri,
    )
    asked = Retraining(domain, prompts, replay, source, tracking_address(context, tracking_uri))
    with shown(quiet=quiet, events=events) as listener:
        retrained = retrain_build(workspace, request, asked, listener)
    if json_output:
        print_json(retrained.as_json())
    elif events != "-":
        show(retrained.report)
        _show_gates(retrained)


def _show_gates(retrained: Retrained) -> None:
    """Candidate beside champion, domain by domain, and what else a promotion would look at."""
    from dspark.cli.promote import show_gates

    if retrained.gates is None:
        click.echo(f"measured against package {retrained.champion}; there is no pipeline/gates.yaml to judge it by")
        return
    show_gates(retrained.gates)
