"""What the files of a package say about each other: one gamma, one set of taps, one subject, nothing essential missing.

Engines do not notice a shifted tap, another slot layout or temperatures of another block size (package.md, exporter
rules); whoever verifies a package does.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, TypeVar

from dspark.calibration.results import CalibrationReport
from dspark.drafters.description import read_description
from dspark.engines.onnx_io import OnnxIO
from dspark.engines.sglang import additive_table
from dspark.engines.tensorrt_build import Recipe
from dspark.engines.tensorrt_llm import CALIBRATION_FILE, COSTS_FILE, DRAFTER, calibration_table, cost_table
from dspark.engines.vllm import ADAPTIVE_FILE, FIXED_FILE
from dspark.evaluation.paired import PairedReport
from dspark.evaluation.results import EvaluationMetrics
from dspark.io.jsonfile import canonical_json
from dspark.package.certificate import Certificate
from dspark.package.contents import Content
from dspark.package.gguf import GGUFHeader
from dspark.package.layout import (
    CALIBRATION,
    CARD,
    CERTIFICATE,
    DRAFTER_CONFIG,
    DRAFTER_WEIGHTS,
    LINEAGE,
    PROFILE,
    RULES,
    SCHEDULER,
)
from dspark.package.manifest import FileEntry, Manifest
from dspark.package.monitoring import prometheus_rules
from dspark.package.paired import paired_mistakes
from dspark.package.speculation import SpeculationProfile, speculation_profile
from dspark.package.tensors import DTYPES, TensorHeader
from dspark.profiling.cost import CostReport
from dspark.scheduling.config import SchedulerConfig

Kind = TypeVar("Kind")

GGUF = "engines/llamacpp/drafter.gguf"
METRICS = "evidence/evaluate/metrics.json"
PAIRED = "evidence/evaluate/paired.json"
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
    _check_drafter(manifest, _typed(contents, DRAFTER_CONFIG, dict), _typed(contents, DRAFTER_WEIGHTS, dict))
    _check_scheduler(manifest, contents)
    _check_engines(manifest, contents)
    _check_evidence(manifest, contents)


def describe_tensors(tensors: Mapping[str, TensorHeader]) -> tuple[int, str]:
    """(parameters, dtype) of a checkpoint: all floating-point elements and the dtype that most of them have.

    Raises:
        ValueError: no floating-point tensor.
    """
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        if tensor.dtype in DTYPES:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.elements
    if not sizes:
        raise ValueError("the checkpoint holds no floating-point tensor")
    return sum(sizes.values()), DTYPES[max(sizes, key=lambda dtype: (sizes[dtype], dtype))]


def _check_drafter(manifest: Manifest, value: dict[str, Any], tensors: dict[str, TensorHeader]) -> None:
    drafter, target = manifest.drafter, manifest.inputs.target
    config, own = read_description(value, DRAFTER_CONFIG)
    expected = {
        "gamma": (config.gamma, drafter.gamma),
        "taps": (config.taps, drafter.taps),
        "mask_token_id": (config.mask_token_id, drafter.mask_token_id),
        "markov_type": (config.markov_type, drafter.markov.type),
        "markov_rank": (config.markov_rank, drafter.markov.rank),
        "vocab_size": (config.vocab_size, target.vocab_physical),
        "dialect": (own["dialect"], "union"),
        "proposed_vocab_size": (own["proposed_vocab_size"], drafter.draft_vocab),
        "embedding_digest": (own["target"]["embedding_digest"], target.embedding_digest),
        "head_digest": (own["target"]["head_digest"], target.head_digest),
        "weights_sha256": (own["weights_sha256"], _entry(manifest, DRAFTER_WEIGHTS).sha256),
        "dtype": (value["dtype"], drafter.dtype),
        "parameters and dtype": (describe_tensors(tensors), (drafter.parameters, drafter.dtype)),
        "confidence bias": ("confidence_head.proj.bias" in tensors, drafter.confidence.bias),
    }
    _compare("drafter/", expected)


def _check_scheduler(manifest: Manifest, contents: Mapping[str, Content]) -> None:
    scheduler = _typed(contents, SCHEDULER, SchedulerConfig)
    calibration = _typed(contents, CALIBRATION, CalibrationReport)
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


def _check_engines(manifest: Manifest, contents: Mapping[str, Content]) -> None:
    scheduler = _typed(contents, SCHEDULER, SchedulerConfig)
    _check_sglang(scheduler, contents)
    _check_vllm(manifest.drafter.gamma, contents)
    _check_tensorrt_llm(manifest, scheduler, contents)
    if GGUF in contents:
        header = _typed(contents, GGUF, GGUFHeader)
        _check_gguf(manifest, _typed(contents, DRAFTER_CONFIG, dict), header)
        _check_gguf_vocabulary(manifest, header, contents)
    if "engines/onnxruntime/io.json" in contents:
        _check_onnx(manifest, _typed(contents, "engines/onnxruntime/io.json", OnnxIO))
    if "engines/tensorrt/build.json" in contents:
        _check_recipe(
            manifest,
            _typed(contents, "engines/tensorrt/build.json", Recipe),
            _typed(contents, "engines/onnxruntime/io.json", OnnxIO),
        )


def _check_sglang(scheduler: SchedulerConfig, contents: Mapping[str, Content]) -> None:
    """SGLang's tables are those of the scheduler: it would accept any others and be misled (package.md, rule 9)."""
    sts, sps, two = (_foreign(contents, f"engines/sglang/{name}.json") for name in ("sts", "sps", "sps-2d"))
    if sts is not None and tuple(sts.get("temperatures", ())) not in {
        one.temperatures for one in scheduler.calibrations
    }:
        raise ValueError(f"engines/sglang/sts.json has temperatures that {SCHEDULER} does not have")
    if sps is not None:
        keys = ("sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens")
        curves = [
            [list(curve.sample_batch_tokens), list(curve.sample_steps_per_second), curve.max_batch_tokens]
            for curve in scheduler.curves.values()
        ]
        if [sps.get(key) for key in keys] not in curves:
            raise ValueError(f"engines/sglang/sps.json has a cost curve that {SCHEDULER} does not have")
        # 8.0 equals 8 here; SGLang would not start with it.
        if any(type(count) is not int for count in (*sps["sample_batch_tokens"], sps["max_batch_tokens"])):
            raise ValueError("engines/sglang/sps.json: token counts must be JSON integers")
        if '"bias_seconds"' in canonical_json(sps):
            raise ValueError("engines/sglang/sps.json would be taken for a two-dimensional table")
    models = [_measured(additive_table(cost, {})) for cost in scheduler.additive.values()]
    if two is not None and _measured(two) not in models:
        raise ValueError(f"engines/sglang/sps-2d.json has an additive cost that {SCHEDULER} does not have")


def _check_vllm(gamma: int, contents: Mapping[str, Content]) -> None:
    """Both configurations are for this drafter, and differ in nothing but how much of a block is verified."""
    fixed, adaptive = (_foreign(contents, f"engines/vllm/{name}") for name in (FIXED_FILE, ADAPTIVE_FILE))
    if fixed is not None and fixed.get("num_speculative_tokens") != gamma:
        raise ValueError(f"engines/vllm/{FIXED_FILE} is for other blocks than gamma = {gamma}")
    if fixed is not None and fixed.get("enable_adaptive_verification") is not False:
        raise ValueError(f"engines/vllm/{FIXED_FILE} does not verify whole blocks")
    if adaptive is not None and adaptive != {**(fixed or {}), "enable_adaptive_verification": True}:
        raise ValueError(f"engines/vllm/{ADAPTIVE_FILE} differs from {FIXED_FILE} in more than adaptive verification")


def _check_tensorrt_llm(manifest: Manifest, scheduler: SchedulerConfig, contents: Mapping[str, Content]) -> None:
    """Every configuration is for this drafter, and what schedules is what the scheduler holds."""
    drafter, folder = manifest.drafter, "engines/tensorrt_llm"
    for path in contents:
        if path.startswith(f"{folder}/") and path.endswith(".yaml"):
            found = _typed(contents, path, dict).get("speculative_config")
            if not isinstance(found, dict):
                raise ValueError(f"{path} has no speculative_config")
            expected = {
                "decoding_type": "DSpark",
                "speculative_model": DRAFTER,
                "max_draft_len": drafter.gamma,
                "block_size": drafter.gamma,
                "mask_token_id": drafter.mask_token_id,
                "target_layer_ids": list(drafter.taps),
                "markov_rank": drafter.markov.rank,
                "markov_head_type": drafter.markov.type,
            }
            _compare(path, {key: (found.get(key), wanted) for key, wanted in expected.items()})
    costs, calibration = (_foreign(contents, f"{folder}/{name}") for name in (COSTS_FILE, CALIBRATION_FILE))
    tables = [cost_table(curve) for curve in scheduler.curves.values()]
    tables += [cost_table(additive) for additive in scheduler.additive.values()]
    if costs is not None and _measured(costs) not in tables:
        raise ValueError(f"{folder}/{COSTS_FILE} has costs that {SCHEDULER} does not have")
    if calibration is not None and _measured(calibration) not in [
        calibration_table(one, drafter.gamma) for one in scheduler.calibrations
    ]:
        raise ValueError(f"{folder}/{CALIBRATION_FILE} has temperatures that {SCHEDULER} does not have")


def _measured(table: dict[str, Any]) -> dict[str, Any]:
    """What an engine reads of a table; the one key of our own says where it comes from."""
    return {key: value for key, value in table.items() if key != "dspark"}


def _check_onnx(manifest: Manifest, onnx: OnnxIO) -> None:
    drafter, target = manifest.drafter, manifest.inputs.target
    listed = {entry.path for entry in manifest.files}
    for name in (onnx.stateless.file, onnx.cached.file, onnx.weights.file, onnx.ends.file):
        if f"engines/onnxruntime/{name}" not in listed:
            raise ValueError(f"engines/onnxruntime/io.json names {name}, which is not in the package")
    files = {part: _entry(manifest, f"engines/onnxruntime/{part.file}") for part in (onnx.weights, onnx.ends)}
    expected = {
        "gamma": (onnx.gamma, drafter.gamma),
        "taps": (onnx.taps, drafter.taps),
        "mask_token_id": (onnx.mask_token_id, drafter.mask_token_id),
        "draft_vocab_size": (onnx.draft_vocab_size, drafter.draft_vocab),
        "vocab_size": (onnx.vocab_size, target.vocab_physical),
        "embedding_digest": (onnx.embedding_digest, target.embedding_digest),
        "head_digest": (onnx.head_digest, target.head_digest),
        **{part.file: ((part.bytes, part.sha256), (file.bytes, file.sha256)) for part, file in files.items()},
    }
    _compare("engines/onnxruntime/io.json", expected)


def _check_gguf(manifest: Manifest, value: dict[str, Any], header: GGUFHeader) -> None:
    """llama.cpp loads a file with shifted taps, another RoPE base or another mask token without a word."""
    config, _ = read_description(value, DRAFTER_CONFIG)
    (theta,) = struct.unpack("<f", struct.pack("<f", config.rope["rope_theta"]))  # as the file stores it
    expected = {
        "general.architecture": "dflash",
        "dflash.block_size": config.gamma,
        "dflash.block_count": config.layers,
        "dflash.embedding_length": config.hidden_size,
        "dflash.target_layers": [tap + 1 for tap in config.taps],
        "dflash.rope.freq_base": theta,
        "dflash.sample_from_anchor": True,
        "dflash.has_confidence_head": True,
        "dflash.attention.causal": False,
        "tokenizer.ggml.mask_token_id": config.mask_token_id,
        "tokenizer.ggml.tokens": manifest.inputs.target.vocab_physical,  # how many there are
    }
    _compare(GGUF, {key: (header.keys.get(key), wanted) for key, wanted in expected.items()})


def _check_gguf_vocabulary(manifest: Manifest, header: GGUFHeader, contents: Mapping[str, Content]) -> None:
    """A file drafts from the reduced vocabulary, its rows and their ids with it, or from the whole one."""
    drafter, target = manifest.drafter, manifest.inputs.target
    width, ids = header.keys["dflash.embedding_length"], header.draft_ids
    rows = target.vocab_physical if ids is None else drafter.draft_vocab
    expected: dict[str, tuple[int, ...] | None] = {
        "markov_w1.weight": (target.vocab_physical, drafter.markov.rank),
        "markov_w2.weight": (rows, drafter.markov.rank),
        "output.weight": None if ids is None else (rows, width),
        "d2t": None if ids is None else (rows,),
    }
    _compare(GGUF, {name: (header.shapes.get(name), shape) for name, shape in expected.items()})
    if ids is None:
        return
    if list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= target.vocab_physical:
        raise ValueError(f"{GGUF} d2t: not ascending ids in a vocabulary of {target.vocab_physical}")
    if "engines/onnxruntime/io.json" in contents:
        theirs = _typed(contents, "engines/onnxruntime/io.json", OnnxIO).draft_token_ids
        if ids != theirs:
            raise ValueError(f"{GGUF} d2t: other tokens than engines/onnxruntime/io.json has")


def _check_recipe(manifest: Manifest, recipe: Recipe, onnx: OnnxIO) -> None:
    listed = {entry.path: entry.sha256 for entry in manifest.files}
    expected: dict[str, tuple[object, object]] = {
        "graph": (recipe.graph, onnx.stateless.file),
        "gamma": (recipe.gamma, manifest.drafter.gamma),
        "inputs and outputs": ((recipe.inputs, recipe.outputs), (onnx.stateless.inputs, onnx.stateless.outputs)),
        **{file: (digest, listed.get(f"engines/onnxruntime/{file}")) for file, digest in recipe.files.items()},
    }
    _compare("engines/tensorrt/build.json", expected)


def _check_evidence(manifest: Manifest, contents: Mapping[str, Content]) -> None:
    package, gamma = manifest.digests.package_digest, manifest.drafter.gamma
    certificate = _typed(contents, CERTIFICATE, Certificate)
    metrics = _typed(contents, METRICS, EvaluationMetrics)
    expected = {
        f"{CERTIFICATE}: subject": (certificate.subject, package),
        f"{CERTIFICATE}: gamma": (certificate.gamma, gamma),
        f"{METRICS}: gamma": (metrics.gamma, gamma),
        f"{PROFILE}: its numbers": (
            _typed(contents, PROFILE, SpeculationProfile),
            speculation_profile(metrics, certificate),
        ),
    }
    _compare("", expected)
    # Packages of before have none.
    if RULES in contents and contents[RULES] != prometheus_rules(manifest.description(), certificate):
        raise ValueError(f"{RULES} is not what follows from {CERTIFICATE}")
    if package not in _typed(contents, CARD, str):
        raise ValueError(f"{CARD} does not name the package that it describes, {package}")
    paired = _typed(contents, PAIRED, PairedReport) if PAIRED in contents else None
    if mistake := next(paired_mistakes(paired, metrics, certificate), None):
        raise ValueError(f"{PAIRED}: {mistake}")
    entries = {f"evidence/certify/{entry.profile}.json": entry for entry in certificate.entries}
    beside = {path: content for path, content in contents.items() if path.startswith("evidence/certify/")}
    if entries != beside:
        raise ValueError(f"{CERTIFICATE} and evidence/certify/ differ")
    folders = {path.split("/")[1] for path in contents if path.startswith("engines/")}
    if folders != {item.engine for item in certificate.engines if item.status == "written"}:
        raise ValueError(f"{CERTIFICATE} says other engines have files than engines/ holds")


def _compare(where: str, pairs: Mapping[str, tuple[object, object]]) -> None:
    for key, (found, expected) in pairs.items():
        if found != expected:
            raise ValueError(f"{where} {key}: {found!r}, expected {expected!r}".strip())


def _entry(manifest: Manifest, path: str) -> FileEntry:
    return next(entry for entry in manifest.files if entry.path == path)


def _foreign(contents: Mapping[str, Content], path: str) -> dict[str, Any] | None:
    return _typed(contents, path, dict) if path in contents else None


def _typed(contents: Mapping[str, Content], path: str, kind: type[Kind]) -> Kind:
    content = contents.get(path)
    if not isinstance(content, kind):
        raise ValueError(f"{path} is missing or not what stands in its place")
    return content
