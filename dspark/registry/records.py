"""What a tracking run shows of a package: parameters, metrics, curves and tags, from the package's own JSON.

A copy for looking at. Gates read the package, never these (package.md, "Gates").
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark.errors import IntegrityError
from dspark.io.digest import digest_bytes
from dspark.io.jsonfile import canonical_json, model_json, read_json
from dspark.package.layout import CALIBRATION, CERTIFICATE, LINEAGE, METRICS
from dspark.package.manifest import Manifest

# MLflow's own limits; beyond them it cuts silently or fails late.
_MAX_KEY = 250
_MAX_VALUE = 6000
_MAX_TAG = 5000
_MEASURED = {"value", "n", "ci95"}
_METRIC_FILES = {"evaluate": METRICS, "calibrate": CALIBRATION, "certify": CERTIFICATE}
_CURVES = "evidence/train/curves.csv"


def parameters(manifest: Manifest) -> dict[str, str]:
    """The inputs and the drafter's description, flattened to dotted keys."""
    value = model_json(manifest)
    flat: dict[str, str] = {}
    for prefix, part in {**value["inputs"], "drafter": value["drafter"]}.items():
        for key, leaf in _leaves(part, prefix):
            flat[metric_key(key)] = _fitted(leaf if isinstance(leaf, str) else canonical_json(leaf), _MAX_VALUE)
    return flat


def metrics(package: Path, stages: Sequence[Mapping[str, Any]] = ()) -> dict[str, float]:
    """Every measured number of the evidence with its interval's bounds, and the stages' seconds.

    `tau` becomes `tau`, `tau.ci95_low`, `tau.ci95_high` and `tau.n`.
    """
    found: dict[str, float] = {}
    for prefix, path in _METRIC_FILES.items():
        for key, measured in _measured(read_json(package / path, IntegrityError), prefix):
            low, high = measured["ci95"]
            found[metric_key(key)] = float(measured["value"])
            found[metric_key(f"{key}.ci95_low")] = float(low)
            found[metric_key(f"{key}.ci95_high")] = float(high)
            found[metric_key(f"{key}.n")] = float(measured["n"])
    for stage in stages:
        if isinstance(stage.get("seconds"), int | float):
            found[metric_key(f"stage.{_stage(stage)}.seconds")] = float(stage["seconds"])
    return found


def curves(package: Path) -> Iterator[tuple[str, float, int]]:
    """The training curves as (metric, value, step); what is absent at a step is left out.

    Raises:
        IntegrityError: a row without a step, or a cell that is no number.
    """
    path = package / _CURVES
    with path.open(encoding="utf-8", newline="") as handle:
        for number, row in enumerate(csv.DictReader(handle), start=2):
            try:
                step = int(row.pop("step"))
                cells = {key: float(cell) for key, cell in row.items() if cell not in (None, "")}
            except (KeyError, TypeError, ValueError) as reason:
                raise IntegrityError(f"{path}:{number}: not a row of a training curve: {reason}") from None
            yield from (
                (metric_key(f"train.{key}"), value, step) for key, value in cells.items() if math.isfinite(value)
            )


def tags(package: Path, manifest: Manifest, stages: Sequence[Mapping[str, Any]] = ()) -> dict[str, str]:
    """Lineage: digests, the target's revision, the commit and whether the tree was clean, how each stage ended."""
    lineage = read_json(package / LINEAGE, IntegrityError)
    target = manifest.inputs.target
    found = {
        "dspark.build": manifest.build,
        **{f"dspark.{name}": value for name, value in model_json(manifest.digests).items()},
        "dspark.target": target.name,
        "dspark.target_revision": target.revision,
        "dspark.target_weights_digest": target.weights_digest,
        "dspark.corpus_digest": manifest.inputs.corpus.digest,
        "dspark.version": lineage["dspark_version"],
        "dspark.git_commit": lineage.get("git_commit", f"unknown: {lineage.get('git_absent')}"),
        "dspark.git_dirty": str(lineage.get("git_dirty", "unknown")).lower(),
        "dspark.dvc_lock_sha256": lineage.get("dvc_lock_sha256", f"unknown: {lineage.get('dvc_lock_absent')}"),
        **{f"dspark.stage.{_stage(stage)}": str(stage.get("status")) for stage in stages},
    }
    return {metric_key(key): fitted_tag(value) for key, value in found.items()}


def _stage(result: Mapping[str, Any]) -> str:
    return ".".join(str(result[name]) for name in ("stage", "key") if result.get(name))


def _leaves(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{key}")
    else:
        yield prefix, value


def _measured(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value.keys() == _MEASURED:
        yield prefix, value
        return
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from _measured(item, f"{prefix}.{_label(item, key)}")


def _label(item: Any, key: Any) -> str:
    """Entries of a list are named by what distinguishes them, as far as they say it; a position would shift."""
    if isinstance(key, int) and isinstance(item, dict):
        about = {**item.get("key", {}), **item}
        names = [about[name] for name in ("profile", "arm") if name in about]
        names += [f"{name}{about[name]:g}" for name in ("temperature", "concurrency", "position") if name in about]
        if names:
            return "-".join(names)
    return str(key)


def metric_key(key: str) -> str:
    """A key of a metric, parameter or tag that MLflow takes."""
    return re.sub(r"[^A-Za-z0-9_\-. :/]", "_", key)[:_MAX_KEY]


def fitted_tag(value: str) -> str:
    """A tag's value that MLflow takes whole."""
    return _fitted(value, _MAX_TAG)


def _fitted(value: str, limit: int) -> str:
    """A value that fits; what was cut is named by its digest, so that two cut values still differ."""
    if len(value) <= limit:
        return value
    mark = f"... sha256:{digest_bytes(value.encode('utf-8'))}"
    return value[: limit - len(mark)] + mark
