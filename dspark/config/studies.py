"""Studies: builds of one corpus that differ in a few settings, to be compared. `pipeline/studies/<name>.yaml`.

A study names settings and values, not a target, so that one declaration serves every build. Its variants are builds
like any other, `<build>.<study>.<choices>`, made by the same stages; they are declared nowhere but here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from dspark.config.build import ALONE, CORPUS_SECTIONS, FOLDERS, SECTION_KEYS, SECTIONS, BuildReader, mistakes_of
from dspark.config.declared import NAME, Mistake, Mistakes, read_declared, suggestion
from dspark.config.layers import BUILT_IN, Layered, Origin, Overlay, Override, environment_overrides, flag_overrides
from dspark.config.models import LoadSettings, Name, Settings
from dspark.config.resolve import Pipeline, build_names, resolve
from dspark.errors import SettingsError

WORD = "study"
_SECTIONS = tuple(section for section in SECTIONS if section not in CORPUS_SECTIONS)


@dataclass(frozen=True)
class Option:
    """One choice on an axis.

    Attributes:
        word: what it adds to a variant's name.
        label: how tables and charts call it.
        settings: what it sets, by dotted key.
    """

    word: str
    label: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Axis:
    """Something that varies: a setting, or a word for settings that go together."""

    name: str
    options: tuple[Option, ...]


class StudySpec(Settings):
    """`pipeline/studies/<name>.yaml`."""

    name: Name
    description: str = ""
    # A setting with its values, or a word with named groups of settings. Every combination is a build. The first one
    # is the horizontal axis of the charts, combinations of the others are lines.
    vary: dict[str, Any] = Field(default_factory=dict)
    set: dict[str, Any] = Field(default_factory=dict)  # settings of all variants, over the build's
    # What is compared besides. `threshold`: acceptance of the blocks that each threshold would have verified, from the
    # records of one evaluation. `load`: throughput and speed per user at numbers of requests, timed once the build is
    # evaluated. Neither needs training, so that without `vary` the build itself is the only variant.
    sweep: Literal["threshold", "load"] | None = None
    load: LoadSettings | None = None  # of sweep load; None: the defaults

    @field_validator("vary")
    @classmethod
    def _axes_are_sound(cls, value: dict[str, Any]) -> dict[str, Any]:
        _axes(value)
        return value

    @field_validator("set")
    @classmethod
    def _settings_exist(cls, value: dict[str, Any]) -> dict[str, Any]:
        _require_settings(value)
        return value

    @model_validator(mode="after")
    def _compares_something(self) -> StudySpec:
        if not self.vary and self.sweep is None:
            raise ValueError("a study names what varies: vary: {drafter.layers: [1, 2, 3]}, or sweep: load")
        if self.set and not self.vary:
            raise ValueError("set is for variants: without vary the build itself is looked at, as it is declared")
        if self.load is not None and self.sweep != "load":
            raise ValueError("load is for sweep: load")
        if self.sweep == "load" and self.vary:
            raise ValueError("a load is timed on one build at a time: leave vary out, and name builds by --build")
        return self

    @property
    def axes(self) -> tuple[Axis, ...]:
        """What varies, in the order of the file."""
        return _axes(self.vary)


@dataclass(frozen=True)
class Variant:
    """One build of a study.

    Attributes:
        name: of the build.
        choices: the label on each axis, in the order of the axes.
        settings: what it lays over the build's file, as nested mappings.
    """

    name: str
    choices: dict[str, str]
    settings: dict[str, Any]


@dataclass(frozen=True)
class Study:
    """A study of one build.

    Attributes:
        variants: in the order of `pipeline.wanted`, which are their builds.
        pipeline: the build that it starts from is `chosen`.
    """

    spec: StudySpec
    variants: tuple[Variant, ...]
    pipeline: Pipeline


def read_study(root: Path, name: str) -> StudySpec:
    """One declared study.

    Raises:
        SettingsError: there is none of that name (with did-you-mean), or its file has mistakes (all of them).
    """
    return read_declared(root / FOLDERS[WORD], name, StudySpec, word=WORD, root=root)


def variants_of(spec: StudySpec, build: str) -> tuple[Variant, ...]:
    """Every combination of choices: the first axis runs fastest. Without axes the build itself.

    Raises:
        SettingsError: a combination makes no name.
    """
    if not spec.vary:
        return (Variant(build, {}, {}),)
    first, *others = spec.axes
    found = []
    for *rest, foremost in itertools.product(*(axis.options for axis in others), first.options):
        options = (foremost, *rest)
        name = ".".join([build, spec.name, *(option.word for option in options)])
        if not NAME.match(name):
            raise SettingsError(
                f"{FOLDERS[WORD]}/{spec.name}.yaml: a variant would be called {name!r}, {len(name)} characters; "
                "names have 63 at most",
                "give the study or its choices shorter names: vary: {WORD: {SHORT: {section.key: value}}}",
            )
        choices = {axis.name: option.label for axis, option in zip(spec.axes, options, strict=True)}
        found.append(Variant(name, choices, _tree([spec.set, *(option.settings for option in options)])))
    return tuple(found)


def resolve_study(
    root: Path,
    name: str,
    *,
    target: str | None = None,
    build: str | None = None,
    flags: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Study:
    """The builds of a study: those of the workspace's build that was asked for, with each variant's settings over it.

    Layers from below: what the build is made of, the study's `set`, what varies, environment and flags.

    Raises:
        Mistakes, SettingsError: as `resolve`; no such study; a build that trains nothing; a flag that sets what varies;
            everything that is wrong with the variants.
    """
    flags = tuple(flags)
    spec = read_study(root, name)
    pipeline = resolve(root, target=target, build=build, flags=flags, environment=environment)
    variants = variants_of(spec, pipeline.chosen.name)
    if not spec.vary:
        return Study(spec, variants, pipeline)
    base = pipeline.chosen
    if base.build.training.imported is not None:
        raise SettingsError(
            f"build {base.name!r} hands an imported drafter on and trains nothing, so there is nothing to vary",
            "name a build that trains: --build NAME",
        )
    overrides = [
        *environment_overrides(environment or {}, SECTION_KEYS, ALONE)[0],
        *flag_overrides(flags, SECTION_KEYS, ALONE)[0],
    ]
    mistakes = _set_what_varies(spec, overrides)
    taken = {*build_names(root)}
    path = f"{FOLDERS[WORD]}/{name}.yaml"
    reader = BuildReader(root)
    builds = []
    for variant in variants:
        if variant.name in taken:
            mistakes.append(Mistake(path, f"a variant would be called {variant.name!r}, which is a build", "rename it"))
        layer = {
            "corpus": base.build.corpus.name,  # one for all
            "against": None,  # what is in production stands beside no variant
            "serving_profiles": [base.build.serving_profiles[0]],  # the one that evaluation measures on
            **variant.settings,
        }
        try:
            overlay = Overlay(layer, Origin("verb", path, root / path))
            builds.append(reader.build(variant.name, overrides, overlay, base=base.name))
        except SettingsError as error:
            mistakes += mistakes_of(error)
    if mistakes:
        raise Mistakes(mistakes)
    return Study(spec, variants, replace(pipeline, variants=tuple(builds)))


def _axes(vary: Mapping[str, Any]) -> tuple[Axis, ...]:
    """What varies.

    Raises:
        ValueError: all that is wrong with it.
    """
    axes, problems = [], []
    for name, choices in vary.items():
        try:
            axes.append(Axis(name, _options(name, choices)))
        except ValueError as reason:
            problems.append(str(reason))
    if problems:
        raise ValueError("; ".join(problems))
    return tuple(axes)


def _options(name: str, choices: Any) -> tuple[Option, ...]:
    if isinstance(choices, list | tuple):
        _require_settings([name])
        strange = [value for value in choices if not isinstance(value, bool | int | float | str | None)]
        if strange:
            raise ValueError(f"{name}: a value is a number, a word, true, false or null, not {strange[0]!r}")
        options = tuple(Option(_word(name, value), _label(value), {name: value}) for value in choices)
    elif isinstance(choices, dict):
        for word, settings in choices.items():
            if not NAME.match(str(word)) or not isinstance(settings, dict | None):
                raise ValueError(f"{name}.{word}: expected a name of a-z, 0-9, '.', '_' and '-' with its settings")
            _require_settings(settings or {})
        options = tuple(Option(str(word), str(word), settings or {}) for word, settings in choices.items())
    else:
        raise ValueError(f"{name}: expected a list of values, or names with their settings, not {choices!r}")
    words = [option.word for option in options]
    if not words or len(set(words)) != len(words):
        raise ValueError(f"{name}: {'names nothing' if not words else 'names a choice twice'}")
    return options


def _require_settings(keys: Iterable[str]) -> None:
    """Refuse keys that variants cannot differ in.

    Raises:
        ValueError: names all of them.
    """
    problems = []
    for key in keys:
        section, _, rest = key.partition(".")
        if key == "recipe" or (section in _SECTIONS and rest and key != "training.imported"):
            continue
        if section in CORPUS_SECTIONS:
            problems.append(f"{key} is the corpus's, which all variants share: set it in the build")
        elif key == "training.imported":
            problems.append(f"{key} names a finished drafter: a study trains its own")
        else:
            known = ("recipe", *_SECTIONS)
            meant = suggestion(section, known)
            problems.append(f"{key!r} is no setting of a variant (section.key, or recipe): {meant}")
    if problems:
        raise ValueError("; ".join(problems))


def _set_what_varies(spec: StudySpec, overrides: Iterable[Override]) -> list[Mistake]:
    """Flags and variables that would make variants the same."""
    varied = {
        tuple(key.split("."))
        for axis in spec.axes
        for option in axis.options
        for key in option.settings
        if key != "recipe"
    }
    return [
        Mistake(override.origin.source, f"study {spec.name} varies {'.'.join(keys)}", "leave it out")
        for override in overrides
        for keys in sorted(varied)
        if override.keys[: len(keys)] == keys or keys[: len(override.keys)] == override.keys
    ]


def _tree(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Dotted keys as nested mappings, later layers over earlier ones."""
    merged = Layered()
    for settings in layers:
        for key, value in settings.items():
            merged.merge(Override(tuple(key.split(".")), value, BUILT_IN).tree(), BUILT_IN)
    return merged.tree


def _label(value: bool | int | float | str | None) -> str:
    """A value as YAML spells it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _word(name: str, value: bool | int | float | str | None) -> str:
    """What a value adds to a name: a word stands for itself, a number needs the setting's name."""
    label = _label(value)
    word = label if isinstance(value, str) else f"{name.rpartition('.')[2]}-{label}"
    return re.sub(r"[^a-z0-9._-]+", "-", word.lower())
