"""`dspark dag`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from dspark.cli.options import as_json, print_json, print_table, request_of, which_build, workspace_of

if TYPE_CHECKING:
    from dspark.workspace.dag import Dag


@click.command()
@which_build
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "mermaid", "dot"]),
    default="text",
    show_default=True,
    help="A table, a diagram for Markdown, or for Graphviz.",
)
@as_json
@click.pass_context
def dag(
    context: click.Context, target: str | None, build: str | None, flags: tuple[str, ...], form: str, json_output: bool
) -> None:
    """Show the stages and what each reads: of a build, or without a name the pipeline as such.

    \b
    dspark dag
    dspark dag --target tiny --format dot | dot -Tsvg > dag.svg
    """
    from dspark.workspace.dag import dag_of, dag_of_stages

    if target is None and build is None:
        if flags:
            raise click.UsageError("--set goes with --target or --build")
        found = dag_of_stages()
    else:
        from dspark.workspace.run import resolve_request

        found = dag_of(resolve_request(workspace_of(context), request_of(target, build, flags)).chosen)
    if json_output:
        if form != "text":
            raise click.UsageError(f"--json and --format {form} both print to stdout: give one of them")
        print_json(found.as_json())
    elif form == "text":
        print_table([(name, ", ".join(found.read_by(name)) or "-") for name in found.nodes], ("stage", "reads"))
    else:
        click.echo(mermaid(found) if form == "mermaid" else dot(found))


def mermaid(found: Dag) -> str:
    """A flowchart as Markdown renderers draw it."""
    number = {name: f"s{index}" for index, name in enumerate(found.nodes)}
    lines = ["flowchart TD"]
    lines += [f'    {number[name]}["{name}"]' for name in found.nodes]
    lines += [f"    {number[before]} --> {number[after]}" for before, after in found.edges]
    return "\n".join(lines)


def dot(found: Dag) -> str:
    """A graph for Graphviz."""
    lines = ["digraph dspark {", "    node [shape=box];"]
    lines += [f"    {json.dumps(name)};" for name in found.nodes]
    lines += [f"    {json.dumps(before)} -> {json.dumps(after)};" for before, after in found.edges]
    return "\n".join([*lines, "}"])
