"""`dspark targets`."""

from __future__ import annotations

from pathlib import Path

import click

from dspark.cli.completion import names_of
from dspark.cli.options import as_json, print_json, print_table, quiet_option, short, size, workspace_of
from dspark.cli.root import Subverbs


@click.group(cls=Subverbs, subcommand_metavar="VERB ...")
def targets() -> None:
    """List, show, add, fetch and export targets."""


@targets.command("list")
@as_json
@click.pass_context
def list_all(context: click.Context, json_output: bool) -> None:
    """All targets of the workspace."""
    from dspark.workspace.catalogue import describe_targets

    rows = describe_targets(workspace_of(context))
    if json_output:
        print_json({"schema": "dspark/targets/1", "targets": [row.as_json() for row in rows]})
        return
    print_table([(row.name, row.state, row.source, row.description) for row in rows], ("name", "state", "source", ""))


@targets.command()
@click.argument("name", shell_complete=names_of("target"))
@as_json
@click.pass_context
def show(context: click.Context, name: str, json_output: bool) -> None:
    """What is declared about a target, and what is known once it was fetched."""
    from dspark.workspace.catalogue import describe_target

    row = describe_target(workspace_of(context), name)
    if json_output:
        print_json({"schema": "dspark/target-description/1", **row.as_json()})
        return
    facts = {"name": row.name, "state": row.state, "source": row.source, "description": row.description, **row.facts}
    print_table([(key.replace("_", " "), value) for key, value in facts.items() if value])


@targets.command()
@click.argument("name")
@click.argument("path", type=click.Path(path_type=Path))
@click.pass_context
def add(context: click.Context, name: str, path: Path) -> None:
    """Name a model that lies in a local folder (the transformers layout)."""
    from dspark.workspace.catalogue import add_local_target

    workspace = workspace_of(context)
    file = add_local_target(workspace, name, path)
    click.echo(f"wrote {short(file)}")
    click.echo(f"next: dspark run --target {name}")


@targets.command()
@click.argument("name", shell_complete=names_of("target"))
@click.pass_context
def fetch(context: click.Context, name: str) -> None:
    """Fetch and convert a target now, rather than in its first run."""
    from dspark.cli.display import shown
    from dspark.workspace.catalogue import fetch_target

    workspace = workspace_of(context)
    with shown() as listener:
        record = fetch_target(workspace, name, listener)
    click.echo(f"{name} {record.revision}: {short(workspace.target_record(name))}")


@targets.command()
@click.argument("name", shell_complete=names_of("target"))
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="New, or an earlier export.")
@quiet_option
@as_json
@click.pass_context
def export(context: click.Context, name: str, out: Path, quiet: bool, json_output: bool) -> None:
    """Write a target as ONNX, in float32, to decode with a package's drafter where no torch is.

    It is compared with torch on prompts of the workspace's domains; exit code 6 if it says anything else.
    """
    from dspark.cli.display import shown
    from dspark.io.jsonfile import model_json
    from dspark.workspace.export import export_target

    with shown(quiet=quiet, events=None) as listener:
        description = export_target(workspace_of(context), name, out, listener)
    if json_output:
        print_json({**model_json(description), "folder": str(out)})
        return
    compared = description.compared
    print_table(
        [
            ("folder", str(out)),
            ("weights", f"{size(description.weights.bytes)}, float32"),
            (
                "compared",
                f"{compared.positions} positions of {compared.prompts} prompts: logits within "
                f"{compared.max_logit_difference:.1g} (tolerance {compared.logit_tolerance:g}), "
                f"{compared.greedy_tokens - compared.near_ties} greedy tokens equal, {compared.near_ties} near ties",
            ),
            ("next", f"python examples/onnxruntime/decode.py --drafter PACKAGE/engines/onnxruntime --target {out}"),
        ]
    )
