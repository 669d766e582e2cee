"""The ten stages: what each is keyed by, which settings it reads, which files it reads and writes.

`dvc.yaml` says the same to DVC (a test compares the two). Paths are templates below the workspace; `{key}` is the
stage's key, the other names are fields of its entry in `.dspark/dag.json`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from dspark.config.models import (
    Build,
    CalibrationSettings,
    CertificationSettings,
    CorpusSettings,
    Digest,
    DomainSpec,
    DrafterSettings,
    DType,
    EvaluationSettings,
    ExportSettings,
    FeatureSettings,
    Name,
    PromptSettings,
    ResponseSettings,
    ServingProfile,
    Settings,
    TrainingSettings,
)

# Joins the parts of a key. DVC splits stage names at the last `@`, so a key cannot hold one; names hold no `+`.
JOIN = "+"


# ---------------------------------------------------------------- settings that each stage reads


class PromptsInputs(Settings):
    """Stage `prompts`."""

    corpus: Name
    target: Name
    domains: tuple[DomainSpec, ...]
    evaluation_domains: tuple[DomainSpec, ...]
    prompts: PromptSettings
    files: dict[str, str]  # domain: sha256 of the file it reads

    def corpus_settings(self) -> CorpusSettings:
        """The corpus as the library takes it; what later stages read is left at its default."""
        return CorpusSettings(
            name=self.corpus,
            target=self.target,
            domains=tuple(domain.name for domain in self.domains),
            evaluation_domains=tuple(domain.name for domain in self.evaluation_domains),
            prompts=self.prompts,
        )


class ResponsesInputs(Settings):
    """Stage `responses`."""

    corpus: Name
    target: Name
    responses: ResponseSettings


class FeaturesInputs(Settings):
    """Stage `features`."""

    corpus: Name
    target: Name
    features: FeatureSettings


class TrainInputs(Settings):
    """Stage `train`."""

    build: Name
    corpus: Name
    target: Name
    drafter: DrafterSettings
    training: TrainingSettings
    initial: dict[str, Digest] = Field(default_factory=dict)  # file of the initial package: sha256
    imported: dict[str, Digest] = Field(default_factory=dict)  # file of the imported drafter: sha256


class CalibrateInputs(Settings):
    """Stage `calibrate`."""

    build: Name
    corpus: Name
    target: Name
    calibration: CalibrationSettings
    profile: ServingProfile | None = None  # whose server records confidences, if one does
    shards: dict[str, str] = Field(default_factory=dict)  # sha256 of each shard, if SGLang collected some
    export_dtype: DType | None = None  # with shards: of the drafter that was served


class ProfileInputs(Settings):
    """Stage `profile`: a random drafter of that geometry costs what a trained one costs."""

    target: Name
    geometry: str
    drafter: DrafterSettings
    profile: ServingProfile


class EvaluateInputs(Settings):
    """Stage `evaluate`."""

    build: Name
    corpus: Name
    target: Name
    training_domains: tuple[Name, ...]
    evaluation: EvaluationSettings
    profile: ServingProfile  # the build's first one: its threads and cost curve are used
    against: tuple[Digest, ...] = ()  # packages in the store that decode the same prompts


class ExportInputs(Settings):
    """Stage `export`."""

    build: Name
    corpus: Name
    target: Name
    export: ExportSettings


class CertifyInputs(Settings):
    """Stage `certify`."""

    build: Name
    corpus: Name
    target: Name
    evaluation: EvaluationSettings
    certification: CertificationSettings
    profile: ServingProfile
    against: Digest | None = None  # the package in the store whose speed is measured in turn with the candidate's


class PackageInputs(Settings):
    """Stage `package`: the manifest records every setting of the build."""

    build: Build
    profiles: tuple[ServingProfile, ...]


# ---------------------------------------------------------------- the table


@dataclass(frozen=True)
class Stage:
    """One stage of the DAG.

    Args:
        name: as in `dvc.yaml`.
        script: file in `stages/`.
        per: the dictionary of `.dspark/dag.json` that it runs over.
        reads: files and folders of other stages (and of `dspark run`) that it depends on.
        writes: its only output.
        inputs: model of the settings it reads.
    """

    name: str
    script: str
    per: Literal["corpora", "builds", "profiles", "certifications"]
    reads: tuple[str, ...]
    writes: str
    inputs: type[Settings]

    @property
    def writes_file(self) -> bool:
        """True if the output is a single file, not a folder."""
        return self.writes.endswith(".json")

    def dependencies(self, key: str, entry: dict[str, str]) -> list[str]:
        """All DVC dependencies of one instance, its own inputs file included."""
        return [inputs_path(self.name, key), *(path.format(key=key, **entry) for path in self.reads)]

    def output(self, key: str, entry: dict[str, str]) -> str:
        """The DVC output of one instance."""
        return self.writes.format(key=key, **entry)


_TARGET = "targets/{target}.json"
_FINGERPRINT = ".dspark/fingerprints/{profile}.json"
# Of what is not stored, training computes the features from the responses themselves.
_RESPONSES = ("corpora/{corpus}/responses/train.jsonl", "corpora/{corpus}/responses/dev.jsonl")
_COST = "profiles/{target}@{geometry}@{profile}"  # `cost.json`, or `absent.json` for a profile without access

STAGES: tuple[Stage, ...] = (
    Stage("prompts", "prepare_prompts", "corpora", (_TARGET,), "corpora/{key}/prompts", PromptsInputs),
    Stage(
        "responses",
        "generate_responses",
        "corpora",
        (_TARGET, "corpora/{key}/prompts/train.jsonl", "corpora/{key}/prompts/dev.jsonl"),
        "corpora/{key}/responses",
        ResponsesInputs,
    ),
    Stage(
        "features",
        "extract_features",
        "corpora",
        (_TARGET, "corpora/{key}/responses/train.jsonl", "corpora/{key}/responses/dev.jsonl"),
        "corpora/{key}/features",
        FeaturesInputs,
    ),
    Stage(
        "train",
        "train_drafter",
        "builds",
        (_TARGET, "corpora/{corpus}/features/manifest.json", *_RESPONSES),
        "builds/{key}/train",
        TrainInputs,
    ),
    Stage(
        "calibrate",
        "calibrate_confidence",
        "builds",
        (_TARGET, "builds/{key}/train/drafter", "corpora/{corpus}/prompts/calibration.jsonl"),
        "builds/{key}/calibrate",
        CalibrateInputs,
    ),
    Stage(
        "profile",
        "profile_engine",
        "profiles",
        (_TARGET, _FINGERPRINT),
        _COST,
        ProfileInputs,
    ),
    Stage(
        "export",
        "export_drafter",
        "builds",
        (
            _TARGET,
            "builds/{key}/train/drafter",
            "corpora/{corpus}/features/manifest.json",
            _RESPONSES[1],
        ),
        "builds/{key}/export",
        ExportInputs,
    ),
    Stage(
        "evaluate",
        "evaluate_drafter",
        "builds",
        (
            _TARGET,
            "builds/{key}/train/drafter",
            "builds/{key}/calibrate/calibration.json",
            "corpora/{corpus}/prompts/eval.jsonl",
            "builds/{key}/export",
            _COST,
            _FINGERPRINT,
        ),
        "builds/{key}/evaluate",
        EvaluateInputs,
    ),
    Stage(
        "certify",
        "certify_engine",
        "certifications",
        (
            _TARGET,
            "builds/{build}/export",
            "builds/{build}/calibrate/calibration.json",
            "builds/{build}/evaluate/lossless.json",
            "builds/{build}/evaluate/records",
            "corpora/{corpus}/prompts/eval.jsonl",
            _COST,
            _FINGERPRINT,
        ),
        "builds/{build}/certify/{profile}.json",
        CertifyInputs,
    ),
    Stage(
        "package",
        "assemble_package",
        "builds",
        (
            _TARGET,
            "corpora/{corpus}/prompts/summary.json",
            "corpora/{corpus}/responses/summary.json",
            "corpora/{corpus}/features/manifest.json",
            "builds/{key}/train",
            "builds/{key}/calibrate",
            "builds/{key}/evaluate",
            "builds/{key}/export",
            "builds/{key}/certify",
            _COST,
        ),
        "builds/{key}/package",
        PackageInputs,
    ),
)

BY_NAME: dict[str, Stage] = {stage.name: stage for stage in STAGES}


def inputs_path(stage: str, key: str) -> str:
    """The file with the settings and the code digest of one stage, below the workspace."""
    return f".dspark/inputs/{stage}/{key}.json"


def geometry(drafter: DrafterSettings) -> str:
    """What a drafter's cost depends on besides its target: part of the key of `profile`."""
    vocabulary = drafter.draft_vocab_size or "full"
    heads = f"-r{drafter.markov.rank}" if drafter.markov.rank else ""
    return f"{drafter.family}-g{drafter.gamma}-l{drafter.layers}{heads}-v{vocabulary}"
