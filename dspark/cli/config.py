"""`dspark config`, and the settings as `dspark plan --settings` shows them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from dspark.cli.options import as_json, print_json, print_table, request_of, which_build, workspace_of
from dspark.cli.root import Subverbs

if TYPE_CHECKING:
    from dspark.config.build import ResolvedBuild


@click.group(cls=Subverbs, subcommand_metavar="VERB ...")
def config() -> None:
    """Show the settings that a build comes to."""


@config.command()
@which_build
@click.option("--origin", is_flag=True, help="And where each comes from: a file with its line, a variable, a flag.")
@as_json
@click.pass_context
def show(
    context: click.Context,
    target: str | None,
    build: str | None,
    flags: tuple[str, ...],
    origin: bool,
    json_output: bool,
) -> None:
    """What a build is made of, and every setting of it.

    Later layers win: built-in, params.yaml, recipe, build, environment (DSPARK_SECTION__KEY), --set.
    """
    from dspark.workspace.run import resolve_request

    resolved = resolve_request(workspace_of(context), request_of(target, build, flags)).chosen
    print_settings(resolved, origin=origin, json_output=json_output)


def print_settings(resolved: ResolvedBuild, *, origin: bool = True, json_output: bool = False) -> None:
    """Print every setting of a build; as JSON always with its origin."""
    rows = [*resolved.parts(), *resolved.rows()]
    if json_output:
        named = {name: {"value": value, "from": where} for name, value, where in rows}
        print_json({"schema": "dspark/settings/1", "settings": named})
    elif origin:
        print_table([(name, json.dumps(value), where) for name, value, where in rows], ("setting", "value", "from"))
    else:
        print_table([(name, json.dumps(value)) for name, value, _ in rows], ("setting", "value"))
