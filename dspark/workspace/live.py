"""`dspark live`: a build that is there under a load that rises and falls. Nothing of the build changes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.config.declared import read_mapping, relative, validated
from dspark.config.models import LiveLoadSettings
from dspark.config.stages import EvaluateInputs
from dspark.errors import SettingsError
from dspark.evaluation.live_report import LiveReport, write_report
from dspark.io.jsonfile import read_model
from dspark.io.progress import Progress, install_stop_signals
from dspark.workspace.layout import Workspace
from dspark.workspace.listener import ListenedProgress, Listener
from dspark.workspace.lock import run_lock
from dspark.workspace.served import (
    fitted_temperatures,
    impossible_policies,
    served_drafter,
    served_inputs,
    served_target,
)
from dspark.workspace.stage import StagePaths

if TYPE_CHECKING:
    from dspark.evaluation.live import LiveArms, Prompts
    from dspark.targets.loading import Target

STAGE = "live"


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
    inputs, paths = served_inputs(workspace, build, folder, rivals)
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
    from dspark.evaluation.live import live_load

    target = served_target(inputs, paths)
    settings, arms = _arms(workspace, inputs.build, target, paths, settings, rivals, progress)
    longest = max([len(arms.lengths), *(one.proposer.gamma for one in arms.baselines if one.proposer is not None)])
    prompts = _prompts(paths, settings, target.record.max_position - longest)
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
    from dspark.decoding.proposers import torch_proposer
    from dspark.evaluation.live import LiveArms
    from dspark.profiling.cost import CostReport
    from dspark.scheduling.prefix import PrefixScheduler

    drafter = served_drafter(workspace, build, target)
    temperatures = fitted_temperatures(paths, settings.sampling)
    scheduler: PrefixScheduler | None = None
    cost = read_model(paths.cost, CostReport).scheduling if paths.cost.is_file() else None
    if cost is not None:
        scheduler = PrefixScheduler(cost, drafter.config.gamma, temperatures)
    impossible = impossible_policies(
        settings.policies, confident=drafter.config.confidence, costed=scheduler is not None
    )
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
        rivals={name: torch_proposer(served_drafter(workspace, name, target)) for name in rivals},
    )
    return settings, arms


def _prompts(paths: StagePaths, settings: LiveLoadSettings, room: int) -> Prompts:
    from dspark.corpus.prompts import read_prompts
    from dspark.evaluation.decoding import that_fit
    from dspark.evaluation.live import Prompts

    everything = read_prompts(paths.corpus / "prompts" / "eval.jsonl")
    fitting, _ = that_fit(everything, lambda one: len(one.token_ids), settings.new_tokens, [room])
    return Prompts([one.token_ids for one in fitting], [one.domain for one in fitting])
