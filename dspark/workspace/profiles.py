"""The serving profiles of a workspace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark.config.build import FOLDERS
from dspark.config.declared import declared_names, read_declared
from dspark.config.models import ServingProfile
from dspark.config.resolve import build_names, resolve
from dspark.errors import SettingsError
from dspark.workspace.layout import Workspace

WORD = "serving profile"


@dataclass(frozen=True)
class ProfileDescription:
    """One profile as a list shows it."""

    name: str
    engine: str
    hardware: str
    access: str
    description: str

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


def describe_profiles(workspace: Workspace) -> list[ProfileDescription]:
    """All declared profiles; one whose file has mistakes is shown as broken."""
    rows = []
    for name in declared_names(workspace.root / FOLDERS[WORD]):
        try:
            profile = read_profile(workspace, name)
        except SettingsError as error:
            rows.append(ProfileDescription(name, "", "", "broken", error.message.splitlines()[0]))
            continue
        rows.append(
            ProfileDescription(name, profile.engine, str(profile.hardware), profile.access, profile.description)
        )
    return rows


def show_profile(workspace: Workspace, name: str) -> tuple[ServingProfile, list[str]]:
    """One profile and the builds that name it.

    Raises:
        SettingsError: it does not exist, or its file has mistakes.
    """
    profile = read_profile(workspace, name)
    builds = []
    for build in build_names(workspace.root):
        try:
            used = resolve(workspace.root, build=build).chosen.build.serving_profiles
        except SettingsError:
            continue  # `dspark doctor` says what is wrong with it
        if name in used:
            builds.append(build)
    return profile, builds


def named_profile(name: str, workspace: Callable[[], Workspace]) -> ServingProfile:
    """The profile in a YAML file, or one of a workspace, which need not be there for a file.

    Raises:
        SettingsError: it does not exist, or its file has mistakes.
    """
    path = Path(name)
    if path.suffix.lower() in (".yaml", ".yml") or "/" in name:
        if path.suffix != ".yaml" or not path.is_file():
            what = "is not called NAME.yaml" if path.is_file() else "file not found"
            raise SettingsError(f"{path}: {what}", "give the YAML file of a serving profile, or the name of one")
        return read_declared(path.resolve().parent, path.stem, ServingProfile, word=WORD)
    return read_profile(workspace(), name)


def read_profile(workspace: Workspace, name: str) -> ServingProfile:
    """One profile.

    Raises:
        SettingsError: it does not exist, or its file has mistakes.
    """
    return read_declared(workspace.root / FOLDERS[WORD], name, ServingProfile, word=WORD, root=workspace.root)
