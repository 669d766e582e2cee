"""`dspark live`: a build that is there under a load that rises and falls. Nothing of the build changes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.config.declared import read_mapping, relative, validated
from dspark.config.models import LiveLoadSettings
from dspark.config.stages import BY_NAME, EvaluateInputs
from dspark.device import serving_device
from dspark.errors import PreflightError, SettingsError
from dspark.evaluation.live_report import LiveReport, write_report
from dspark.io.jsonfile import read_model
from dspark.io.progress import Progress, install_stop_signals
from dspark.workspace.inputs import read_entry, read_inputs
from dspark.workspace.layout import Workspace
from dspark.workspace.listener import ListenedProgress, Listener
from dspark.workspace.lock import run_lock
from dspark.workspace.stage import StagePaths

if TYPE_CHECKING:
    from dspark.drafters.base import Drafter
    from dspark.evaluation.live import LiveArms, Prompts
    from dspark.scheduling.prefix import PrefixScheduler
    from dspark.targets.loading import Target

STAGE = "live"
_AS = "evaluate"  # the stage whose inputs this measures with


def read_load(path: Path | None, workspace: Workspace) -> LiveLoadSettings:
    """What a file declares of a load; None: the defaults.

    Raises:
        Mistakes: everything that is wrong in it, with lines.
        SettingsError: no such file, or not YAML.
    """
    if path is None:
        return LiveLoadSettings()
    display = relative(path.resolve(), workspace.root)
    return validated(read_mapping(path, display), LiveLoadSettings, path, display)


def live_load_of(
    workspace: Workspace,
    build: str,
    settings: LiveLoadSettings,
    listener: Listener,
    *,
    rivals: Sequence[str] = (),
    out: Path | None = None,
) -> tuple[LiveReport, Path]:
    """Replay a load on a build's trained drafter, calibration and cost, on its first serving profile.

    Args:
        build: one that was evaluated, or could be.
        rivals: builds of the same target, whose drafters verify whole blocks under the same load: mtp1, for instance.
        out: a folder; None: `.dspark/live/<build>`.
    Returns:
        the report, and the folder that holds it with its tables.
    Raises:
        PreflightError: a build is not trained, or torch sees no such device.
        SettingsError: a policy that this drafter, or a build that is not profiled, cannot have.
        DataError: no prompts, or a load that cannot be measured.
        IntegrityError: a drafter of another target.
    """
    folder = out or workspace.state / STAGE / build
    inputs = read_inputs(workspace, _AS, build)[1]
    if not isinstance(inputs, EvaluateInputs):
        raise TypeError(f"the inputs of {_AS} are {type(inputs).__name__}")
    paths = StagePaths(workspace, BY_NAME[_AS], build, read_entry(workspace, _AS, build), out=folder, work=folder)
    for name in (build, *rivals):
        if not _drafter(workspace, name).is_dir():
            raise PreflightError(f"build {name!r} has no trained drafter", f"dspark run --build {name}")
    install_stop_signals()
    progress = ListenedProgress(listener, f"{STAGE}@{build}")
    started = time.monotonic()
    with run_lock(workspace, f"dspark live of build {build!r}", listener.note):
        report = _replay(workspace, inputs, paths, settings, rivals, progress)
        folder.mkdir(parents=True, exist_ok=True)
        write_report(folder, report)
    progress.end(time.monotonic() - started)
    return report, folder


def _replay(
    workspace: Workspace,
    inputs: EvaluateInputs,
    paths: StagePaths,
    settings: LiveLoadSettings,
    rivals: Sequence[str],
    progress: Progress,
) -> LiveReport:
    import torch

    from dspark.evaluation.live import live_load
    from dspark.profiling.fingerprint import threads
    from dspark.targets.loading import load_target
    from dspark.targets.record import read_record

    torch.set_num_threads(threads(inputs.profile))
    record = read_record(paths.target)
    target = load_target(record, paths.root, dtype=inputs.profile.dtype, device=serving_device(inputs.profile))
    settings, arms = _arms(workspace, inputs.build, target, paths, settings, rivals, progress)
    longest = max([len(arms.lengths), *(one.proposer.gamma for one in arms.baselines if one.proposer is not None)])
    prompts = _prompts(paths, settings, record.max_position - longest)
    return live_load(target, arms, prompts, settings, progress=progress)


def _arms(
    workspace: Workspace,
    build: str,
    target: Target,
    paths: StagePaths,
    settings: LiveLoadSettings,
    rivals: Sequence[str],
    progress: Progress,
) -> tuple[LiveLoadSettings, LiveArms]:
    """What takes turns, and the settings without the policies that are there by default and cannot be had."""
    from dspark.calibration.results import read_report
    from dspark.decoding.proposers import torch_proposer
    from dspark.drafters.checkpoint import read_checkpoint
    from dspark.evaluation.drafter import temperatures_of
    from dspark.evaluation.live import LiveArms
    from dspark.profiling.cost import CostReport
    from dspark.scheduling.prefix import PrefixScheduler

    def read(name: str) -> Drafter:
        found = read_checkpoint(_drafter(workspace, name), target.embedding, target.head, record=target.record)
        return found.to(target.dtype)

    drafter = read(build)
    gamma, sampling = drafter.config.gamma, settings.sampling
    calibration = paths.build / "calibrate" / "calibration.json"
    temperatures = None
    if calibration.is_file() and (sampling.top_k, sampling.top_p) == (0, 1.0):
        temperatures = temperatures_of(read_report(calibration), sampling.temperature)
    scheduler: PrefixScheduler | None = None
    cost = read_model(paths.cost, CostReport).scheduling if paths.cost.is_file() else None
    if cost is not None:
        scheduler = PrefixScheduler(cost, gamma, temperatures)
    impossible = {
        name: "the drafter has no confidence head" if not drafter.config.confidence else "no cost was measured"
        for name in settings.policies
        if (not drafter.config.confidence and not name.startswith(("none", "fixed")))
        or (scheduler is None and name.startswith("scheduled"))
    }
    for name, reason in impossible.items():
        if "policies" in settings.model_fields_set:
            raise SettingsError(f"policy {name} cannot be had: {reason}", "leave it out of `policies`")
        progress.note(f"policy {name} is left out: {reason}")
    if scheduler is not None and drafter.config.confidence and temperatures is None:
        progress.note("confidences are not calibrated for this sampling: schedulers take them as they are")
    settings = settings.model_copy(update={"policies": tuple(n for n in settings.policies if n not in impossible)})
    arms = LiveArms.of(
        torch_proposer(drafter),
        settings,
        scheduler=scheduler,
        temperatures=temperatures,
        rivals={name: torch_proposer(read(name)) for name in rivals},
    )
    return settings, arms


def _prompts(paths: StagePaths, settings: LiveLoadSettings, room: int) -> Prompts:
    from dspark.corpus.prompts import read_prompts
    from dspark.evaluation.decoding import that_fit
    from dspark.evaluation.live import Prompts

    everything = read_prompts(paths.corpus / "prompts" / "eval.jsonl")
    fitting, _ = that_fit(everything, lambda one: len(one.token_ids), settings.new_tokens, [room])
    return Prompts([one.token_ids for one in fitting], [one.domain for one in fitting])


def _drafter(workspace: Workspace, build: str) -> Path:
    return workspace.build(build) / "train" / "drafter"
