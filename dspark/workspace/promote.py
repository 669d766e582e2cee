"""`dspark promote` and `dspark rollback`: what a workspace adds to them, its gates and who asks."""

from __future__ import annotations

import getpass
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dspark.config.gates import read_gates
from dspark.config.models import ServingProfile
from dspark.config.resolve import resolve
from dspark.io.progress import install_stop_signals
from dspark.package.lineage import gather_lineage
from dspark.registry import promotion
from dspark.registry.catalogue import find_build
from dspark.registry.connection import connected
from dspark.registry.gate_report import Stage
from dspark.registry.gates import judge
from dspark.registry.promotion import Author, Promotion
from dspark.registry.tracking import Registry
from dspark.workspace.layout import Workspace
from dspark.workspace.listener import ListenedProgress, Listener
from dspark.workspace.profiles import read_profile


@dataclass(frozen=True)
class PromoteRequest:
    """What was asked for.

    Attributes:
        model: a build, or its registered model.
        tracking_uri: of the registry.
        version: of the model; None: the one that `alias` names.
        alias: `candidate`, `staging` or `production`.
        profiles: serving profiles that it is promoted to; empty: those that the build names and dspark can reach.
        reason: recorded.
        force: promote what the gates refuse.
        dry_run: change nothing.
    """

    model: str
    stage: Stage
    tracking_uri: str
    version: int | None = None
    alias: str = "candidate"
    profiles: tuple[str, ...] = ()
    reason: str | None = None
    force: bool = False
    dry_run: bool = False


def promote(workspace: Workspace, request: PromoteRequest, listener: Listener) -> Promotion:
    """Promote a version if the workspace's gates are open.

    Raises:
        SettingsError: `pipeline/gates.yaml` has mistakes; see also `registry.promotion.promote`.
        DsparkError: as `registry.promotion.promote`.
    """
    policy = read_gates(workspace.root)
    with _registry(workspace, request, listener, "promote") as (registry, progress):
        build = find_build(registry, request.model)
        profiles = _profiles(workspace, build, request.profiles)
        return promotion.promote(
            registry,
            build,
            request.stage,
            judge=lambda package, champion: judge(
                package, policy, champion=champion, profiles=profiles, stage=request.stage
            ),
            author=author(workspace.root, os.environ),
            scratch=workspace.state / "work",
            version=request.version,
            alias=request.alias,
            reason=request.reason,
            force=request.force,
            dry_run=request.dry_run,
            progress=progress,
        )


def rollback(workspace: Workspace, request: PromoteRequest, listener: Listener) -> Promotion:
    """Let what held a stage before hold it again.

    Raises:
        DsparkError: as `registry.promotion.rollback`.
    """
    with _registry(workspace, request, listener, "rollback") as (registry, progress):
        return promotion.rollback(
            registry,
            find_build(registry, request.model),
            request.stage,
            author=author(workspace.root, os.environ),
            scratch=workspace.state / "work",
            reason=request.reason or "",
            dry_run=request.dry_run,
            progress=progress,
        )


def _profiles(workspace: Workspace, build: str, names: tuple[str, ...]) -> Sequence[ServingProfile]:
    """What the package shall serve on.

    Raises:
        SettingsError: the workspace knows no such build or profile.
    """
    if names:
        return [read_profile(workspace, name) for name in names]
    named = resolve(workspace.root, build=build).chosen.profiles
    # Of those that dspark cannot reach nothing was measured; if there are no others, the gates shall say so.
    return [profile for profile in named if profile.access != "none"] or named


def author(root: Path, environment: Mapping[str, str]) -> Author:
    """Who promotes: in CI whoever started the job, with the job's address, else the user of this machine.

    Args:
        root: the workspace, whose commit is recorded.
        environment: of the process.
    """
    lineage = gather_lineage(root)
    commit = lineage.git_commit or f"unknown: {lineage.git_absent}"
    return Author(_by(environment), f"{commit} with changes" if lineage.git_dirty else commit)


def _by(environment: Mapping[str, str]) -> str:
    if environment.get("GITHUB_ACTIONS") and (actor := environment.get("GITHUB_ACTOR")):
        parts = [environment.get(name, "") for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_RUN_ID")]
        return f"{actor}, {parts[0]}/{parts[1]}/actions/runs/{parts[2]}"
    if environment.get("GITLAB_CI") and (actor := environment.get("GITLAB_USER_LOGIN")):
        return f"{actor}, {environment.get('CI_JOB_URL', '')}"
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user id may have no name
        user = f"uid {os.getuid()}"
    return f"{user}@{platform.node()}"


@contextmanager
def _registry(
    workspace: Workspace, request: PromoteRequest, listener: Listener, name: str
) -> Iterator[tuple[Registry, ListenedProgress]]:
    install_stop_signals()
    progress = ListenedProgress(listener, name)
    started = time.monotonic()
    with connected(request.tracking_uri, workspace=workspace.root, progress=progress) as registry:
        yield registry, progress
    progress.end(time.monotonic() - started)
