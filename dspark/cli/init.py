"""`dspark init`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dspark.cli.options import as_json, print_json, short

if TYPE_CHECKING:
    from dspark.workspace.scaffold import Change


@click.command()
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--git/--no-git",
    "git",
    default=None,
    help="Make a repository of it if it is in none / leave .gitignore alone.  [default: only the lines in .gitignore]",
)
@click.option("--upgrade", is_flag=True, help="Show what this dspark would change in a workspace that is there.")
@click.option("--yes", is_flag=True, help="With --upgrade: change it.")
@as_json
@click.pass_context
def init(
    context: click.Context, folder: Path | None, git: bool | None, upgrade: bool, yes: bool, json_output: bool
) -> None:
    """Write the files of a workspace into a folder, which may hold a project already.

    All of them or nothing: a file of the same name that differs is named and stays. Edit what you like; --upgrade tells
    your edits from what a newer dspark changed, and puts its version beside what both have changed.
    """
    if yes and not upgrade:
        raise click.UsageError("--yes goes with --upgrade: dspark init --upgrade --yes")
    where = folder or context.obj["workspace"] or Path()
    if upgrade:
        if git is not None:
            raise click.UsageError("--git and --no-git are for a new workspace, not for --upgrade")
        _upgrade(where, yes, json_output)
        return
    from dspark.workspace.scaffold import scaffold

    written = scaffold(where, git=git)
    if json_output:
        print_json({"schema": "dspark/init/1", "folder": str(where.absolute()), "written": written})
        return
    if written:
        click.echo(f"made a workspace in {short(where.absolute())}: {len(written)} files")
    else:
        click.echo(f"{short(where.absolute())} is a workspace already, and complete")
    inside = "" if where.resolve() == Path.cwd().resolve() else f"cd {shlex.quote(str(where))} && "
    click.echo(f"next  {inside}dspark plan --target tiny")


def _upgrade(folder: Path, yes: bool, json_output: bool) -> None:
    from dspark.workspace.layout import find_workspace
    from dspark.workspace.scaffold import changes
    from dspark.workspace.scaffold import upgrade as apply

    workspace = find_workspace(folder)
    found = apply(workspace, lambda line: click.echo(line, err=True)) if yes else changes(workspace)
    if json_output:
        rows = [{"path": one.path, "kind": one.kind, "written": one.written, "diff": one.diff} for one in found]
        print_json({"schema": "dspark/upgrade/1", "folder": str(workspace.root), "applied": yes, "changes": rows})
        return
    if not found:
        click.echo(f"{short(workspace.root)}: nothing to change")
        return
    if not yes:
        for change in found:
            click.echo(change.diff)
    _tell(found, yes)
    if not yes:
        click.echo(f"next  dspark init --upgrade --yes {shlex.quote(str(folder))}")


def _tell(found: list[Change], yes: bool) -> None:
    verb = "" if yes else "would be "
    for kind in ("new", "changed"):
        if paths := [change.path for change in found if change.kind == kind]:
            click.echo(f"{verb}{kind}: {', '.join(paths)}")
    for change in found:
        if change.kind == "edited":
            click.echo(f"{change.path}: edited here and changed in dspark; to merge by hand: {change.written}")
