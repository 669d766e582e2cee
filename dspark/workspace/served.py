"""A build as it is served: what `dspark live` and load studies time, read as the stage `evaluate` reads it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.config.models import Sampling
from dspark.config.stages import BY_NAME, EvaluateInputs
from dspark.device import serving_device
from dspark.errors import PreflightError
from dspark.workspace.inputs import read_entry, read_inputs
from dspark.workspace.layout import Workspace
from dspark.workspace.stage import StagePaths

if TYPE_CHECKING:
    from dspark.drafters.base import Drafter
    from dspark.targets.loading import Target

_AS = "evaluate"  # the stage whose inputs this reads


def served_inputs(
    workspace: Workspace, build: str, folder: Path, others: Iterable[str] = ()
) -> tuple[EvaluateInputs, StagePaths]:
    """The settings of a trained build, and where its files lie.

    Args:
        folder: for what is measured.
        others: builds that have to be trained, too.
    Raises:
        PreflightError: a build is not trained, or nothing was planned here.
    """
    inputs = read_inputs(workspace, _AS, build)[1]
    if not isinstance(inputs, EvaluateInputs):
        raise TypeError(f"the inputs of {_AS} are {type(inputs).__name__}")
    for name in (build, *others):
        if not _drafter(workspace, name).is_dir():
            raise PreflightError(f"build {name!r} has no trained drafter", f"dspark run --build {name}")
    entry = read_entry(workspace, _AS, build)
    return inputs, StagePaths(workspace, BY_NAME[_AS], build, entry, out=folder, work=folder)


def served_target(inputs: EvaluateInputs, paths: StagePaths) -> Target:
    """The target in the dtype, on the device and on the threads of the build's first serving profile."""
    import torch

    from dspark.profiling.fingerprint import threads
    from dspark.targets.loading import load_target
    from dspark.targets.record import read_record

    torch.set_num_threads(threads(inputs.profile))
    record = read_record(paths.target)
    return load_target(record, paths.root, dtype=inputs.profile.dtype, device=serving_device(inputs.profile))


def served_drafter(workspace: Workspace, build: str, target: Target) -> Drafter:
    """The trained drafter of a build, in the target's dtype.

    Raises:
        IntegrityError: it is one of another target.
    """
    from dspark.drafters.checkpoint import read_checkpoint

    found = read_checkpoint(_drafter(workspace, build), target.embedding, target.head, record=target.record)
    return found.to(target.dtype)


def fitted_temperatures(paths: StagePaths, sampling: Sampling) -> tuple[float, ...] | None:
    """The confidence temperatures that calibration found at a sampling, [gamma]; None: it found none there."""
    from dspark.calibration.results import read_report
    from dspark.evaluation.drafter import temperatures_of

    calibration = paths.build / "calibrate" / "calibration.json"
    if not calibration.is_file() or (sampling.top_k, sampling.top_p) != (0, 1.0):
        return None
    return temperatures_of(read_report(calibration), sampling.temperature)


def impossible_policies(policies: Iterable[str], *, confident: bool, costed: bool) -> dict[str, str]:
    """Policies that cannot be had, with the reason.

    Args:
        confident: the drafter has a confidence head.
        costed: the cost of a step is known.
    """
    return {
        name: "the drafter has no confidence head" if not confident else "no cost was measured"
        for name in policies
        if (not confident and not name.startswith(("none", "fixed"))) or (not costed and name.startswith("scheduled"))
    }


def _drafter(workspace: Workspace, build: str) -> Path:
    return workspace.build(build) / "train" / "drafter"
