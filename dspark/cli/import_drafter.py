"""`dspark import`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dspark.cli.completion import names_of
from dspark.cli.options import as_json, print_json, print_table, quiet_option, short, size, workspace_of
from dspark.errors import SettingsError

if TYPE_CHECKING:
    from dspark.config.models import DrafterSettings
    from dspark.drafters.inspection import BundledInspection, Inspection, Weights
    from dspark.workspace.import_drafter import Imported


@click.command("import")
@click.argument("source", metavar="SOURCE")
@click.option(
    "--target",
    metavar="NAME",
    shell_complete=names_of("target"),
    help="The target of pipeline/targets that it was trained for.",
)
@click.option("--build", metavar="NAME", help="Write pipeline/builds/NAME.yaml for it.")
@click.option(
    "--like",
    metavar="BUILD",
    shell_complete=names_of("build", "target"),
    help="Share this build's corpus and settings.  [default: the target's own]",
)
@click.option("--revision", default="main", show_default=True, help="Of a repository on the hub.")
@click.option("--inspect", is_flag=True, help="Only show what it is, from config.json and headers; changes nothing.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Of a target with its drafter inside: write engine files and launch scripts there.",
)
@quiet_option
@as_json
@click.pass_context
def import_drafter(
    context: click.Context,
    source: str,
    target: str | None,
    build: str | None,
    like: str | None,
    revision: str,
    inspect: bool,
    out: Path | None,
    quiet: bool,
    json_output: bool,
) -> None:
    """Take a released drafter into a build: calibrated, profiled, evaluated and packaged without training.

    SOURCE is a folder or a repository on the hub (owner/name), in the layout of DeepSpec, SpecForge or speculators. It
    is verified and kept under its digest; with --build, a build that names it is written. A DeepSeek-V4 target with its
    drafter inside is described, and --out writes what its serving engines need.
    """
    if sum((inspect, out is not None, target is not None)) != 1:
        raise SettingsError(
            "--target imports, --inspect shows, --out writes engine files: name one of them",
            f"dspark import {source} --inspect",
        )
    if target is None:
        if build is not None or like is not None:
            raise SettingsError("--build and --like go with --target", "dspark targets list")
        _describe(source, revision, out, quiet=quiet, json_output=json_output)
        return
    if like is not None and build is None:
        raise SettingsError("--like says what --build is like: name a build", "--build NAME")
    from dspark.cli.display import shown
    from dspark.workspace.import_drafter import ImportRequest
    from dspark.workspace.import_drafter import import_drafter as import_released

    request = ImportRequest(source, target, revision, build, like)
    with shown(quiet=quiet, events=None) as listener:
        imported = import_released(workspace_of(context), request, listener)
    if json_output:
        print_json(imported.as_json())
    else:
        _show_imported(imported, target, build)


def _describe(source: str, revision: str, out: Path | None, *, quiet: bool, json_output: bool) -> None:
    """Show what a release is, and write engine files for one that only an engine can run."""
    from dspark.cli.display import shown
    from dspark.drafters.inspection import BundledInspection, inspect_folder
    from dspark.io.jsonfile import model_json
    from dspark.workspace.bundled import STEPS, write_bundled
    from dspark.workspace.listener import ListenedProgress
    from dspark.workspace.release import find_release

    with shown(quiet=quiet, events=None) as listener:
        release = find_release(source, revision, weights=False, progress=ListenedProgress(listener, "import"))
    inspection = inspect_folder(release.folder)
    scripts: list[str] = []
    if out is not None:
        if not isinstance(inspection, BundledInspection):
            raise SettingsError(
                f"--out: {source} is a drafter of its own, whose engine files come with the package of a build",
                f"dspark import {source} --target NAME --build NAME",
            )
        scripts = write_bundled(out, inspection, release)
    if json_output:
        print_json({**model_json(inspection), **({"folder": str(out), "scripts": scripts} if out is not None else {})})
        return
    if isinstance(inspection, BundledInspection):
        print_table(_bundled(inspection))
        click.echo("\nwhat is done where:")
        print_table([(f"  {step}", where) for step, where in STEPS])
        for script in scripts:
            click.echo(f"bash {short(out / script) if out is not None else script}")
    else:
        print_table(_standalone(inspection))


def _standalone(inspection: Inspection) -> list[tuple[str, str]]:
    reduced = inspection.draft_vocab_size not in (None, inspection.vocab_size)
    vocabulary = (
        f"{inspection.draft_vocab_size} of {inspection.vocab_size}" if reduced else _said(inspection.vocab_size)
    )
    rows = [
        ("layout", inspection.layout),
        ("kind", inspection.kind),
        ("architectures", ", ".join(inspection.architectures) or "not said"),
        ("target", inspection.target or "not said"),
        ("gamma", _said(inspection.gamma)),
        ("draft layers", _said(inspection.layers)),
        ("hidden size", f"{_said(inspection.hidden_size)}, MLP {_said(inspection.intermediate_size)}"),
        (
            "attention",
            f"{_said(inspection.attention_heads)} heads of {_said(inspection.head_dim)}, "
            f"{_said(inspection.key_value_heads)} of keys and values",
        ),
        ("vocabulary", vocabulary),
        ("taps", "outputs of layers " + " ".join(map(str, inspection.taps)) if inspection.taps else "not said"),
        ("target layers", _said(inspection.target_layers)),
        ("mask token", _said(inspection.mask_token_id)),
        (
            "Markov head",
            "no"
            if inspection.markov_rank == 0
            else f"{inspection.markov_type or 'vanilla, as readers take it'}, rank {_said(inspection.markov_rank)}",
        ),
        ("confidence head", {None: "not known: no weights here", True: "yes", False: "no"}[inspection.confidence_head]),
        ("weights", _weights(inspection.weights)),
    ]
    if inspection.stores_target_ends:
        rows.append(("also stores", f"{', '.join(inspection.stores_target_ends)} of its target"))
    return [*rows, *(("cannot be imported", problem) for problem in inspection.problems)]


def _bundled(inspection: BundledInspection) -> list[tuple[str, str]]:
    drafter = inspection.drafter
    rows = [
        ("layout", "a target with its drafter inside"),
        (
            "target",
            f"{drafter.architecture}, {_said(drafter.target_layers)} layers, hidden size {_said(drafter.hidden_size)}",
        ),
        ("quantisation", drafter.quantisation or "none said"),
        ("gamma", f"{drafter.gamma} drafts, {drafter.gamma + 1} tokens verified"),
        ("target layers read", f"{' '.join(map(str, drafter.target_layer_ids))} as the config names them"),
        ("mask token", str(drafter.mask_token_id)),
        ("Markov head", f"rank {drafter.markov_rank}"),
        (
            "drafter's stages",
            _said(inspection.stages) if inspection.weights is not None else "not known: no index here",
        ),
        ("drafter's weights", _weights(inspection.drafter_weights, own=True)),
        ("all weights", _weights(inspection.weights)),
        *((key, str(value)) for key, value in drafter.keys.items()),
    ]
    return [*rows, *(("in doubt", problem) for problem in inspection.problems)]


def _said(value: object) -> str:
    return "not said" if value is None else str(value)


def _weights(weights: Weights | None, *, own: bool = False) -> str:
    """Of a whole checkpoint, or of some tensors in it, whose files are not their own."""
    if weights is None:
        return "not here"
    if weights.described:
        kinds = ", ".join(f"{count:,} in {dtype}" for dtype, count in weights.dtypes.items())
        text = f"{weights.tensors} tensors, {weights.parameters:,} parameters ({kinds})"
        if weights.described < weights.tensors:
            text += f", of {weights.described} tensors whose files are here"
    else:
        text = f"{weights.tensors} tensors by the index"
    if own:
        return text
    absent = f", {len(weights.absent)} not here" if weights.absent else ""
    return f"{text}; {weights.files} files{absent}, {size(weights.bytes)}"


def _heads(drafter: DrafterSettings) -> str:
    if not drafter.markov.rank:
        return f"no heads ({drafter.family})"
    confidence = "" if drafter.confidence else ", no confidence head"
    return f"{drafter.markov.type} Markov head of rank {drafter.markov.rank}{confidence}"


def _show_imported(imported: Imported, target: str, build: str | None) -> None:
    drafter, digest = imported.drafter, imported.origin.digest
    rows = [
        ("imported", digest),
        ("from", f"{imported.origin}, {imported.origin.layout} layout"),
        (
            "drafter",
            f"{imported.parameters:,} parameters, gamma {drafter.gamma}, {drafter.layers} layers, " + _heads(drafter),
        ),
        ("kept in", short(imported.folder)),
        *(("note", note) for note in imported.notes),
    ]
    if imported.build is not None:
        rows += [("wrote", short(imported.build)), ("next", f"dspark run --build {build}")]
    else:
        rows.append(
            ("next", f"the same with --build NAME, or `training: {{imported: {digest}}}` in a build for {target}")
        )
    print_table(rows)
