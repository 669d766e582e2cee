"""What DVC runs over: `.dspark/dag.json` and the inputs of every stage of a build, written only when they change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from dspark.config.build import ResolvedBuild
from dspark.config.models import Build, DomainSpec, DrafterSettings, Settings, ShardRecords
from dspark.config.resolve import Pipeline
from dspark.config.stages import (
    JOIN,
    STAGES,
    CalibrateInputs,
    CertifyInputs,
    EvaluateInputs,
    ExportInputs,
    FeaturesInputs,
    PackageInputs,
    ProfileInputs,
    PromptsInputs,
    ResponsesInputs,
    Stage,
    TrainInputs,
    geometry,
)
from dspark.corpus.domains import domain_file
from dspark.drafters.config import DrafterConfig
from dspark.io.atomic import write_if_changed
from dspark.io.digest import digest_file
from dspark.io.jsonfile import pretty_json
from dspark.targets.record import read_record
from dspark.workspace.code import CodeIndex
from dspark.workspace.imports import imported_files
from dspark.workspace.inputs import write_inputs
from dspark.workspace.layout import Workspace
from dspark.workspace.packages import initial_files

Entries = dict[str, dict[str, str]]


@dataclass(frozen=True)
class Instance:
    """One stage of one build, corpus, profile or certification.

    Args:
        stage: its line in the table.
        key: its key.
        entry: its fields in `.dspark/dag.json`.
    """

    stage: Stage
    key: str
    entry: dict[str, str]

    @property
    def name(self) -> str:
        """What DVC calls it."""
        return f"{self.stage.name}@{self.key}"


def tables(resolved: ResolvedBuild) -> dict[str, Entries]:
    """The dictionaries of `.dspark/dag.json`, as far as one build fills them."""
    build = resolved.build
    shape = geometry(build.drafter)
    common = {"target": build.target.name, "corpus": build.corpus.name, "geometry": shape}
    profiles: Entries = {}
    certifications: Entries = {}
    for profile in build.serving_profiles:
        fields = {"target": build.target.name, "geometry": shape, "profile": profile}
        profiles[JOIN.join((build.target.name, shape, profile))] = fields
        certifications[JOIN.join((build.name, profile))] = {**fields, "build": build.name, "corpus": build.corpus.name}
    return {
        "corpora": {build.corpus.name: {"target": build.target.name}},
        # `evaluate` measures on the first serving profile.
        "builds": {build.name: {**common, "profile": build.serving_profiles[0]}},
        "profiles": profiles,
        "certifications": certifications,
    }


def instances(resolved: ResolvedBuild) -> list[Instance]:
    """All stages of one build, in the order of the table."""
    filled = tables(resolved)
    return [Instance(stage, key, entry) for stage in STAGES for key, entry in filled[stage.per].items()]


def feeds(upstream: Instance, downstream: Instance) -> bool:
    """True if one stage reads what the other writes, directly."""
    output = upstream.stage.output(upstream.key, upstream.entry)
    read = downstream.stage.dependencies(downstream.key, downstream.entry)
    return any(f"{path}/".startswith(f"{output}/") or f"{output}/".startswith(f"{path}/") for path in read)


def leading_to(goal: str, builds: Iterable[ResolvedBuild]) -> list[Instance]:
    """A stage of some builds and all that it depends on, each once, those that are read before those that read them."""
    found = {instance.name: instance for resolved in builds for instance in instances(resolved)}
    kept: list[Instance] = []
    for instance in reversed(found.values()):
        if instance.stage.name == goal or any(feeds(instance, later) for later in kept):
            kept.append(instance)
    return kept[::-1]


def write_dag(workspace: Workspace, pipeline: Pipeline) -> bool:
    """Write `.dspark/dag.json` for all builds of the workspace, and the variants that are wanted of one.

    Returns:
        True if it changed.
    """
    merged: dict[str, Entries] = {stage.per: {} for stage in STAGES}
    for resolved in (*pipeline.builds.values(), *pipeline.variants):
        for name, entries in tables(resolved).items():
            merged[name].update(entries)
    return write_if_changed(workspace.dag, pretty_json(merged))


def write_all_inputs(workspace: Workspace, resolved: ResolvedBuild) -> list[str]:
    """Write the inputs of all stages of a build.

    Returns:
        the stages whose inputs changed, `stage@key`.
    Raises:
        SettingsError, PreflightError, DataError: no drafter as the recipe says fits the target; the files of a domain,
            the package that training starts from, or the imported drafter are not there or do not fit.
        IntegrityError: that package or drafter is damaged.
    """
    index = CodeIndex(workspace.state / "cache" / "code.json")
    changed = []
    for instance, settings in zip(instances(resolved), all_settings(workspace, resolved), strict=True):
        code = index.digest(workspace.root / "stages" / f"{instance.stage.script}.py")
        if write_inputs(workspace, instance.stage.name, instance.key, settings, code):
            changed.append(instance.name)
    index.save()
    return changed


def all_settings(workspace: Workspace, resolved: ResolvedBuild) -> Iterator[Settings]:
    """The settings of each of `instances(resolved)`: no stage gets a setting that it does not read."""
    build = resolved.build
    names = {"build": build.name, "corpus": build.corpus.name, "target": build.target.name}
    of_corpus = {"corpus": build.corpus.name, "target": build.target.name}
    profiles = {profile.name: profile for profile in resolved.profiles}
    for instance in instances(resolved):
        profile = profiles.get(instance.entry.get("profile", ""))
        match instance.stage.name:
            case "prompts":
                yield PromptsInputs(
                    **of_corpus,
                    domains=resolved.domains,
                    evaluation_domains=resolved.evaluation_domains,
                    prompts=build.corpus.prompts,
                    files=_domain_files(workspace, (*resolved.domains, *resolved.evaluation_domains)),
                )
            case "responses":
                yield ResponsesInputs(**of_corpus, responses=build.corpus.responses)
            case "features":
                yield FeaturesInputs(**of_corpus, features=build.corpus.features)
            case "train":
                yield TrainInputs(
                    **names,
                    drafter=_fitting_drafter(workspace, build),
                    training=build.training,
                    initial=initial_files(workspace, build),
                    imported=imported_files(workspace, build),
                )
            case "calibrate":
                yield CalibrateInputs(**names, calibration=build.calibration, **_records(workspace, resolved))
            case "profile":
                yield ProfileInputs(
                    target=build.target.name,
                    geometry=instance.entry["geometry"],
                    drafter=build.drafter,
                    profile=profile,
                )
            case "evaluate":
                yield EvaluateInputs(
                    **names,
                    training_domains=build.corpus.domains,
                    evaluation=build.evaluation,
                    profile=profile,
                    against=build.rivals,
                )
            case "export":
                yield ExportInputs(**names, export=build.export)
            case "certify":
                # No other engine is started with two drafters.
                measured = profile is not None and profile.engine == "reference" and profile.access == "local"
                yield CertifyInputs(
                    **names,
                    evaluation=build.evaluation,
                    certification=build.certification,
                    profile=profile,
                    against=build.against if measured else None,
                )
            case "package":
                yield PackageInputs(build=build, profiles=resolved.profiles)


def _fitting_drafter(workspace: Workspace, build: Build) -> DrafterSettings:
    """What the recipe says of the drafter; refused before any answer is made if the target cannot have one like it."""
    record = workspace.target_record(build.target.name)
    if record.is_file():
        DrafterConfig.of(read_record(record), build.drafter)
    return build.drafter


def _records(workspace: Workspace, resolved: ResolvedBuild) -> dict[str, Any]:
    """What `calibrate` reads besides when it does not decode everything itself."""
    from dspark.engines.sglang_shards import shard_digests

    records = resolved.build.calibration.records
    if isinstance(records, ShardRecords):
        shards = shard_digests(workspace.root / records.folder)
        return {"shards": shards, "export_dtype": resolved.build.export.dtype}
    return {"profile": resolved.records_profile}


def _domain_files(workspace: Workspace, domains: tuple[DomainSpec, ...]) -> dict[str, str]:
    """What decides the prompts besides the settings: the content of every file that a domain reads."""
    folder = workspace.root / "pipeline" / "domains"
    return {domain.name: digest_file(domain_file(domain, folder)) for domain in domains}
