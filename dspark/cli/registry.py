"""`dspark registry`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from dspark.cli.options import (
    as_json,
    print_json,
    print_table,
    quiet_option,
    tracking_address,
    which_registry,
    workspace_of,
)
from dspark.cli.root import Subverbs

if TYPE_CHECKING:
    from dspark.registry.catalogue import Holders
    from dspark.registry.chain import Chain, Link, Removed
    from dspark.registry.comparison import Comparison, Number
    from dspark.registry.tracking import Registry

_REFERENCE = "NUMBER|candidate|staging|production"


@click.group(cls=Subverbs, subcommand_metavar="VERB ...")
def registry() -> None:
    """What is registered, who holds which stage, and since when."""


@registry.command("list")
@which_registry
@as_json
@click.pass_context
def list_all(context: click.Context, tracking_uri: str | None, json_output: bool) -> None:
    """All builds of which something was published, and who holds their stages."""
    from dspark.registry.catalogue import builds, holders

    with _opened(context, tracking_uri) as opened:
        found = [holders(opened, build) for build in builds(opened)]
    if json_output:
        print_json({"schema": "dspark/registry-list/1", "models": [held.as_json() for held in found]})
        return
    for held in found:
        _tell_mended(held)
    rows = [
        (held.model, _optional(held.candidate), _holder(held.head("staging")), _holder(held.head("production")))
        for held in found
    ]
    print_table(rows, ("model", "candidate", "staging", "production"))
    if not found:
        click.echo("nothing is registered; next: dspark run --target NAME")


@registry.command()
@click.argument("model")
@click.option("--version", type=click.IntRange(1), help="Everything that is known of one version.")
@which_registry
@as_json
@click.pass_context
def show(context: click.Context, model: str, version: int | None, tracking_uri: str | None, json_output: bool) -> None:
    """The versions of MODEL (a build, or dspark-BUILD), newest first."""
    from dspark.errors import SettingsError
    from dspark.registry.catalogue import find_build, holders, version_rows

    with _opened(context, tracking_uri) as opened:
        held = holders(opened, find_build(opened, model))
        rows = version_rows(opened, held)
    if version is not None:
        rows = [row for row in rows if row.version == version]
        if not rows:
            raise SettingsError(f"{held.model} has no version {version}", f"dspark registry show {held.build}")
    if json_output:
        print_json({"schema": "dspark/registry-model/1", **held.as_json(), "versions": [row.as_json() for row in rows]})
        return
    _tell_mended(held)
    if version is not None:
        row = rows[0]
        print_table(
            [
                ("version", str(row.version)),
                ("holds", ", ".join(row.holds) or "nothing"),
                ("registered", row.registered),
                *((key.removeprefix("dspark."), value) for key, value in row.tags.items()),
            ]
        )
        return
    print_table(
        [
            (str(row.version), row.package_digest[:12], row.registered, row.git_commit[:12], ", ".join(row.holds))
            for row in rows
        ],
        ("version", "package", "registered", "commit", "holds"),
    )


@registry.command()
@click.argument("model")
@click.argument("first", default="production", metavar=f"[{_REFERENCE}]")
@click.argument("second", default="candidate", metavar=f"[{_REFERENCE}]")
@click.option("--all", "everything", is_flag=True, help="Every measured number, not only the telling ones.")
@which_registry
@as_json
@click.pass_context
def diff(
    context: click.Context,
    model: str,
    first: str,
    second: str,
    everything: bool,
    tracking_uri: str | None,
    json_output: bool,
) -> None:
    """What differs between two versions of MODEL: production and candidate unless others are named.

    Numbers stand side by side as each version's own run measured them; only gates compare in pairs.
    """
    from dspark.registry.catalogue import find_build, holders
    from dspark.registry.comparison import compare
    from dspark.registry.sources import source_version

    with _opened(context, tracking_uri) as opened:
        held = holders(opened, find_build(opened, model))
        versions = [
            source_version(opened, held.build, held.chains, int(name) if name.isdecimal() else None, name)
            for name in (first, second)
        ]
        comparison = compare(opened, *versions)
    if json_output:
        print_json({"schema": "dspark/registry-diff/1", "model": held.model, **comparison.as_json()})
        return
    _tell_mended(held)
    _show_comparison(comparison, everything)


@registry.command()
@click.argument("model")
@click.option(
    "--stage", default="production", show_default=True, type=click.Choice(("staging", "production")), help="Whose."
)
@click.option("--version", type=click.IntRange(1), help="One promotion in full, with what the gates said.")
@which_registry
@as_json
@click.pass_context
def history(
    context: click.Context, model: str, stage: str, version: int | None, tracking_uri: str | None, json_output: bool
) -> None:
    """Who held a stage of MODEL, oldest first: when, by whom, why, and whether against the gates."""
    from dspark.cli.promote import show_gates
    from dspark.errors import SettingsError
    from dspark.registry.catalogue import find_build, holders
    from dspark.registry.promotion import gates_of

    with _opened(context, tracking_uri) as opened:
        held = holders(opened, find_build(opened, model))
        chain = held.chains["production" if stage == "production" else "staging"]
        chosen = [link for link in (*chain.links, *chain.void) if link.version == version]
        if version is not None and not chosen:
            raise SettingsError(f"{chain.model} has no promotion {version}", f"dspark registry history {held.build}")
        reports = {link.version: gates_of(opened, chain, link) for link in chosen}
    if json_output:
        print_json(_history(chain, chosen or None) | {"build": held.build, "stage": stage})
        return
    _tell_mended(held)
    for link in chosen:
        print_table([(key.replace("_", " "), str(value)) for key, value in link.as_json().items()])
        report = reports[link.version]
        if report is not None:
            show_gates(report)
    if version is None:
        _show_history(chain)


def _history(chain: Chain, chosen: list[Link] | None) -> dict[str, Any]:
    from dataclasses import asdict

    def rows(entries: tuple[Link | Removed, ...]) -> list[dict[str, Any]]:
        kept = [entry for entry in entries if chosen is None or entry in chosen]
        return [{key: value for key, value in asdict(entry).items() if value is not None} for entry in kept]

    return {
        "schema": "dspark/history/1",
        "model": chain.model,
        "history": rows(chain.entries),
        "void": rows(chain.void),
    }


def _show_history(chain: Chain) -> None:
    from dspark.registry.chain import Link

    rows = [
        (
            str(entry.version),
            f"version {entry.source_version}",
            entry.package_digest[:12],
            entry.at,
            entry.by,
            _what(entry),
            entry.reason or "",
        )
        if isinstance(entry, Link)
        else (str(entry.version), "-", "-", "-", "-", "deleted from the registry", "")
        for entry in chain.entries
    ]
    print_table(rows, ("promotion", "of", "package", "at", "by", "what", "why"))
    if not rows:
        click.echo(f"nothing was promoted into {chain.model} yet")
    if chain.void:
        click.echo(f"void, overtaken by others: {', '.join(str(copy.version) for copy in chain.void)}")


def _what(link: Link) -> str:
    if link.kind == "rollback":
        return f"rollback to {link.restores}"
    return "forced promotion" if link.forced else "promotion"


def _show_comparison(comparison: Comparison, everything: bool) -> None:
    names = (f"version {comparison.first}", f"version {comparison.second}")
    settings = [(one.name, _cut(one.first), _cut(one.second)) for one in comparison.settings]
    print_table(settings, ("setting", *names))
    numbers = [one for one in comparison.numbers if everything or one.telling]
    rows = [(one.name, *map(_interval, (one.first, one.second)), _relative(one)) for one in numbers]
    if settings and rows:
        click.echo()
    print_table(rows, ("measured", *names, "difference"))
    if not settings and all(one.first == one.second for one in comparison.numbers):
        click.echo("nothing differs")


def _interval(value: tuple[float, float, float] | None) -> str:
    return "-" if value is None else f"{value[0]:.4g} [{value[1]:.4g}, {value[2]:.4g}]"


def _relative(number: Number) -> str:
    return "-" if number.relative is None else f"{number.relative:+.2%}"


def _cut(value: str | None, width: int = 40) -> str:
    if value is None:
        return "-"
    return value if len(value) <= width else f"{value[: width - 3]}..."


def _holder(link: Link | None) -> str:
    if link is None:
        return "-"
    return f"{link.source_version} (forced)" if link.forced else str(link.source_version)


def _optional(value: int | None) -> str:
    return "-" if value is None else str(value)


def _tell_mended(held: Holders) -> None:
    for line in held.mended:
        click.echo(f"mended: {line}", err=True)


@registry.command()
@which_registry
@quiet_option
@as_json
@click.pass_context
def sync(context: click.Context, tracking_uri: str | None, quiet: bool, json_output: bool) -> None:
    """Tell the tracking server what it was not told yet: runs that ended while it was away, packages to register.

    Exit code 8 if it is still away (everything is kept), 7 if a package that waits is damaged or gone.
    """
    from dspark.cli.display import shown
    from dspark.errors import IntegrityError
    from dspark.workspace.publisher import sync as deliver_all

    workspace, address = workspace_of(context), tracking_address(context, tracking_uri)
    with shown(quiet=quiet, events=None) as listener:
        delivery = deliver_all(workspace, address, listener)
    if json_output:
        print_json(delivery.as_json())
    elif not delivery.runs and not delivery.problems:
        click.echo("nothing was waiting")
    else:
        rows = [(run.run, run.build, run.status.lower(), ", ".join(run.registered)) for run in delivery.runs]
        print_table(rows, ("run", "build", "ended", "registered"))
    if delivery.problems:
        lines = "".join(f"\n  {problem.message}\n    {problem.hint}" for problem in delivery.problems)
        error = f"{len(delivery.problems)} could not be delivered:{lines}"
        if json_output:
            context.exit(IntegrityError.exit_code)
        raise IntegrityError(error)


@contextmanager
def _opened(context: click.Context, tracking_uri: str | None) -> Iterator[Registry]:
    from dspark.registry.connection import connected

    with connected(tracking_address(context, tracking_uri), workspace=workspace_of(context).root) as opened:
        yield opened
