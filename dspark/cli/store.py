"""`dspark store`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dspark.cli.options import as_json, print_json, print_table, size, workspace_of
from dspark.cli.root import Subverbs
from dspark.errors import IntegrityError

if TYPE_CHECKING:
    from dspark.workspace.inventory import Item


@click.group(cls=Subverbs, subcommand_metavar="VERB ...")
def store() -> None:
    """See what lies in the stores, remove what nothing names, find what is damaged."""


@store.command("ls")
@click.option("--all", "everything", is_flag=True, help="One line per thing instead of one per user.")
@as_json
@click.pass_context
def list_all(context: click.Context, everything: bool, json_output: bool) -> None:
    """What lies there, what it takes, and which corpora, builds and targets use it."""
    from dspark.workspace.inventory import heaps, inventory
    from dspark.workspace.stores import feature_store

    workspace = workspace_of(context)
    items = inventory(workspace)
    if json_output:
        folders = {"store": str(workspace.store), "features": str(feature_store(workspace))}
        print_json({"schema": "dspark/store/1", **folders, "items": [item.as_json() for item in items]})
        return
    click.echo(f"{workspace.store}; features in {feature_store(workspace)}")
    if everything:
        _print_items(items)
        return
    rows = [(heap.kind, str(heap.count), size(heap.bytes), _users(heap.users)) for heap in heaps(items)]
    print_table(rows, ("what", "things", "on disk", "used by"))


@store.command()
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@as_json
@click.pass_context
def gc(context: click.Context, dry_run: bool, json_output: bool) -> None:
    """Remove what a run could make again and nothing names; never while a run is under way."""
    from dspark.workspace.upkeep import collect, garbage

    workspace = workspace_of(context)
    items = garbage(workspace) if dry_run else collect(workspace, _note)
    total = sum(item.bytes for item in items)
    if json_output:
        found = {"removed": not dry_run, "bytes": total, "items": [item.as_json() for item in items]}
        print_json({"schema": "dspark/store-gc/1", **found})
        return
    _print_items(items)
    click.echo(f"{size(total)} {'would be' if dry_run else 'were'} removed")


@store.command()
@click.option("--repair", is_flag=True, help="Remove what is damaged, so that `dspark run` makes it again.")
@as_json
@click.pass_context
def verify(context: click.Context, repair: bool, json_output: bool) -> None:
    """Read every byte and compare it with its digest; exit code 7 if something damaged is left."""
    from dspark.workspace.upkeep import verify as verify_stores

    found = verify_stores(workspace_of(context), repair=repair, note=_note)
    if json_output:
        counts = {"digests": found.digests, "forms": found.forms, "bytes": found.bytes, "sound": found.sound}
        listed = [damaged.as_json() for damaged in found.damaged]
        print_json({"schema": "dspark/store-verification/1", **counts, "damaged": listed})
    else:
        for damaged in found.damaged:
            done = "removed" if damaged.removed else "damaged"
            click.echo(f"{done}: {damaged.item.kind} {damaged.item.name}: {damaged.what}")
        without = f", {found.forms} without a digest could be read" if found.forms else ""
        click.echo(f"{found.digests} digests compared{without}, {size(found.bytes)}, {len(found.damaged)} damaged")
        if any(damaged.removed for damaged in found.damaged):
            click.echo("next: dspark run --target NAME, which makes what was removed again")
        elif not found.sound:
            click.echo("dspark store verify --repair removes what a run can make again")
    if not found.sound:
        context.exit(IntegrityError.exit_code)


def _print_items(items: list[Item]) -> None:
    rows = [(item.kind, item.name, size(item.bytes), _users(item.users)) for item in items]
    print_table(rows, ("what", "name", "on disk", "used by"))


def _users(users: tuple[str, ...]) -> str:
    return "; ".join(users) or "nothing"


def _note(message: str) -> None:
    click.echo(message, err=True)
