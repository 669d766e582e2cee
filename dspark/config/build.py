"""One build from its layers: `params.yaml`, recipe, build file, overrides; and everything its names stand for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from dspark.config.declared import (
    NAME,
    Mistake,
    Mistakes,
    declared_names,
    describe,
    hint_for,
    keys_of,
    read_declared,
    read_mapping,
    suggestion,
)
from dspark.config.layers import Layered, Origin, Overlay, Override
from dspark.config.models import (
    Build,
    CalibrationSettings,
    CertificationSettings,
    CorpusSettings,
    DomainSpec,
    DrafterSettings,
    EvaluationSettings,
    ExportSettings,
    FeatureSettings,
    PromptSettings,
    RecipeSpec,
    ResponseSettings,
    Sampling,
    ServerRecords,
    ServingProfile,
    Settings,
    TargetSpec,
    TrainingSettings,
)
from dspark.config.names import FOLDERS as FOLDERS
from dspark.errors import SettingsError

Declared = TypeVar("Declared", bound=Settings)

SECTIONS: dict[str, type[Settings]] = {
    "prompts": PromptSettings,
    "responses": ResponseSettings,
    "features": FeatureSettings,
    "drafter": DrafterSettings,
    "training": TrainingSettings,
    "calibration": CalibrationSettings,
    "evaluation": EvaluationSettings,
    "certification": CertificationSettings,
    "export": ExportSettings,
}
SECTION_KEYS = {section: tuple(model.model_fields) for section, model in SECTIONS.items()}
RECIPE_SECTIONS = ("drafter", "training")
CORPUS_SECTIONS = ("prompts", "responses", "features")
# Keys that say which things a build is made of; `defaults` of params.yaml may hold those marked True.
PARTS = {
    "name": False,
    "description": False,
    "target": False,
    "corpus": False,
    "domains": True,
    "evaluation_domains": True,
    "recipe": True,
    "serving_profiles": True,
    "against": False,
}
ALONE = ("against",)  # of these, what a flag or a variable may set


@dataclass(frozen=True)
class ResolvedBuild:
    """A build with everything its names stand for, and the origin of every setting."""

    build: Build
    domains: tuple[DomainSpec, ...]
    evaluation_domains: tuple[DomainSpec, ...]
    profiles: tuple[ServingProfile, ...]
    settings: Layered
    declared: bool  # False: no YAML file, made from the defaults
    records_profile: ServingProfile | None = None  # whose server calibration takes its records from

    @property
    def name(self) -> str:
        """The build's name."""
        return self.build.name

    def parts(self) -> list[tuple[str, Any, str]]:
        """What the build is made of, each with where that came from."""
        build, corpus = self.build, self.build.corpus
        values = {
            "target": build.target.name,
            "corpus": corpus.name,
            "domains": list(corpus.domains),
            "evaluation_domains": list(corpus.evaluation_domains),
            "recipe": build.recipe,
            "serving_profiles": list(build.serving_profiles),
        }
        origins = {key: self.settings.origin((key,)) for key in values}
        return [
            (key, value, origins[key].layer if origins[key].layer == "built-in" else origins[key].at((key,)))
            for key, value in values.items()
        ]

    def rows(self) -> list[tuple[str, Any, str]]:
        """Every setting as `section.key`, its value, and where that came from: `built-in`, or a file with its line."""
        found: list[tuple[str, Any, str]] = []

        def collect(value: Any, keys: tuple[str, ...]) -> None:
            if isinstance(value, dict) and value:
                for key, inner in value.items():
                    collect(inner, (*keys, key))
            else:
                found.append((".".join(keys), value, self.settings.where(keys)))

        whole = self.build.model_dump(mode="json")
        for key in ALONE:
            collect(whole[key], (key,))
        for section in SECTIONS:
            collect(whole["corpus"][section] if section in CORPUS_SECTIONS else whole[section], (section,))
        return found


class BuildReader:
    """Reads the declarations of one workspace, each file once."""

    def __init__(self, root: Path, baselines: Mapping[str, str] | None = None) -> None:
        self.root = root
        self._baselines = baselines or {}  # of pipeline/gates.yaml, by build
        self._read: dict[tuple[str, str], Any] = {}

    def declared(self, word: str, name: str, model: type[Declared]) -> Declared:
        """One declaration; a file with mistakes raises them again each time it is asked for."""
        key = (word, name)
        if key not in self._read:
            try:
                self._read[key] = read_declared(self.root / FOLDERS[word], name, model, word=word, root=self.root)
            except SettingsError as error:
                self._read[key] = error
        found = self._read[key]
        if isinstance(found, SettingsError):
            raise found
        return found  # type: ignore[no-any-return]  # stored under the model's own word

    def mapping(self, path: str) -> dict[str, Any]:
        """A YAML file as it stands; an absent one is empty."""
        key = ("", path)
        if key not in self._read:
            self._read[key] = read_mapping(self.root / path, path) if (self.root / path).is_file() else {}
        return dict(self._read[key])

    def build(
        self, name: str, overrides: list[Override], overlay: Overlay | None = None, *, base: str | None = None
    ) -> ResolvedBuild:
        """One build from all layers.

        Args:
            overrides: settings from the environment and flags, which win.
            overlay: what a verb lays over the build's file.
            base: the build whose file it is made from, of a variant that has none of its own; None: `name`.
        Raises:
            Mistakes: everything that is wrong with it.
        """
        mistakes: list[Mistake] = []
        parts, sections = self._layers(name, base or name, overrides, overlay, mistakes)
        mistakes += self._unnamed(parts, f"{FOLDERS['build']}/{base or name}.yaml")
        recipe = self._named(parts, "recipe", "recipe", RecipeSpec, mistakes)
        typed = {key: _validated(sections, key, model, mistakes) for key, model in SECTIONS.items()}
        target = self._named(parts, "target", "target", TargetSpec, mistakes)
        domains = self._named_list(parts, "domains", "domain", DomainSpec, mistakes)
        evaluation_domains = self._named_list(parts, "evaluation_domains", "domain", DomainSpec, mistakes)
        profiles = self._named_list(parts, "serving_profiles", "serving profile", ServingProfile, mistakes)
        for domain in domains:
            if domain.evaluation_only:
                what = f"domains: {domain.name!r} is only ever evaluated, never trained on"
                mistakes.append(Mistake(parts.where(["domains"]), what, "name it in evaluation_domains"))
        for key, found in (("domains", domains), ("serving_profiles", profiles)):
            if not found and key in parts.tree and not parts.tree[key]:
                mistakes.append(Mistake(parts.where([key]), f"{key}: at least one is needed", "see params.yaml"))
        if target is not None:
            mistakes += _other_traffic(parts, target, typed["responses"], profiles)
        mistakes += _longer_blocks(parts, typed["drafter"], profiles)
        mistakes += _other_heads(parts, sections, typed, profiles)
        mistakes += _no_digest(parts)
        mistakes += _unknown_mixture(sections, typed["training"], domains)
        recording = self._recording(sections, typed["calibration"], mistakes)
        if mistakes or target is None or recipe is None:
            raise Mistakes(mistakes)
        try:
            corpus = CorpusSettings(
                name=parts.tree["corpus"],
                target=target.name,
                domains=tuple(domain.name for domain in domains),
                evaluation_domains=tuple(domain.name for domain in evaluation_domains),
                **{key: typed[key] for key in CORPUS_SECTIONS},
            )
            build = Build(
                name=name,
                target=target,
                recipe=recipe.name,
                corpus=corpus,
                serving_profiles=tuple(profile.name for profile in profiles),
                against=parts.tree.get("against"),
                baseline=self._baselines.get(name),
                **{key: typed[key] for key in SECTIONS if key not in CORPUS_SECTIONS},
            )
        except ValidationError as error:
            # What is left to go wrong here is a part's own value: the corpus's name, or a list without entries.
            raise Mistakes(
                [Mistake(parts.where(["corpus"]), describe(item, CorpusSettings, "corpus.")) for item in error.errors()]
            ) from None
        merged = Layered(parts.tree | sections.tree, parts.origins | sections.origins)
        declared = (self.root / FOLDERS["build"] / f"{base or name}.yaml").is_file()
        return ResolvedBuild(build, domains, evaluation_domains, profiles, merged, declared, recording)

    def _layers(
        self, name: str, base: str, overrides: list[Override], overlay: Overlay | None, mistakes: list[Mistake]
    ) -> tuple[Layered, Layered]:
        """What a build is made of, and its settings, each from all layers."""
        path = f"{FOLDERS['build']}/{base}.yaml"
        values = self.mapping(path)
        origin = Origin("build", path, self.root / path)
        parts, sections = Layered(), Layered()
        self._lay_params(parts, sections, mistakes)
        parts.merge({"target": base, "corpus": base, "name": base}, Origin("built-in", path))
        parts.merge({key: value for key, value in values.items() if key in PARTS}, origin)
        for key in values.keys() - PARTS.keys() - SECTIONS.keys():
            mistakes.append(Mistake(origin.at([key]), f"unknown key {key!r}", suggestion(key, {*PARTS, *SECTIONS})))
        if not NAME.match(name) or parts.tree["name"] != base:
            mistakes.append(Mistake(path, f"a build is named as its file: {base!r} in a-z, 0-9, '.', '_' and '-'"))
        if overlay is not None:
            parts.merge({key: value for key, value in overlay.values.items() if key in PARTS}, overlay.origin)
        recipe = parts.tree.get("recipe")
        if recipe in declared_names(self.root / FOLDERS["recipe"]):
            file = f"{FOLDERS['recipe']}/{recipe}.yaml"
            raw = {key: value for key, value in self.mapping(file).items() if key in RECIPE_SECTIONS}
            sections.merge(raw, Origin("recipe", file, self.root / file))
        sections.merge({key: value for key, value in values.items() if key in SECTIONS}, origin)
        if overlay is not None:
            sections.merge({key: value for key, value in overlay.values.items() if key in SECTIONS}, overlay.origin)
        for override in overrides:
            (parts if override.keys[0] in ALONE else sections).merge(override.tree(), override.origin)
        return parts, sections

    def _lay_params(self, parts: Layered, sections: Layered, mistakes: list[Mistake]) -> None:
        path = "params.yaml"
        values = self.mapping(path)
        defaults = values.pop("defaults", None) or {}
        known = {*SECTIONS, "defaults", "tracking", "store"}  # the last two: `registry.address`, `workspace.stores`
        file = Origin("params.yaml", path, self.root / path)
        for key in values.keys() - known:
            mistakes.append(Mistake(file.at([key]), f"unknown key {key!r}", suggestion(key, known)))
        inside = Origin("params.yaml", path, self.root / path, ("defaults",))
        allowed = {key for key, is_default in PARTS.items() if is_default}
        for key in defaults.keys() - allowed:
            mistakes.append(Mistake(inside.at([key]), f"unknown key 'defaults.{key}'", suggestion(key, allowed)))
        parts.merge({key: value for key, value in defaults.items() if key in allowed}, inside)
        sections.merge({key: value for key, value in values.items() if key in SECTIONS}, file)

    def _unnamed(self, parts: Layered, file: str) -> list[Mistake]:
        """What neither the build nor the defaults name."""
        missing = [key for key in ("recipe", "domains", "serving_profiles") if key not in parts.tree]
        if not missing:
            return []
        lacking = "names no" if self.mapping("params.yaml").get("defaults") else "is missing, and with it"
        what = f"`defaults` {lacking} {', '.join(missing)}; nor does {file} name any"
        return [Mistake("params.yaml", what, "restore it: git checkout params.yaml; or name them in the build")]

    def _named(
        self, parts: Layered, key: str, word: str, model: type[Declared], mistakes: list[Mistake]
    ) -> Declared | None:
        if key not in parts.tree:
            return None  # said already
        name = parts.tree[key]
        if not isinstance(name, str):
            mistakes.append(Mistake(parts.where([key]), f"{key}: expected the name of a {word}, not {name!r}"))
            return None
        return self._found(parts, [key], name, word, model, mistakes)

    def _named_list(
        self, parts: Layered, key: str, word: str, model: type[Declared], mistakes: list[Mistake]
    ) -> tuple[Declared, ...]:
        names = parts.tree.get(key) or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            mistakes.append(Mistake(parts.where([key]), f"{key}: expected a list of names, not {names!r}"))
            return ()
        if len(set(names)) != len(names):
            mistakes.append(Mistake(parts.where([key]), f"{key}: {names} names something twice"))
        found = [self._found(parts, [key], name, word, model, mistakes) for name in names]
        return tuple(item for item in found if item is not None)

    def _recording(
        self, sections: Layered, calibration: BaseModel | None, mistakes: list[Mistake]
    ) -> ServingProfile | None:
        """The serving profile whose server records confidences."""
        if not isinstance(calibration, CalibrationSettings) or not isinstance(calibration.records, ServerRecords):
            return None
        keys, name = ["calibration", "records", "profile"], calibration.records.profile
        found = self._found(sections, keys, name, "serving profile", ServingProfile, mistakes)
        if found is not None and found.records_url is None:
            what = f"calibration.records.profile: serving profile {name} names no records_url"
            hint = f"name there a SGLang server in mode cap-accept: {FOLDERS['serving profile']}/{name}.yaml"
            mistakes.append(Mistake(sections.where(keys), what, hint))
        return found

    def _found(
        self, parts: Layered, keys: list[str], name: str, word: str, model: type[Declared], mistakes: list[Mistake]
    ) -> Declared | None:
        names = declared_names(self.root / FOLDERS[word])
        if name not in names:
            hint = suggestion(name, names, f"all {word}s: {', '.join(names) or 'none yet'}")
            mistakes.append(Mistake(parts.where(keys), f"{word} {name!r} does not exist", hint))
            return None
        try:
            return self.declared(word, name, model)
        except SettingsError as error:
            mistakes.extend(mistakes_of(error))
            return None


def _other_traffic(
    parts: Layered, target: TargetSpec, responses: BaseModel | None, profiles: Sequence[ServingProfile]
) -> list[Mistake]:
    """Profiles that serve other traffic than the corpus was answered with: acceptance would collapse unseen."""
    sampling = responses.sampling if isinstance(responses, ResponseSettings) and responses.sampling else target.sampling
    found = []
    for profile in profiles:
        if profile.thinking_mode not in (None, target.thinking_mode):
            what = f"profile {profile.name} serves thinking mode {profile.thinking_mode}, the target answers with"
            found.append((f"{what} {target.thinking_mode}", "thinking_mode"))
        if profile.sampling not in (None, sampling):
            what = f"profile {profile.name} serves {_spelt(profile.sampling)}, the corpus is answered with"
            found.append((f"{what} {_spelt(sampling)}", "responses.sampling"))
    return [
        Mistake(parts.where(["serving_profiles"]), f"serving_profiles: {what}", f"make them agree, or change {key}")
        for what, key in found
    ]


def _longer_blocks(parts: Layered, drafter: BaseModel | None, profiles: Sequence[ServingProfile]) -> list[Mistake]:
    """Policies that would verify more drafts than a block has."""
    gamma = drafter.gamma if isinstance(drafter, DrafterSettings) else None
    found = []
    for profile in profiles:
        for policy in profile.policies:
            length = int(policy[6:-1]) if policy.startswith("fixed(") else 0
            if gamma is not None and length > gamma:
                what = f"serving_profiles: profile {profile.name} names {policy}, a block has {gamma} drafts"
                found.append(Mistake(parts.where(["serving_profiles"]), what, "name at most that many"))
    return found


def _other_heads(
    parts: Layered, sections: Layered, typed: Mapping[str, BaseModel | None], profiles: Sequence[ServingProfile]
) -> list[Mistake]:
    """Settings of a confidence head that the drafter does not have, and a head that nothing trains."""
    drafter, training, calibration = (typed[key] for key in ("drafter", "training", "calibration"))
    if not isinstance(drafter, DrafterSettings):
        return []
    found = []
    weight = training.loss.confidence if isinstance(training, TrainingSettings) else None
    if weight is not None and drafter.confidence != (weight > 0):
        what = "weighs a confidence head that the drafter does not have" if weight else "leaves the head untrained"
        hint = f"set {'training.loss.confidence=0' if weight else 'drafter.confidence=false'}"
        where = sections.where(["training", "loss", "confidence"])
        found.append(Mistake(where, f"training.loss.confidence: {weight:g} {what}", hint))
    if drafter.confidence:
        return found
    if isinstance(calibration, CalibrationSettings) and calibration.records.kind != "decoding":
        what = f"calibration.records: {calibration.records.kind} records are of confidences, the drafter states none"
        found.append(Mistake(sections.where(["calibration", "records"]), what, "leave calibration.records out"))
    for profile in profiles:
        for policy in profile.policies:
            if policy.startswith("threshold"):
                what = f"serving_profiles: profile {profile.name} names {policy}, the drafter has no confidence head"
                found.append(Mistake(parts.where(["serving_profiles"]), what, "name fixed policies alone"))
    return found


def _no_digest(parts: Layered) -> list[Mistake]:
    """`against` names a package by its digest: a name or an alias would mean another package tomorrow."""
    digest = parts.tree.get("against")
    if digest is None or (isinstance(digest, str) and re.fullmatch(r"[0-9a-f]{64}", digest)):
        return []
    what = f"against: expected a package_digest (64 lower-case hexadecimal digits) or null, not {digest!r}"
    return [Mistake(parts.where(["against"]), what, "dspark registry list shows the packages and their digests")]


def _unknown_mixture(sections: Layered, training: BaseModel | None, domains: Sequence[DomainSpec]) -> list[Mistake]:
    """New domains that are none of the build's, and a replay of nothing."""
    mixture = training.mixture if isinstance(training, TrainingSettings) else None
    if mixture is None:
        return []
    names = [domain.name for domain in domains]
    where = sections.where(["training", "mixture"])
    found = [
        Mistake(where, f"training.mixture.new: {name!r} is none of the build's domains", suggestion(name, names))
        for name in mixture.new
        if name not in names
    ]
    if mixture.replay and not set(names) - set(mixture.new):
        what = "training.mixture: all domains are new, there is nothing to replay"
        found.append(Mistake(where, what, "set training.mixture.replay=0"))
    return found


def _spelt(sampling: Sampling | None) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in (sampling or Sampling()).model_dump().items())


def _validated(sections: Layered, key: str, model: type[Settings], mistakes: list[Mistake]) -> BaseModel | None:
    value = sections.tree.get(key)
    if value is not None and not isinstance(value, dict):
        mistakes.append(Mistake(sections.where([key]), f"{key}: expected `key: value` lines, not {value!r}"))
        return None
    try:
        return model.model_validate(value or {})
    except ValidationError as error:
        mistakes.extend(
            Mistake(
                sections.where([key, *keys_of(item, model)]), describe(item, model, f"{key}."), hint_for(item, model)
            )
            for item in error.errors()
        )
        return None


def mistakes_of(error: SettingsError) -> list[Mistake]:
    """The mistakes that an error stands for."""
    if isinstance(error, Mistakes):
        return list(error.mistakes)
    where, _, what = error.message.partition(": ")
    return [Mistake(where, what, error.hint)] if what else [Mistake("settings", error.message, error.hint)]
