"""`dspark overfit`: the overfit gate for a build's target and recipe. Nothing of it is kept."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.config.build import FOLDERS, ResolvedBuild
from dspark.device import accelerator
from dspark.io.progress import Progress, install_stop_signals
from dspark.targets.materialise import materialise
from dspark.workspace.layout import Workspace
from dspark.workspace.listener import ListenedProgress, Listener
from dspark.workspace.lock import run_lock

if TYPE_CHECKING:
    from dspark.evaluation.overfit import OverfitReport
    from dspark.targets.loading import Target

STAGE = "overfit"
PROMPTS_PER_DOMAIN = 64  # prepared at most: the train split of so many holds a handful


def overfit_target(
    workspace: Workspace,
    resolved: ResolvedBuild,
    listener: Listener,
    *,
    sequences: int,
    steps: int,
    learning_rate: float,
    new_tokens: int,
    share: float,
) -> OverfitReport:
    """Fetch the target if need be, take train prompts of the build's domains, and run the gate.

    Args:
        sequences: prompts to learn, taken in turns from the domains.
        steps, learning_rate, new_tokens, share: see `evaluation.overfit.overfit`.
    Raises:
        SettingsError: no drafter of this recipe fits the target.
        PreflightError, ServiceError: the target cannot be had, or `DSPARK_DEVICE` names what is not there.
    """
    from dspark.evaluation.overfit import overfit
    from dspark.targets.loading import load_target

    build, device = resolved.build, accelerator()
    install_stop_signals()
    progress = ListenedProgress(listener, f"{STAGE}@{build.name}")
    started = time.monotonic()
    with run_lock(workspace, f"dspark overfit of build {build.name!r}", listener.note):
        record = materialise(build.target, root=workspace.root, progress=progress)
        target = load_target(record, workspace.root, device=device)
        report = overfit(
            target,
            _prompts(workspace, resolved, target, sequences, progress),
            build.drafter,
            build.training,
            steps=steps,
            learning_rate=learning_rate,
            max_new_tokens=new_tokens,
            share=share,
            progress=progress,
        )
    progress.end(time.monotonic() - started)
    return report


def _prompts(
    workspace: Workspace, resolved: ResolvedBuild, target: Target, count: int, progress: Progress
) -> list[list[int]]:
    """The first train prompts that a corpus of the build would have."""
    from dspark.corpus.prepare import prepare_prompts
    from dspark.corpus.prompts import read_prompts
    from dspark.evaluation.decoding import spread_prompts

    corpus = resolved.build.corpus
    fewer = min(corpus.prompts.per_domain or PROMPTS_PER_DOMAIN, PROMPTS_PER_DOMAIN)
    corpus = corpus.model_copy(
        update={"prompts": corpus.prompts.model_copy(update={"per_domain": fewer}), "evaluation_domains": ()}
    )
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "prompts"
        prepare_prompts(
            corpus,
            resolved.domains,
            workspace.root / FOLDERS["domain"],
            target.template,
            out,
            progress,
            needed=["train"],
        )
        chosen = spread_prompts(read_prompts(out / "train.jsonl"), count)
    return [list(prompt.token_ids) for prompt in chosen]
