"""`dspark package pull`."""

from __future__ import annotations

from pathlib import Path

import click

from dspark.cli.options import as_json, print_json, print_table, quiet_option, registry_address, size, which_registry


@click.command()
@click.argument("address")
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--engine", metavar="NAME", help="Whose launch command to print.  [default: all engines']")
@click.option("--digest", metavar="HEX", help="A package or self digest obtained elsewhere, to compare with.")
@click.option("--key", type=click.Path(path_type=Path), metavar="FILE", help="Demand a signature by this public key.")
@which_registry
@quiet_option
@as_json
@click.pass_context
def pull(
    context: click.Context,
    address: str,
    folder: Path,
    engine: str | None,
    digest: str | None,
    key: Path | None,
    tracking_uri: str | None,
    quiet: bool,
    json_output: bool,
) -> None:
    """Fetch a registered package for serving: models:/dspark-qwen3-8b@production, or models:/dspark-qwen3-8b/3.

    DIR is new, empty, or an earlier package, which is replaced when the new one is whole and verified. Needs no mlflow
    where the registry is a server; S3 artifacts need dspark[s3].
    """
    from dspark.cli.display import shown
    from dspark.package.launch import launch_command, launch_commands
    from dspark.registry.pull import pull as pull_package
    from dspark.workspace.listener import ListenedProgress

    uri = registry_address(context, tracking_uri)
    with shown(quiet=quiet, events=None) as listener:
        progress = ListenedProgress(listener, "pull")
        manifest = pull_package(address, folder, tracking_uri=uri, digest=digest, key=key, progress=progress)
    commands = launch_commands(folder) if engine is None else {engine: launch_command(folder, engine)}
    if json_output:
        print_json(
            {
                "schema": "dspark/pull/1",
                "address": address,
                "folder": str(folder),
                "build": manifest.build,
                "digests": manifest.digests.model_dump(),
                "signed": key is not None,
                "launch": commands,
            }
        )
        return
    absent = [entry.path for entry in manifest.files if not (folder / entry.path).exists()]
    total = size(sum(entry.bytes for entry in manifest.files if entry.path not in absent))
    click.echo(f"{folder}: {manifest.name}, {len(manifest.files) - len(absent)} files, {total}, verified")
    print_table([("package digest", manifest.digests.package_digest), ("self digest", manifest.digests.self_digest)])
    print_table([(f"launch {name}", command) for name, command in commands.items()])
    for name in absent:
        click.echo(f"left out: {name}, made from the target by: dspark package materialise {folder}")
