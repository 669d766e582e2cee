"""`dspark package`."""

from __future__ import annotations

from pathlib import Path

import click

from dspark.cli.options import as_json, print_json, print_table, size
from dspark.cli.root import Subverbs


@click.group(cls=Subverbs, subcommand_metavar="VERB ...")
def package() -> None:
    """Show and verify packages; needs neither a workspace nor the pipeline."""


@package.command()
@click.argument("folder", type=click.Path(path_type=Path))
@as_json
def show(folder: Path, json_output: bool) -> None:
    """What a package is, from its manifest."""
    from dspark.io.jsonfile import model_json
    from dspark.package.verify import read_manifest

    manifest = read_manifest(folder)
    if json_output:
        print_json(model_json(manifest))
        return
    target, drafter = manifest.inputs.target, manifest.drafter
    print_table(
        [
            ("name", manifest.name),
            ("build", manifest.build),
            ("target", f"{target.public_id} {target.revision} ({target.dtype})"),
            ("drafter", f"{drafter.kind}, gamma {drafter.gamma}, {drafter.parameters:,} parameters ({drafter.dtype})"),
            ("taps", " ".join(map(str, drafter.taps))),
            ("domains", " ".join(manifest.inputs.corpus.domains)),
            ("files", f"{len(manifest.files)}, {size(sum(entry.bytes for entry in manifest.files))}"),
            ("model digest", manifest.digests.model_digest),
            ("package digest", manifest.digests.package_digest),
            ("evidence digest", manifest.digests.evidence_digest),
            ("self digest", manifest.digests.self_digest),
        ]
    )
    click.echo("nothing was checked; next: dspark package verify " + str(folder))


@package.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--digest", metavar="HEX", help="A package or self digest obtained elsewhere, to compare with.")
@as_json
def verify(folder: Path, digest: str | None, json_output: bool) -> None:
    """Check that a package is exactly what its manifest says; exit code 7 if not."""
    from dspark.io.jsonfile import model_json
    from dspark.package.verify import verify as verify_package

    report = verify_package(folder, digest=digest)
    if json_output:
        print_json({"schema": "dspark/verify/1", **model_json(report), "note": report.note})
        return
    click.echo(f"sound: {report.name}, {report.files} files, {size(report.bytes)}")
    print_table([("package digest", report.package_digest), ("self digest", report.self_digest)])
    click.echo(report.note)
