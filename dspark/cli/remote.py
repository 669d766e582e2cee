"""`dspark remote push` and `dspark remote pull`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dspark.cli.options import as_json, print_json, print_table, quiet_option, request_of, which_build, workspace_of
from dspark.cli.root import Subverbs

if TYPE_CHECKING:
    from dspark.workspace.remote import Direction


@click.group(cls=Subverbs)
def remote() -> None:
    """Share what stages made, through the remote that `dvc remote add --default NAME URL` names."""


@remote.command()
@which_build
@quiet_option
@as_json
@click.pass_context
def push(
    context: click.Context,
    target: str | None,
    build: str | None,
    flags: tuple[str, ...],
    quiet: bool,
    json_output: bool,
) -> None:
    """Copy the outputs of a build's stages to the remote. Commit dvc.lock with it, which names them."""
    _transfer(context, target, build, flags, "push", quiet=quiet, json_output=json_output)


@remote.command()
@which_build
@quiet_option
@as_json
@click.pass_context
def pull(
    context: click.Context,
    target: str | None,
    build: str | None,
    flags: tuple[str, ...],
    quiet: bool,
    json_output: bool,
) -> None:
    """Fetch what dvc.lock names of a build's stages, so that `dspark run` does not make it again.

    Outputs that were changed here are never overwritten. Exit code 3 if the remote lacks something, 8 if it does not
    answer.
    """
    _transfer(context, target, build, flags, "pull", quiet=quiet, json_output=json_output)


def _transfer(
    context: click.Context,
    target: str | None,
    build: str | None,
    flags: tuple[str, ...],
    direction: Direction,
    *,
    quiet: bool,
    json_output: bool,
) -> None:
    from dspark.cli.display import shown
    from dspark.workspace.remote import transfer
    from dspark.workspace.results import command_line

    with shown(quiet=quiet, events=None) as listener:
        done = transfer(workspace_of(context), request_of(target, build, flags), direction, listener)
    if json_output:
        print_json(done.as_json())
        return
    click.echo(f"{done.build}: {len(done.stages)} stages, {done.files} files copied, the others were there")
    print_table([("not made", name) for name in done.unmade])
    if direction == "push":
        click.echo("next     git add --force dvc.lock, commit it, and where it is checked out:")
        click.echo(f"         {command_line(['remote', 'pull'], done.build, flags)}")
    else:
        click.echo(f"next     {command_line(['run'], done.build, flags)}")
