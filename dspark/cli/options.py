"""Options and small forms that several verbs share."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from dspark.cli.completion import names_of
from dspark.errors import SettingsError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from dspark.workspace.layout import Workspace
    from dspark.workspace.run import Request

Command = TypeVar("Command", bound=Callable[..., Any])
Report = TypeVar("Report", bound="BaseModel")


def which_build(command: Command) -> Command:
    """`--target`, `--build` and `--set`."""
    for option in (
        click.option(
            "--set",
            "flags",
            multiple=True,
            metavar="SECTION.KEY=VALUE",
            help="Override one setting, for instance training.steps=500. Can be repeated.",
        ),
        which_finished_build,
    ):
        command = option(command)
    return command


def which_finished_build(command: Command) -> Command:
    """`--target` and `--build`, of a verb that changes no setting."""
    for option in (
        click.option(
            "--build",
            metavar="NAME",
            shell_complete=names_of("build", "target"),
            help="A build of pipeline/builds (default: the target's own).",
        ),
        click.option(
            "--target", metavar="NAME", shell_complete=names_of("target"), help="A target of pipeline/targets."
        ),
    ):
        command = option(command)
    return command


def how_to_run(command: Command) -> Command:
    """What a verb that runs a build has: `--no-publish`, `--tracking-uri`, and what `how_to_watch` adds."""
    for option in (
        how_to_watch,
        which_registry,
        click.option(
            "--no-publish", is_flag=True, help="Do not register the package, and tell the tracking server nothing."
        ),
    ):
        command = option(command)
    return command


def how_to_watch(command: Command) -> Command:
    """`--quiet`, `--events` and `--debug`."""
    for option in (
        click.option("--debug", is_flag=True, help="Show tracebacks."),
        click.option("--events", metavar="FILE|-", help="Append progress as JSON lines to a file, or print it."),
        quiet_option,
    ):
        command = option(command)
    return command


def quiet_option(command: Command) -> Command:
    """`--quiet`."""
    return click.option("--quiet", is_flag=True, help="Show problems and the result only.")(command)


def one_output(json_output: bool, events: str | None) -> None:
    """Refuse two documents on stdout.

    Raises:
        UsageError: `--json` together with `--events -`.
    """
    if json_output and events == "-":
        raise click.UsageError("--json and --events - both print to stdout: give --events a file")


def which_registry(command: Command) -> Command:
    """`--tracking-uri`; the verb passes it to `tracking_address`."""
    return click.option(
        "--tracking-uri",
        metavar="URI",
        help="Of the MLflow server.  [default: DSPARK_TRACKING_URI, MLFLOW_TRACKING_URI, params.yaml, the workspace's]",
    )(command)


def tracking_address(context: click.Context, flag: str | None) -> str:
    """The tracking server that the command line, the environment or the workspace names.

    Raises:
        PreflightError: there is no workspace.
        SettingsError: the address cannot work.
    """
    from dspark.registry import address

    return address.tracking_address(workspace_of(context).root, flag, os.environ)


def registry_address(context: click.Context, flag: str | None) -> str:
    """As `tracking_address`, and no workspace is needed where flag or environment name a server: serving has none.

    Raises:
        PreflightError: nothing names one and there is no workspace.
        SettingsError: the address cannot work.
    """
    from dspark.registry.address import VARIABLES, checked

    if flag is not None:
        return checked(flag, "--tracking-uri")
    for name in VARIABLES:
        if value := os.environ.get(name):
            return checked(value, name)
    return tracking_address(context, None)


def require_place(option: str, file: Path) -> None:
    """Refuse a file for a result before the work is done whose result it is to hold.

    Raises:
        SettingsError: its folder is not there, or it is a folder itself.
    """
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise SettingsError(f"{option} {file}: no file can be written there", "name a file in a folder that is there")


def as_json(command: Command) -> Command:
    """`--json`."""
    return click.option("--json", "json_output", is_flag=True, help="Print one JSON document.")(command)


def workspace_of(context: click.Context) -> Workspace:
    """The workspace that the command line or the current folder names.

    Raises:
        PreflightError: there is none.
    """
    from dspark.workspace.layout import find_workspace

    return find_workspace(context.obj["workspace"])


def request_of(
    target: str | None,
    build: str | None,
    flags: tuple[str, ...],
    *,
    publish: bool = True,
    debug: bool = False,
    tracking_uri: str | None = None,
) -> Request:
    """What was asked for, the environment's settings included."""
    from dspark.workspace.run import Request

    return Request(target, build, flags, dict(os.environ), publish, debug, tracking_uri=tracking_uri)


def print_json(value: Any) -> None:
    """Print one JSON document."""
    from dspark.io.jsonfile import pretty_json

    click.echo(pretty_json(value), nl=False)


def package_folder(command: Command) -> Command:
    """`FOLDER`: a package."""
    return click.argument("folder", type=click.Path(path_type=Path))(_on_a_folder(command))


def package_option(command: Command) -> Command:
    """`--package`, where the argument is something else; the verb has it as `folder`."""
    return click.option(
        "--package", "folder", type=click.Path(path_type=Path), required=True, metavar="DIR", help="The package."
    )(_on_a_folder(command))


def _on_a_folder(command: Command) -> Command:
    """A verb on `folder`, which must be one."""

    @functools.wraps(command)
    def checked(*arguments: Any, folder: Path, **options: Any) -> Any:
        from dspark.package.verify import require_folder

        require_folder(folder)
        return command(*arguments, folder=folder, **options)

    return checked  # type: ignore[return-value]


def end_with_verdict(
    context: click.Context, report: Report, show: Callable[[Report], None], code: int, *, json_output: bool
) -> NoReturn:
    """Print what was found about a server, as text or as one JSON document, and end with the verdict's exit code."""
    from dspark.io.jsonfile import model_json

    if json_output:
        print_json(model_json(report))
    else:
        show(report)
    context.exit(code)


def print_table(rows: Sequence[tuple[str, ...]], header: tuple[str, ...] | None = None) -> None:
    """Print aligned columns, the last one as wide as it is."""
    shown = [header, *rows] if header and rows else rows
    if not shown:
        return
    widths = [max(len(row[column]) for row in shown) for column in range(len(shown[0]))]
    for row in shown:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        click.echo("  ".join([*cells, row[-1]]).rstrip())


def duration(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3 min 20 s`, `1 h 05 min`, `12 days`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 100 else f"{round(hours / 24):,} days"


def size(count: int) -> str:
    """`512 B`, `6.9 kB`, `93 MB`, `1.2 GB`, `38.1 TB`."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def short(path: Path) -> str:
    """A path as the user would type it from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
