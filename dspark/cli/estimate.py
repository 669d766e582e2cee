"""What `dspark plan --estimate` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dspark.cli.options import duration, print_json, print_table, short, size

if TYPE_CHECKING:
    from dspark.workspace.estimate import Estimate, StageMemory


def print_estimate(found: Estimate, *, json_output: bool) -> None:
    """Print an estimate, as text or as one JSON document."""
    if json_output:
        print_json(found.as_json())
        return
    print_table(_facts(found))
    mode, dtype = found.chosen
    click.echo(f"\nfeatures of {found.tokens:,} tokens; the build says {mode}, {dtype}")
    print_table(_features(found), ("dtype", "bytes a token", "cached", "online", "hybrid", ""))
    click.echo("\npeak memory of one process")
    print_table([_memory(name, stage) for name, stage in found.memory.items()], ("stage", "where", "", "of", ""))
    rates = found.rates
    click.echo(
        f"\ntime, at least: {rates.flops / 1e9:,.0f} GFLOP/s in a layer of the target, "
        f"{rates.training_flops / 1e9:,.0f} in products of training, "
        f"{rates.bytes_per_second / 1e9:,.0f} GB/s in copies, measured just now"
    )
    print_table([(name, duration(seconds)) for name, seconds in found.seconds.items()])


def _facts(found: Estimate) -> list[tuple[str, str]]:
    splits = ", ".join(
        f"{name} {split.tokens:,} in {split.sequences:,} sequences" for name, split in found.splits.items()
    )
    return [
        ("build", f"{found.build}, target {found.target} (its size: {found.config_from})"),
        ("target", f"{found.parameters:,} parameters, {size(found.weight_bytes)} in {found.dtype}, as computed here"),
        ("drafter", f"{found.drafter.parameters:,} parameters"),
        ("tokens", f"{splits}; {found.tokens_from}"),
        ("free", f"{size(found.free_bytes)} on the disk of {short(found.store)}"),
    ]


def _features(found: Estimate) -> list[tuple[str, ...]]:
    rows = []
    for row in found.features:
        fits = "" if row.cached <= found.free_bytes else "cached does not fit"
        hybrid = "features.cache_gib" if row.hybrid is None else size(row.hybrid)
        if row.hybrid is not None and row.hybrid > found.free_bytes:
            fits = "neither cached nor hybrid fits"
        rows.append((row.dtype, f"{row.bytes_per_token:,}", size(row.cached), size(row.online), hybrid, fits))
    deepspec = (f"{found.deepspec:,}", size(found.deepspec * found.tokens), "", "", "for comparison")
    return [*rows, ("DeepSpec's", *deepspec)]


def _memory(name: str, stage: StageMemory) -> tuple[str, ...]:
    most = sorted(stage.parts.items(), key=lambda part: -part[1])[:3]
    beside = f"{size(stage.host_bytes)} of the machine beside it; " if stage.host_bytes else ""
    note = f"{'' if stage.fits else 'DOES NOT FIT; '}{beside}{', '.join(f'{what} {size(part)}' for what, part in most)}"
    return name, stage.device, size(stage.bytes), size(stage.available), note
