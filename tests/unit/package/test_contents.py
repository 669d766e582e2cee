"""Right digests do not save a package whose files are not what they must be, or that contradict each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark.errors import IntegrityError
from dspark.package.verify import verify


def rewrite(name: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / name
        value = json.loads(path.read_bytes())
        result = change(value)
        path.write_text(json.dumps(result if result is not None else value, indent=1))

    return apply


def put(name: str, *keys, to) -> Callable[[Path], None]:
    def change(value):
        for key in keys[:-1]:
            value = value[key]
        value[keys[-1]] = to

    return rewrite(name, change)


def replace(name: str, old: bytes, new: bytes) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data = (folder / name).read_bytes()
        assert old in data
        (folder / name).write_bytes(data.replace(old, new, 1))

    return apply


def write(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(data) and None


def test_resealing_an_unchanged_package_changes_nothing(package, pristine, reseal):
    """Two implementations of the digests and of the canonical form, dspark's and this test's, agree to the byte."""
    assert (reseal(package) / "manifest.json").read_bytes() == (pristine / "manifest.json").read_bytes()
    verify(package)


JSON_FILES = (
    "certificate.json",
    "speculation_profile.json",
    "scheduler/scheduler.json",
    "scheduler/calibration.json",
    "scheduler/cost/cpu-reference.json",
    "engines/onnxruntime/io.json",
    "evidence/lineage.json",
    "evidence/parity.json",
    "evidence/evaluate/metrics.json",
    "evidence/evaluate/lossless.json",
    "evidence/evaluate/pareto.json",
    "evidence/certify/cpu-reference.json",
)
FOREIGN_JSON = (
    "drafter/config.json",
    *(f"engines/sglang/{name}.json" for name in ("sps", "sps-2d", "sts")),
    *(f"engines/tensorrt_llm/{name}.json" for name in ("calibration", "cost_table")),
    *(f"engines/vllm/speculative_config{name}.json" for name in ("", ".adaptive")),
)


@pytest.mark.parametrize("name", JSON_FILES + FOREIGN_JSON)
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: b"{",
        lambda data: b"[]",
        lambda data: b"null",
        lambda data: b'"text"',
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: data.rstrip()[:-1] + b', "x": NaN}',
        lambda data: data.rstrip()[:-1] + b', "x": 1, "x": 1}',
        lambda data: data + b"{}",
        lambda data: data + b"\x00",
        lambda data: data + b"\xff",
        lambda data: b'{"a":' * 100_000,
    ],
    ids=["empty", "cut", "list", "null", "string", "bom", "nan", "duplicate", "two", "nul", "not utf-8", "deep"],
)
def test_a_json_file_that_does_not_parse_is_refused(package, reseal, name, damage):
    (package / name).write_bytes(damage((package / name).read_bytes()))
    with pytest.raises(IntegrityError) as caught:
        verify(reseal(package))
    assert name in caught.value.message


@pytest.mark.parametrize("name", JSON_FILES)
def test_unknown_keys_and_other_schemas_are_refused(package, reseal, name):
    good = (package / name).read_bytes()
    put(name, "surprise", to=1)(package)
    with pytest.raises(IntegrityError, match="surprise"):
        verify(reseal(package))
    (package / name).write_bytes(good)
    put(name, "schema", to="dspark/other/9")(package)
    with pytest.raises(IntegrityError, match="dspark/other/9"):
        verify(reseal(package))


TENSORRT_LLM = "engines/tensorrt_llm/config-1.4.0rc4.yaml"
CONTRADICTIONS = {
    "gamma of the checkpoint": put("drafter/config.json", "block_size", to=4),
    "taps of the checkpoint": put("drafter/config.json", "target_layer_ids", to=[0, 1]),
    "taps shifted in the other spelling": put("drafter/config.json", "aux_hidden_state_layer_ids", to=[0, 2]),
    "mask token": put("drafter/config.json", "mask_token_id", to=30),
    "slot layout": put("drafter/config.json", "sample_from_anchor", to=False),
    "slot layout left out": rewrite("drafter/config.json", lambda value: value.pop("sample_from_anchor") and value),
    "causality": put("drafter/config.json", "is_causal", to=True),
    "Markov rank": put("drafter/config.json", "markov_rank", to=8),
    "checkpoint of another dialect": put("drafter/config.json", "dspark", "dialect", to="training"),
    "checkpoint for another embedding": put("drafter/config.json", "dspark", "target", "embedding_digest", to="0" * 64),
    "checkpoint of other weights": put("drafter/config.json", "dspark", "weights_sha256", to="0" * 64),
    "dtype": put("drafter/config.json", "dtype", to="bfloat16"),
    "gamma of the scheduler": rewrite(
        "scheduler/scheduler.json",
        lambda value: {
            **value,
            "gamma": 2,
            "calibrations": [{**one, "temperatures": one["temperatures"][:2]} for one in value["calibrations"]],
        },
    ),
    "temperatures": put("scheduler/scheduler.json", "calibrations", 0, "temperatures", 0, to=2.0),
    "cost curve": put("scheduler/scheduler.json", "curves", "cpu-reference", "sample_steps_per_second", to=[9, 8, 7]),
    "flat cost curve": put(
        "scheduler/scheduler.json", "curves", "cpu-reference", "sample_steps_per_second", to=[9, 9, 9]
    ),
    "cost curve of nobody": rewrite(
        "scheduler/scheduler.json",
        lambda value: value["curves"].update(other=value["curves"]["cpu-reference"]),
    ),
    "no cost curve": put("scheduler/scheduler.json", "curves", to={}),
    "cost of another profile": put("scheduler/cost/cpu-reference.json", "profile", to="other"),
    "cost of another gamma": put("scheduler/cost/cpu-reference.json", "gamma", to=4),
    "SGLang's temperatures": put("engines/sglang/sts.json", "temperatures", to=[1.0, 1.0]),
    "SGLang without temperatures": rewrite(
        "engines/sglang/sts.json", lambda value: value.pop("temperatures") and value
    ),
    "SGLang's temperature of zero": put("engines/sglang/sts.json", "temperatures", 0, to=0),
    "SGLang's flat table": put("engines/sglang/sps.json", "sample_steps_per_sec", to=[5.0, 5.0, 5.0]),
    "SGLang's two-dimensional table": put("engines/sglang/sps.json", "bias_seconds", to=1),
    "SGLang's requests": put("engines/sglang/sps-2d.json", "alpha_seconds", to=[0.0, 0.0]),
    "SGLang's additive cost of nobody": put("engines/sglang/sps-2d.json", "bias_seconds", to=1),
    "SGLang's table of two kinds": put("engines/sglang/sps-2d.json", "sample_batch_tokens", to=[1, 4, 8]),
    "additive cost": put("scheduler/scheduler.json", "additive", "cpu-reference", "bias_seconds", to=0.02),
    "cost of the other model": put("scheduler/scheduler.json", "cost_models", "cpu-reference", to="curve"),
    "no additive cost": put("scheduler/scheduler.json", "additive", to={}),
    "flat additive cost": put("scheduler/scheduler.json", "additive", "cpu-reference", "theta_seconds", to=[0, 0, 0]),
    "vLLM's block size": put("engines/vllm/speculative_config.json", "num_speculative_tokens", to=3 + 1),
    "vLLM's whole blocks that are not": put(
        "engines/vllm/speculative_config.json", "enable_adaptive_verification", to=True
    ),
    "vLLM's adaptive blocks": put("engines/vllm/speculative_config.adaptive.json", "num_speculative_tokens", to=4),
    "vLLM's adaptive verification that is none": put(
        "engines/vllm/speculative_config.adaptive.json", "enable_adaptive_verification", to=False
    ),
    "TensorRT-LLM's block size": replace(TENSORRT_LLM, b"max_draft_len: 3", b"max_draft_len: 4"),
    "TensorRT-LLM's taps": replace(TENSORRT_LLM, b"target_layer_ids: [0, 2]", b"target_layer_ids: [0, 1]"),
    "TensorRT-LLM's drafter": replace(TENSORRT_LLM, b"../../drafter", b"/home/me/drafter"),
    "TensorRT-LLM without speculation": write(TENSORRT_LLM, b"dtype: float32\n"),
    "TensorRT-LLM's configuration that is a list": write(TENSORRT_LLM, b"- 1\n"),
    "TensorRT-LLM's configuration with a key twice": write(TENSORRT_LLM, b"a: 1\na: 2\n"),
    "TensorRT-LLM's configuration that is no YAML": write(TENSORRT_LLM, b"a: [1\n"),
    "TensorRT-LLM's costs": put("engines/tensorrt_llm/cost_table.json", "step_time_ms", to=[1.0, 2.0, 3.0]),
    "TensorRT-LLM's sealed costs": put("engines/tensorrt_llm/cost_table.json", "schema_version", to=2),
    "TensorRT-LLM's temperatures": put("engines/tensorrt_llm/calibration.json", "sts_temperatures", to=[1.0] * 3),
    "ONNX for another gamma": put("engines/onnxruntime/io.json", "gamma", to=4),
    "ONNX for other taps": put("engines/onnxruntime/io.json", "taps", to=[0, 1]),
    "ONNX with other weights": put("engines/onnxruntime/io.json", "weights", "sha256", to="0" * 64),
    "ONNX file that is not there": put("engines/onnxruntime/io.json", "cached", "file", to="other.onnx"),
    "certificate of another gamma": put("certificate.json", "gamma", to=2),
    "certificate about another package": put("certificate.json", "subject", to="0" * 64),
    "certificate unlike its evidence": put("certificate.json", "entries", 0, "measured_at", to="2026-11-30T00:00:00"),
    "certificate without an entry": rewrite("certificate.json", lambda value: value["entries"].pop() and None),
    "engine said to be absent": put(
        "certificate.json", "engines", 2, to={"engine": "sglang", "status": "absent", "reason": "x"}
    ),
    "engine said to be there": put("certificate.json", "engines", 0, to={"engine": "llamacpp", "status": "written"}),
    "summary with a better tau": put(
        "speculation_profile.json", "temperatures", "0", "mean_accept_length", "value", to=3.9
    ),
    "summary about another package": put("speculation_profile.json", "subject", to="0" * 64),
    "evaluation of another gamma": put("evidence/evaluate/metrics.json", "gamma", to=2),
    "card of another package": write("README.md", b"# demo\n"),
    "card with control characters": lambda folder: write("README.md", (folder / "README.md").read_bytes() + b"\x1b[0m")(
        folder
    ),
    "card that is not UTF-8": lambda folder: write("README.md", (folder / "README.md").read_bytes() + b"\xff")(folder),
    "weights cut": lambda folder: write(
        "drafter/model.safetensors", (folder / "drafter/model.safetensors").read_bytes()[:-4]
    )(folder),
    "weights that are a pickle": write("drafter/model.safetensors", b"\x80\x04\x95" + bytes(64)),
    "ONNX that is a script": write("engines/onnxruntime/draft_block.onnx", b"#!/bin/sh\nexit 0\n"),
    "launch script for another shell": replace("engines/sglang/launch.sh", b"#!/usr/bin/env bash", b"#!/bin/sh"),
    "launch script with an absolute path": replace("engines/sglang/launch.sh", b"../../drafter", b"/home/me/drafter"),
    "launch script with a quoted absolute path": replace("engines/sglang/launch.sh", b"../../drafter", b"'/opt/x'"),
    "environment that needs a shell": write("engines/sglang/env", b"A=$(id)\n"),
    "environment with an export": write("engines/sglang/env", b"export A=1\n"),
    "table with a ragged row": write("evidence/train/curves.csv", b"step,loss\n1\n"),
    "table with a column twice": write("evidence/train/curves.csv", b"step,step\n1,2\n"),
    "empty table": write("evidence/train/curves.csv", b""),
    "table with an open quote": write("evidence/train/curves.csv", b'step,loss\n1,"2\n'),
    "records cut": write("evidence/evaluate/records/temperature-0.safetensors", bytes(9)),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_refused_although_every_digest_is_right(package, reseal, name):
    CONTRADICTIONS[name](package)
    with pytest.raises(IntegrityError) as caught:
        verify(reseal(package))
    assert caught.value.exit_code == 7


def edit_manifest(folder: Path, change: Callable[[dict], object]) -> None:
    path = folder / "manifest.json"
    value = json.loads(path.read_bytes())
    change(value)
    path.write_text(json.dumps(value))


MANIFEST_LIES = {
    "parameters": ("drafter", "parameters", 1),
    "gamma": ("drafter", "gamma", 4),
    "confidence bias": ("drafter", "confidence", {"enabled": True, "with_markov": True, "bias": False}),
    "draft vocabulary": ("drafter", "draft_vocab", 16),
}


@pytest.mark.parametrize("name", MANIFEST_LIES)
def test_a_manifest_that_lies_about_its_drafter_is_refused(package, reseal, name):
    part, key, value = MANIFEST_LIES[name]
    edit_manifest(package, lambda manifest: manifest[part].update({key: value}))
    with pytest.raises(IntegrityError):
        verify(reseal(package))


@pytest.mark.parametrize(
    "name",
    [
        "certificate.json",
        "README.md",
        "speculation_profile.json",
        "scheduler/scheduler.json",
        "scheduler/calibration.json",
        "drafter/config.json",
        "drafter/model.safetensors",
        "evidence/lineage.json",
        "evidence/evaluate/metrics.json",
    ],
)
def test_a_package_without_an_essential_file_is_refused_even_if_its_manifest_agrees(package, reseal, name):
    (package / name).unlink()
    edit_manifest(
        package, lambda value: value.update(files=[entry for entry in value["files"] if entry["path"] != name])
    )
    with pytest.raises(IntegrityError, match=name):
        verify(reseal(package))


@pytest.mark.parametrize(
    ("name", "data", "file_class"),
    [
        ("evidence/unknown.json", b'{"schema": "dspark/unknown/1"}', "evidence"),
        ("evidence/certify/third.json", None, "evidence"),
        ("scheduler/cost/third.json", None, "deploy"),
        ("evidence/rows.jsonl", b'{"a": 1}\n[1]\n', "evidence"),
        ("evidence/rows.jsonl", b'{"a": 1, "a": 2}\n', "evidence"),
        ("engines/llamacpp/drafter.gguf", b"GGUF", "model"),  # the certificate says that there is none
        ("engines/llamacpp/drafter.gguf", b"FUGG", "model"),
        ("evidence/pickle.pkl", b"x", "evidence"),
        ("evidence/.hidden.json", b"{}", "evidence"),
        ("run.sh", b"#!/usr/bin/env bash\n", "deploy"),
    ],
)
def test_a_listed_file_that_has_no_business_there_is_refused(package, reseal, name, data, file_class):
    path = package / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if data is not None else next(path.parent.glob("*.json")).read_bytes())

    def add(value):
        entry = {"path": name, "bytes": 0, "sha256": "", "class": file_class}
        value["files"] = sorted([*value["files"], entry], key=lambda item: item["path"])

    edit_manifest(package, add)
    with pytest.raises(IntegrityError):
        verify(reseal(package))


def test_json_lines_of_objects_are_fine(package, reseal):
    (package / "evidence/rows.jsonl").write_bytes(b'{"a": 1}\n{"b": 2}\n')
    edit_manifest(
        package,
        lambda value: value.update(
            files=sorted(
                [*value["files"], {"path": "evidence/rows.jsonl", "bytes": 0, "sha256": "", "class": "evidence"}],
                key=lambda item: item["path"],
            )
        ),
    )
    verify(reseal(package))


def test_a_checkpoint_of_whole_numbers_has_no_parameters():
    from dspark.package.tensors import TensorHeader, describe_tensors

    with pytest.raises(ValueError, match="floating-point"):
        describe_tensors({"d2t": TensorHeader("d2t", "I64", (4,))})


def test_a_text_beyond_all_reason_is_not_read(package, monkeypatch):
    monkeypatch.setattr("dspark.package.contents._MAX_TEXT", 100)
    with pytest.raises(IntegrityError, match="larger than 100 bytes"):
        verify(package)
    monkeypatch.setattr("dspark.package.verify.MAX_MANIFEST", 100)
    with pytest.raises(IntegrityError, match=r"manifest\.json: larger than 100 bytes"):
        verify(package)
