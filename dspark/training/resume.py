"""Checkpoints of unfinished training: complete or absent, checked by digest, without pickles.

    work/step-000300/{model.safetensors, optimizer.safetensors, state.json}     the last ones are kept
    work/best-000200.safetensors                                                the best weights they refer to

There is one of each whatever the number of processes, in whole tensors, so that any other number of processes goes on.

Data order and anchors are functions of (seed, step), so no random state needs saving.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.config.models import TrainingSettings
from dspark.drafters.config import DrafterConfig
from dspark.errors import DataError
from dspark.io.atomic import atomic_path, replace_tree
from dspark.io.digest import digest_file, digest_json
from dspark.io.jsonfile import canonical_json, model_json, read_model, write_model
from dspark.training.processes import placed, whole

FREE = {"accumulation", "keep_checkpoints"}  # settings that do not decide what is learned
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"


class BestWeights(BaseModel):
    """The weights that did best on the dev split so far."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: str  # beside the checkpoints
    sha256: str
    step: int
    metrics: dict[str, Any]


class TrainingState(BaseModel):
    """`state.json` of a checkpoint; written last, so that a folder with one is complete.

    Attributes:
        step: optimizer steps done.
        identity: what this run is: architecture, settings, digests of the data. Resuming needs it unchanged.
        rows: of `curves.csv` so far.
        dev: metrics of the last evaluation.
        seconds: spent training so far, in all attempts.
        sha256: of the weights, the optimizer and this state itself (without this field).
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: Literal["dspark/train-state/1"] = Field(default="dspark/train-state/1", alias="schema")
    step: int
    identity: dict[str, Any]
    rows: list[dict[str, float | int | None]]
    dev: dict[str, Any] = {}
    seconds: float
    best: BestWeights | None = None
    sha256: dict[str, str] = {}


def write_best(work: Path, step: int, weights: dict[str, Tensor]) -> None:
    """Write the best weights; earlier ones stay until `write_checkpoint` finds nothing that refers to them."""
    with atomic_path(_best_path(work, step)) as temporary:
        save_file(weights, temporary)


def best_weights(work: Path, step: int, metrics: dict[str, Any]) -> BestWeights:
    """A reference to best weights that were written."""
    path = _best_path(work, step)
    return BestWeights(file=path.name, sha256=digest_file(path), step=step, metrics=metrics)


def read_best(work: Path, best: BestWeights) -> dict[str, Tensor]:
    """The best weights.

    Raises:
        DataError: if they are missing or damaged.
    """
    path = work / best.file
    if not path.is_file() or digest_file(path) != best.sha256:
        raise DataError(f"{path}: missing or damaged", f"remove {work} and train again")
    return load_file(path)


def write_checkpoint(
    work: Path, state: TrainingState, weights: dict[str, Tensor], optimizer: dict[str, Tensor], keep: int
) -> None:
    """Write `step-<step>` with one rename, then remove what the last `keep` don't need."""
    path = work / f"step-{state.step:06d}"
    part = work / f".{path.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name, tensors in ((MODEL, weights), (OPTIMIZER, optimizer)):
        with atomic_path(part / name) as temporary:
            save_file(tensors, temporary)
    write_model(part / STATE, state.model_copy(update={"sha256": _sums(part, state)}))
    replace_tree(part, path)
    _prune(work, state.step, keep)


def read_latest(work: Path) -> tuple[TrainingState, dict[str, Tensor], dict[str, Tensor]] | None:
    """State, weights and optimizer of the newest checkpoint that is intact; None if there is none."""
    for path in _checkpoints(work):
        state = _intact(path)
        if state is not None:
            return state, load_file(path / MODEL), load_file(path / OPTIMIZER)
    return None


def run_identity(config: DrafterConfig, settings: TrainingSettings, digests: dict[str, str]) -> dict[str, Any]:
    """What a run is, and has to stay from one attempt to the next.

    Args:
        digests: of data and initial weights.
    """
    training = settings.model_dump(mode="json", exclude=FREE)
    return {"drafter": config.model_dump(mode="json"), "training": training, **digests}


def check_identity(work: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse to continue a run that was started with something else.

    Raises:
        DataError: naming every difference.
    """
    before, after = _flat(found), _flat(wanted)
    different = [
        f"{key}: was {before.get(key, 'absent')}, is {after.get(key, 'absent')}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]
    if different:
        raise DataError(
            f"{work}: the checkpoint belongs to another training run ({'; '.join(different)})",
            f"put the settings back, or remove {work} to start again",
        )


def optimizer_tensors(
    optimizers: Iterable[torch.optim.Optimizer], names: dict[Tensor, str], *, wanted: bool = True
) -> dict[str, Tensor]:
    """The optimizers' state by parameter name, on the CPU: `<parameter>/exp_avg` and so on.

    Args:
        wanted: False: take part in gathering what is spread over processes, and keep nothing of it.
    """
    result = {}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                gathered = whole(torch.as_tensor(value))
                if wanted:
                    result[f"{names[parameter]}/{key}"] = gathered
    return result


def restore_optimizers(
    optimizers: Iterable[torch.optim.Optimizer], names: dict[Tensor, str], saved: dict[str, Tensor]
) -> None:
    """Put a saved state back, each tensor where its parameter is (the step counter stays where AdamW keeps it)."""
    entries: dict[str, dict[str, Tensor]] = {}
    for key, value in saved.items():
        name, _, field = key.rpartition("/")
        entries.setdefault(name, {})[field] = value
    for optimizer in optimizers:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            optimizer.state[parameter] = {
                field: placed(value, parameter) if value.dim() else value.to(parameter.device)
                for field, value in entries.get(names[parameter], {}).items()
            }


def _best_path(work: Path, step: int) -> Path:
    return work / f"best-{step:06d}.safetensors"


def _checkpoints(work: Path) -> list[Path]:
    """Finished checkpoints, newest first."""
    return sorted((path for path in work.glob("step-*") if (path / STATE).is_file()), key=_step, reverse=True)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _sums(folder: Path, state: TrainingState) -> dict[str, str]:
    """What a checkpoint consists of: the digests of its files, and of the state without them."""
    found = {name: digest_file(folder / name) for name in (MODEL, OPTIMIZER)}
    return {**found, STATE: digest_json(model_json(state.model_copy(update={"sha256": {}})))}


def _intact(path: Path) -> TrainingState | None:
    """The state of a checkpoint that is as it was written, down to the best weights that it refers to; else None."""
    try:
        state = read_model(path / STATE, TrainingState)
        if state.sha256 != _sums(path, state):
            return None
        if state.best is not None and digest_file(path.parent / state.best.file) != state.best.sha256:
            return None
    except (DataError, OSError):
        return None
    return state


def _prune(work: Path, step: int, keep: int) -> None:
    """Keep the last checkpoints up to this step, and what they refer to; what lies after it was damaged."""
    kept: set[str] = set()
    past = [path for path in _checkpoints(work) if _step(path) <= step]
    for path in _checkpoints(work):
        if path not in past[:keep]:
            shutil.rmtree(path)
    for path in past[:keep]:
        with contextlib.suppress(DataError):  # a damaged one needs nothing
            if best := read_model(path / STATE, TrainingState).best:
                kept.add(best.file)
    for path in work.glob("best-*.safetensors"):
        if path.name not in kept:
            path.unlink()


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    if not isinstance(value, dict):
        return {prefix: canonical_json(value)}
    result: dict[str, str] = {}
    for key, inner in value.items():
        result |= _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    return result
