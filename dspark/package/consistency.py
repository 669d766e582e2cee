"""What the files of a package say about each other: one gamma, one set of taps, one subject, nothing essential missing.

Engines do not notice a shifted tap, another slot layout or temperatures of another block size (package.md, exporter
rules); whoever verifies a package does. Here is what every package has; `tables` and `forms` hold what engines read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark.calibration.results import CalibrationReport
from dspark.drafters.description import read_description, trained_config
from dspark.evaluation.paired import PairedReport
from dspark.evaluation.results import EvaluationMetrics
from dspark.package.certificate import Certificate
from dspark.package.comparing import compare, entry_of, typed
from dspark.package.contents import Content
from dspark.package.forms import check_forms
from dspark.package.layout import (
    CALIBRATION,
    CARD,
    CERTIFICATE,
    DRAFTER_CONFIG,
    DRAFTER_WEIGHTS,
    LINEAGE,
    METRICS,
    PAIRED,
    PROFILE,
    RULES,
    SCHEDULER,
)
from dspark.package.manifest import Manifest
from dspark.package.monitoring import prometheus_rules
from dspark.package.paired import paired_mistakes
from dspark.package.speculation import SpeculationProfile, speculation_profile
from dspark.package.tables import check_sglang, check_tensorrt_llm, check_vllm
from dspark.package.tensors import TensorHeader, describe_tensors
from dspark.profiling.cost import CostReport
from dspark.scheduling.config import SchedulerConfig

_ESSENTIAL = (CALIBRATION, CARD, CERTIFICATE, DRAFTER_CONFIG, DRAFTER_WEIGHTS, LINEAGE, METRICS, PROFILE, SCHEDULER)


def check_package(manifest: Manifest, contents: Mapping[str, Content]) -> None:
    """Hold the files of a package against its manifest and against each other.

    Args:
        contents: of every file, by path, each valid by itself.
    Raises:
        ValueError: the first contradiction, naming both sides.
    """
    missing = [path for path in _ESSENTIAL if path not in contents]
    if missing:
        raise ValueError(f"a package needs {', '.join(missing)}")
    _check_drafter(manifest, typed(contents, DRAFTER_CONFIG, dict), typed(contents, DRAFTER_WEIGHTS, dict))
    _check_scheduler(manifest, contents)
    scheduler = typed(contents, SCHEDULER, SchedulerConfig)
    check_sglang(scheduler, contents)
    check_vllm(manifest.drafter.gamma, contents)
    check_tensorrt_llm(manifest, scheduler, contents)
    check_forms(manifest, contents)
    _check_evidence(manifest, contents)


def _check_drafter(manifest: Manifest, value: dict[str, Any], tensors: dict[str, TensorHeader]) -> None:
    drafter, target = manifest.drafter, manifest.inputs.target
    config, own = read_description(value, DRAFTER_CONFIG)
    trained = trained_config(value, DRAFTER_CONFIG)
    expected = {
        "gamma": (config.gamma, drafter.gamma),
        "taps": (config.taps, drafter.taps),
        "mask_token_id": (config.mask_token_id, drafter.mask_token_id),
        "kind": (config.kind, drafter.kind),
        "markov_type": (trained.markov_type, drafter.markov.type),
        "markov_rank": (trained.markov_rank, drafter.markov.rank),
        "vocab_size": (config.vocab_size, target.vocab_physical),
        "dialect": (own["dialect"], "union"),
        "proposed_vocab_size": (own["proposed_vocab_size"], drafter.draft_vocab),
        "embedding_digest": (own["target"]["embedding_digest"], target.embedding_digest),
        "head_digest": (own["target"]["head_digest"], target.head_digest),
        "weights_sha256": (own["weights_sha256"], entry_of(manifest, DRAFTER_WEIGHTS).sha256),
        "dtype": (value["dtype"], drafter.dtype),
        "parameters and dtype": (describe_tensors(tensors), (drafter.parameters, drafter.dtype)),
        "confidence": (config.confidence, drafter.confidence.enabled),
        "confidence bias": ("confidence_head.proj.bias" in tensors, drafter.confidence.bias),
    }
    compare("drafter/", expected)


def _check_scheduler(manifest: Manifest, contents: Mapping[str, Content]) -> None:
    scheduler = typed(contents, SCHEDULER, SchedulerConfig)
    calibration = typed(contents, CALIBRATION, CalibrationReport)
    if scheduler.gamma != manifest.drafter.gamma:
        raise ValueError(f"{SCHEDULER} is for gamma {scheduler.gamma}, the drafter has {manifest.drafter.gamma}")
    if scheduler.calibrations != calibration.temperatures:
        raise ValueError(f"{SCHEDULER} and {CALIBRATION} hold different temperatures")
    curves, additive, models = {}, {}, {}
    for path, content in contents.items():
        if isinstance(content, CostReport):
            if path != f"scheduler/cost/{content.profile}.json" or content.gamma != scheduler.gamma:
                raise ValueError(f"{path} is of profile {content.profile} and gamma {content.gamma}")
            if content.curve is not None:
                curves[content.profile] = content.curve
            if content.additive is not None:
                additive[content.profile] = content.additive
            if content.additive_is_closer:
                models[content.profile] = "additive"
    if additive != dict(scheduler.additive):
        raise ValueError(f"{SCHEDULER} has other additive costs than scheduler/cost/ holds")
    if curves != dict(scheduler.curves):
        raise ValueError(f"{SCHEDULER} has other cost curves than scheduler/cost/ holds")
    if dict(scheduler.cost_models) not in (models, {}):  # packages of before name none
        raise ValueError(f"{SCHEDULER} schedules by other costs than those that scheduler/cost/ found closer")


def _check_evidence(manifest: Manifest, contents: Mapping[str, Content]) -> None:
    package, gamma = manifest.digests.package_digest, manifest.drafter.gamma
    certificate = typed(contents, CERTIFICATE, Certificate)
    metrics = typed(contents, METRICS, EvaluationMetrics)
    expected = {
        f"{CERTIFICATE}: subject": (certificate.subject, package),
        f"{CERTIFICATE}: gamma": (certificate.gamma, gamma),
        f"{METRICS}: gamma": (metrics.gamma, gamma),
        f"{PROFILE}: its numbers": (
            typed(contents, PROFILE, SpeculationProfile),
            speculation_profile(metrics, certificate),
        ),
    }
    compare("", expected)
    # Packages of before have none.
    if RULES in contents and contents[RULES] != prometheus_rules(manifest.description(), certificate):
        raise ValueError(f"{RULES} is not what follows from {CERTIFICATE}")
    if package not in typed(contents, CARD, str):
        raise ValueError(f"{CARD} does not name the package that it describes, {package}")
    paired = typed(contents, PAIRED, PairedReport) if PAIRED in contents else None
    if mistake := next(paired_mistakes(paired, metrics, certificate), None):
        raise ValueError(f"{PAIRED}: {mistake}")
    entries = {f"evidence/certify/{entry.profile}.json": entry for entry in certificate.entries}
    beside = {path: content for path, content in contents.items() if path.startswith("evidence/certify/")}
    if entries != beside:
        raise ValueError(f"{CERTIFICATE} and evidence/certify/ differ")
    folders = {path.split("/")[1] for path in contents if path.startswith("engines/")}
    if folders != {item.engine for item in certificate.engines if item.status == "written"}:
        raise ValueError(f"{CERTIFICATE} says other engines have files than engines/ holds")
