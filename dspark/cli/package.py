"""`dspark package`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from dspark.cli.options import as_json, package_folder, print_json, print_table, quiet_option, size, workspace_of
from dspark.cli.package_materialise import materialise
from dspark.cli.package_pull import pull
from dspark.cli.package_sign import keygen, sign
from dspark.cli.package_smoke import smoke
from dspark.cli.root import Subverbs


@click.group(cls=Subverbs, subcommand_metavar="VERB ...")
def package() -> None:
    """Fetch, verify, sign and show packages, and try servers of them; needs neither a workspace nor the pipeline."""


for verb in (pull, materialise, keygen, sign, smoke):
    package.add_command(verb)


@package.command()
@package_folder
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
@package_folder
@click.option("--digest", metavar="HEX", help="A package or self digest obtained elsewhere, to compare with.")
@click.option(
    "--against", metavar="PROFILE|URL", help="A serving profile (a name, or a file), or the address of a server."
)
@click.option(
    "--key",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Demand a signature by this public key.",
)
@as_json
@click.pass_context
def verify(
    context: click.Context, folder: Path, digest: str | None, against: str | None, key: Path | None, json_output: bool
) -> None:
    """Check that a package is exactly what its manifest says; exit code 7 if not.

    With --against also that its certificate is about that profile on this machine, or about what a running server says
    of itself, today; exit code 6 if not.
    """
    from dspark.io.jsonfile import model_json
    from dspark.package.verify import verify as verify_package

    report = verify_package(folder, digest=digest, key=key)
    fresh = {}
    if against is not None:
        from dspark.workspace.against import require_fresh, require_fresh_server
        from dspark.workspace.profiles import named_profile

        if "://" in against:
            name, until = require_fresh_server(folder, against)
            fresh = {"against": name, "holds_until": until, "server": against}
        else:
            profile = named_profile(against, lambda: workspace_of(context))
            fresh = {"against": profile.name, "holds_until": require_fresh(folder, profile)}
    if json_output:
        print_json({"schema": "dspark/verify/1", **model_json(report), **fresh, "note": report.note})
        return
    click.echo(f"sound: {report.name}, {report.files} files, {size(report.bytes)}")
    print_table([("package digest", report.package_digest), ("self digest", report.self_digest)])
    if fresh:
        where = fresh.get("server", "this machine")
        click.echo(f"certified for {fresh['against']} on {where} until {fresh['holds_until']}")
    for name in report.absent:
        click.echo(f"left out: {name}, made from the target by: dspark package materialise {folder}")
    click.echo(report.note)


@package.command("build-engine")
@package_folder
@click.option(
    "--compute-capability", metavar="X.Y", help="Of the GPU that will serve, such as 8.9; else of this one's."
)
@click.option("--cache", type=click.Path(path_type=Path), metavar="DIR", help="Of plans.  [default: ~/.cache/dspark]")
@quiet_option
@as_json
def build_engine(
    folder: Path, compute_capability: str | None, cache: Path | None, quiet: bool, json_output: bool
) -> None:
    """Verify a package and build its TensorRT plan for one kind of GPU; one that is in the cache is used again."""
    from dspark.cli.display import shown
    from dspark.engines.tensorrt_build import Plan
    from dspark.export.tensorrt import PLAN, RECORD, build_plan
    from dspark.io.jsonfile import model_json, read_model
    from dspark.package.verify import verify as verify_package
    from dspark.workspace.listener import ListenedProgress

    digest = verify_package(folder).package_digest
    place = cache or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dspark"
    with shown(quiet=quiet, events=None) as listener:
        built = build_plan(
            folder,
            digest,
            place / "tensorrt",
            compute_capability=compute_capability,
            progress=ListenedProgress(listener, "build-engine"),
        )
    record = read_model(built / RECORD, Plan)
    if json_output:
        print_json({**model_json(record), "folder": str(built)})
        return
    print_table(
        [
            ("plan", str(built / PLAN)),
            ("builder", f"{record.builder} {record.builder_version}, compute capability {record.compute_capability}"),
            ("size", f"{size(record.plan_bytes)}, {record.layers} layers parsed, {record.precision}"),
            ("run", "never: this proves that the graph is taken whole, not what the plan computes"),
        ]
    )
