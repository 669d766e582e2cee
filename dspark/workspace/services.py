"""Whether the services that a workspace names answer: its tracking server, and the engines of its serving profiles."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from dspark.config.build import ResolvedBuild
from dspark.config.models import ServingProfile
from dspark.errors import DsparkError, SettingsError
from dspark.registry.address import tracking_address
from dspark.registry.reach import require_server, shown
from dspark.workspace.environment import Check
from dspark.workspace.layout import Workspace

PATIENCE_SECONDS = 3.0


def services(workspace: Workspace, builds: Iterable[ResolvedBuild]) -> Iterator[Check]:
    """One check for each; of a registry inside the workspace nobody has to answer.

    Args:
        builds: whose serving profiles count.
    """
    try:
        uri = tracking_address(workspace.root, None, os.environ)
    except SettingsError as error:
        yield Check("tracking server", "error", error.message, error.hint)
    else:
        yield _tracking_server(uri)
    profiles = {profile.name: profile for resolved in builds for profile in resolved.profiles}
    for profile in profiles.values():
        if profile.access == "url":
            yield from _engine(profile)


def _tracking_server(uri: str) -> Check:
    try:
        require_server(uri, patience_seconds=PATIENCE_SECONDS)
    except DsparkError as error:
        away = "runs go on and keep what there is to tell; dspark registry sync delivers it once the server is up"
        return Check("tracking server", "warning", error.message, away)
    return Check("tracking server", "ok", shown(uri))


def _engine(profile: ServingProfile) -> Iterator[Check]:
    from dspark.engines.connect import connect

    for what in ("url", "plain_url", "profile_url", "records_url"):
        address = getattr(profile, what)
        if address is None:
            continue
        name = f"{profile.name} {what}"
        try:
            require_server(address, patience_seconds=PATIENCE_SECONDS)
            if what == "url":
                connect(address, profile.engine, patience=PATIENCE_SECONDS)
        except DsparkError as error:
            found = error.message.replace("the tracking server ", "")
            fix = f"start the server, or correct it: serving_profiles/{profile.name}.yaml"
            yield Check(name, "error", found, fix)
        else:
            yield Check(name, "ok", f"{shown(address)} answers")
