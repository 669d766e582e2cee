"""`dspark package materialise`."""

from __future__ import annotations

from pathlib import Path

import click

from dspark.cli.options import as_json, package_folder, print_json, quiet_option, size, workspace_of


@click.command()
@package_folder
@click.option(
    "--target", metavar="DIR|NAME|REPO", help="Of the package's target.  [default: the repository that it came from]"
)
@quiet_option
@as_json
@click.pass_context
def materialise(context: click.Context, folder: Path, target: str | None, quiet: bool, json_output: bool) -> None:
    """Make what a package for ONNX Runtime leaves out: a large target's embedding and head, from the target.

    The file is kept only if it is, to the byte, the one that the manifest names; exit code 7 if it is another target's.
    """
    from dspark.cli.display import shown
    from dspark.package.materialise import left_out
    from dspark.package.materialise import materialise as materialise_package
    from dspark.package.verify import read_manifest
    from dspark.workspace.listener import ListenedProgress
    from dspark.workspace.target_folder import target_folder

    manifest = read_manifest(folder)
    made: Path | None = None
    if left_out(manifest) is not None:
        with shown(quiet=quiet, events=None) as listener:
            progress = ListenedProgress(listener, "materialise")
            source = target_folder(target, manifest.inputs.target, lambda: workspace_of(context), progress)
            made = materialise_package(folder, source, progress=progress)
    if json_output:
        print_json({"schema": "dspark/materialise/1", "folder": str(folder), "file": str(made) if made else None})
    elif made is None:
        click.echo("the package leaves nothing out")
    else:
        click.echo(f"{made}: {size(made.stat().st_size)}, as the manifest names it")
