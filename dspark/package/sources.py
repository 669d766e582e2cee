"""What a package is made from, and what its manifest says about that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dspark.config.models import Build, ServingProfile
from dspark.corpus.responses import ResponsesSummary
from dspark.corpus.summary import PromptsSummary
from dspark.drafters.description import read_description, trained_config
from dspark.features.store import FeatureManifest
from dspark.io.digest import digest_json
from dspark.io.jsonfile import model_json, read_json, read_model
from dspark.package.layout import DRAFTER_CONFIG, DRAFTER_WEIGHTS
from dspark.package.lineage import Lineage
from dspark.package.manifest import (
    ConfidencePart,
    CorpusInput,
    Description,
    DrafterPart,
    FileEntry,
    Inputs,
    MarkovPart,
    TargetInput,
    model_digest,
    package_digest,
)
from dspark.package.tensors import describe_tensors, read_header
from dspark.targets.record import TargetRecord

AGAIN = "`dspark run` makes again what is missing or out of date"


@dataclass(frozen=True)
class Sources:
    """What a package is made from.

    Attributes:
        build: the resolved settings.
        record: the target.
        profiles: the build's serving profiles, in its order.
        corpus: `corpora/<c>`; its three summaries are read.
        train, calibrate, evaluate, export: folders of the build's stages.
        costs: `cost.json` of each serving profile that was measured.
        certificates: `certify/<profile>.json` of every serving profile.
        lineage: of the code and the inputs.
    """

    build: Build
    record: TargetRecord
    profiles: tuple[ServingProfile, ...]
    corpus: Path
    train: Path
    calibrate: Path
    evaluate: Path
    export: Path
    costs: Mapping[str, Path]
    certificates: Mapping[str, Path]
    lineage: Lineage


def describe(sources: Sources, staged: Path, deployable: Sequence[FileEntry]) -> Description:
    """The description of a package whose deployable files stand in `staged`.

    Raises:
        DataError: a summary of the corpus is missing or does not validate.
        IntegrityError: the checkpoint is not one that dspark wrote.
    """
    return Description(
        name=sources.build.name,
        build=sources.build.name,
        inputs=Inputs(
            target=_target_input(sources.record),
            corpus=_corpus_input(sources),
            recipe=_recipe(sources),
        ),
        drafter=_drafter_part(staged),
        model_digest=model_digest(deployable),
        package_digest=package_digest(deployable),
    )


def _target_input(record: TargetRecord) -> TargetInput:
    shared = TargetInput.model_fields.keys() & TargetRecord.model_fields.keys() - {"public_id"}
    value = {name: getattr(record, name) for name in shared}
    return TargetInput(**value, public_id=record.public_id or record.name)


def _corpus_input(sources: Sources) -> CorpusInput:
    """The corpus by its token sequences: shard keys are digests of exactly those (and of target and taps)."""
    prompts = read_model(sources.corpus / "prompts" / "summary.json", PromptsSummary, hint=AGAIN)
    responses = read_model(sources.corpus / "responses" / "summary.json", ResponsesSummary, hint=AGAIN)
    features = read_model(sources.corpus / "features" / "manifest.json", FeatureManifest, hint=AGAIN)
    shards = {split: [entry.key for entry in entries] for split, entries in features.splits.items()}
    settings = sources.build.corpus
    return CorpusInput(
        name=settings.name,
        digest=digest_json({"prompts": prompts.digest, "shards": shards}),
        domains=settings.domains,
        evaluation_domains=settings.evaluation_domains,
        prompts={split: count.prompts for split, count in prompts.splits.items()},
        tokens={
            split: sum(count.response_tokens for count in domains.values())
            for split, domains in responses.splits.items()
        },
        thinking_mode=sources.record.thinking_mode,
        sampling=responses.sampling.model_dump(mode="json"),
    )


def _recipe(sources: Sources) -> dict[str, Any]:
    """Every setting that the build was made with; the target and the corpus have parts of their own.

    Of an imported drafter `training` says where it came from; how to train was never read.
    """
    build = sources.build
    parts: dict[str, BaseModel] = {
        "drafter": build.drafter,
        "training": build.training,
        "prompts": build.corpus.prompts,
        "responses": build.corpus.responses,
        "features": build.corpus.features,
        "calibration": build.calibration,
        "evaluation": build.evaluation,
        "export": build.export,
    }
    settings = {name: model_json(part) for name, part in parts.items()}
    if build.training.imported is not None:
        metrics = read_json(sources.train / "metrics.json", hint=AGAIN)
        settings["training"] = {key: metrics[key] for key in ("imported", "layout", "source")}
    return {"name": build.recipe, "serving_profiles": list(build.serving_profiles), **settings}


def _drafter_part(staged: Path) -> DrafterPart:
    value = read_json(staged / DRAFTER_CONFIG)
    config, own = read_description(value, DRAFTER_CONFIG)
    trained = trained_config(value, DRAFTER_CONFIG)
    weights = staged / DRAFTER_WEIGHTS
    with weights.open("rb") as handle:
        tensors = read_header(handle, weights.stat().st_size)
    parameters, dtype = describe_tensors(tensors)
    return DrafterPart.model_validate(
        {
            "kind": config.kind,
            "gamma": config.gamma,
            "taps": config.taps,
            "tap_convention": "output of layer k, counted from 0",
            "sample_from_anchor": True,
            "mask_token_id": config.mask_token_id,
            "markov": MarkovPart(type=trained.markov_type, rank=trained.markov_rank),
            "confidence": ConfidencePart(
                enabled=value["enable_confidence_head"],
                with_markov=value["confidence_head_with_markov"],
                bias="confidence_head.proj.bias" in tensors,
            ),
            "draft_vocab": own["proposed_vocab_size"],
            "parameters": parameters,
            "dtype": dtype,
        }
    )
