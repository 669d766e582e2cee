"""From declarations to builds: what `dspark run` is about to make, every value with its origin.

A build is `pipeline/builds/<name>.yaml`; a target without a build of its own name has a default one. Nothing is
written, and all mistakes of a build are raised together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dspark.config.build import ALONE, FOLDERS, SECTION_KEYS, BuildReader, ResolvedBuild, mistakes_of
from dspark.config.declared import Mistake, Mistakes, declared_names, suggestion
from dspark.config.gates import PATH as GATES
from dspark.config.gates import read_gates
from dspark.config.layers import Overlay, environment_overrides, flag_overrides
from dspark.config.names import build_names as build_names
from dspark.errors import SettingsError


@dataclass(frozen=True)
class Pipeline:
    """All builds of a workspace; `chosen` is the one that was asked for, flags and environment applied."""

    chosen: ResolvedBuild
    builds: dict[str, ResolvedBuild]
    broken: dict[str, SettingsError] = field(default_factory=dict)  # other builds whose files have mistakes
    variants: tuple[ResolvedBuild, ...] = ()  # of a study of the chosen build, in its place

    @property
    def wanted(self) -> tuple[ResolvedBuild, ...]:
        """The builds that are to be made: the variants, or the chosen one."""
        return self.variants or (self.chosen,)


def resolve(
    root: Path,
    *,
    target: str | None = None,
    build: str | None = None,
    flags: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
    overlay: Overlay | None = None,
) -> Pipeline:
    """Resolve the build that was asked for, and as many of the others as have no mistakes.

    Args:
        root: the workspace.
        target: `--target`: the build of that name, or the default build of that target.
        build: `--build`, overrides `target`.
        flags: `--set` values; they and the environment concern the chosen build only.
        environment: variables (None: none).
        overlay: what a verb lays over the chosen build's file.
    Raises:
        Mistakes: everything that is wrong with the chosen build, its corpus or the overrides.
        SettingsError: no such build or target.
    """
    baselines, wrong_gates = _baselines(root)
    reader = BuildReader(root, baselines)
    by_flag, wrong_flags = flag_overrides(flags, SECTION_KEYS, ALONE)
    by_variable, wrong_variables = environment_overrides(environment or {}, SECTION_KEYS, ALONE)
    name = _chosen_name(root, target, build)
    mistakes = [*wrong_variables, *wrong_flags, *wrong_gates]
    chosen: ResolvedBuild | None = None
    try:
        chosen = reader.build(name, [*by_variable, *by_flag], overlay)
    except SettingsError as error:
        mistakes += mistakes_of(error)
    if mistakes or chosen is None:
        raise Mistakes(mistakes)
    if target is not None and chosen.build.target.name != target:
        raise SettingsError(
            f"pipeline/builds/{name}.yaml: build {name!r} is for target {chosen.build.target.name!r}, not {target!r}",
            f"name the build alone: --build {name}",
        )
    declared: dict[str, ResolvedBuild] = {}
    broken: dict[str, SettingsError] = {}
    for other in build_names(root):
        try:
            declared[other] = reader.build(other, [])
        except SettingsError as error:
            broken[other] = error
    _refuse_two_meanings_of_a_corpus(declared, name)
    return Pipeline(chosen, declared | {name: chosen}, {key: error for key, error in broken.items() if key != name})


def resolve_all(root: Path) -> tuple[dict[str, ResolvedBuild], dict[str, SettingsError]]:
    """All builds of a workspace, each file read once, and what is wrong with those that have mistakes."""
    baselines, wrong_gates = _baselines(root)
    reader = BuildReader(root, baselines)
    builds: dict[str, ResolvedBuild] = {}
    broken: dict[str, SettingsError] = {}
    for name in build_names(root):
        try:
            builds[name] = reader.build(name, [])
            if wrong_gates:
                raise Mistakes(wrong_gates)
        except SettingsError as error:
            broken[name] = error
    for name in builds.keys() - broken.keys():
        try:
            _refuse_two_meanings_of_a_corpus(builds, name)
        except SettingsError as error:
            broken[name] = error
    return {name: resolved for name, resolved in builds.items() if name not in broken}, dict(sorted(broken.items()))


def _baselines(root: Path) -> tuple[dict[str, str], list[Mistake]]:
    """The pinned packages by build; a workspace without gates pins none, and promotes none."""
    if not (root / GATES).is_file():
        return {}, []
    try:
        return dict(read_gates(root).baselines), []
    except SettingsError as error:
        return {}, mistakes_of(error)


def _chosen_name(root: Path, target: str | None, build: str | None) -> str:
    name = build or target
    if name is None:
        raise SettingsError(
            "which build? name a target or a build", "add --target NAME (all of them: dspark targets list)"
        )
    names = build_names(root)
    if name in names:
        return name
    word, listing = ("build", "") if build else ("target", "all targets: dspark targets list")
    known = names if build else declared_names(root / FOLDERS["target"])
    raise SettingsError(f"{word} {name!r} does not exist", suggestion(name, known, listing))


def _refuse_two_meanings_of_a_corpus(builds: Mapping[str, ResolvedBuild], chosen: str) -> None:
    mine = builds.get(chosen)
    if mine is None:
        return
    for name, other in builds.items():
        if (
            name == chosen
            or other.build.corpus.name != mine.build.corpus.name
            or other.build.corpus == mine.build.corpus
        ):
            continue
        one, two = mine.build.corpus.model_dump(), other.build.corpus.model_dump()
        differing = ", ".join(key for key in one if one[key] != two[key])
        raise SettingsError(
            f"builds {chosen!r} and {name!r} name one corpus, {mine.build.corpus.name!r}, "
            f"but differ in its settings: {differing}",
            f"give one of them another `corpus:` name (pipeline/builds/{chosen}.yaml, pipeline/builds/{name}.yaml)",
        )
