"""Verification with one rule taken out lets something through: each rule is there for a case that only it catches.

A mutant is the module's own source with one piece replaced, loaded under the same name; the same damaged package must
be refused by the real code and pass with the mutant.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from dspark.errors import IntegrityError
from dspark.package.signature import write_keys
from dspark.package.verify import verify


def edit(name, change):
    def apply(folder: Path, tmp: Path, reseal) -> None:
        path = folder / name
        value = json.loads(path.read_bytes())
        change(value)
        path.write_text(json.dumps(value))
        reseal(folder)

    return apply


def append(name, data):
    def apply(folder, tmp, reseal) -> None:
        (folder / name).write_bytes((folder / name).read_bytes() + data)

    return apply


def indent(folder, tmp, reseal):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()), sort_keys=True, indent=1))


def swap(folder, tmp, reseal):
    path = folder / "evidence/train/curves.csv"
    path.write_bytes(path.read_bytes().replace(b"3.5", b"3.6"))


def symlink(folder, tmp, reseal):
    path = folder / "README.md"
    path.rename(tmp / "elsewhere")
    path.symlink_to(tmp / "elsewhere")


def raw(name, data):
    def apply(folder, tmp, reseal):
        (folder / name).write_bytes(data)
        reseal(folder)

    return apply


FILE_CHECK = 'if hashlib.file_digest(handle, "sha256").hexdigest() != entry.sha256:'
MUTANTS = {
    "hashes not compared": ("verify", FILE_CHECK, "if False:", swap),
    "canonical form not demanded": ("verify", "if manifest_bytes(manifest) != data:", "if False:", indent),
    "extra files ignored": (
        "verify",
        "if extra := sorted(present - listed):",
        "if extra := []:",
        lambda folder, tmp, reseal: (folder / "extra").write_text("x"),
    ),
    "anything taken for a signature": (
        "verify",
        "if SIGNATURE in links and (folder / SIGNATURE).lstat().st_size != SIGNATURE_BYTES:",
        "if False:",
        lambda folder, tmp, reseal: (folder / "manifest.sig").write_text("x"),
    ),
    "hard links ignored": (
        "verify",
        "if names != 1):",
        "if names < 1):",
        lambda folder, tmp, reseal: os.link(folder / "README.md", tmp / "elsewhere"),
    ),
    "empty folders ignored": (
        "verify",
        "elif path not in folders:",
        "elif False:",
        lambda folder, tmp, reseal: (folder / "empty").mkdir(),
    ),
    "self digest not compared": (
        "manifest",
        "if self.digests.self_digest != self_digest(model_json(self)):",
        "if False:",
        lambda folder, tmp, reseal: rewrite_manifest(
            folder, lambda value: value["digests"].update(self_digest="0" * 64)
        ),
    ),
    "classes taken on trust": (
        "manifest",
        "if place is None or place.file_class != self.class_:",
        "if False:",
        lambda folder, tmp, reseal: (reclass(folder), reseal(folder)),
    ),
    "any file may be left out": (
        "manifest",
        "if self.made_from is not None and self.path != TARGET_ENDS:",
        "if False:",
        lambda folder, tmp, reseal: without(folder, "evidence/train/curves.csv", reseal),
    ),
    "unknown JSON accepted": (
        "contents",
        'raise ValueError("is a JSON file whose schema this version of dspark does not know")',
        "return value",
        lambda folder, tmp, reseal: add(folder, "evidence/unknown.json", b"{}", reseal),
    ),
    "scripts not looked at": (
        "contents",
        "if found := _ABSOLUTE.search(rest):",
        "if found := None:",
        raw("engines/vllm/launch.sh", b"#!/usr/bin/env bash\nexec /opt/vllm serve\n"),
    ),
    "gamma of vLLM not compared": (
        "tables",
        'if fixed is not None and fixed.get("num_speculative_tokens") != gamma:',
        "if False:",
        lambda folder, tmp, reseal: both_configs(folder, reseal, lambda value: value.update(num_speculative_tokens=9)),
    ),
    "adaptive verification not compared": (
        "tables",
        'if adaptive is not None and adaptive != {**(fixed or {}), "enable_adaptive_verification": True}:',
        "if False:",
        edit("engines/vllm/speculative_config.adaptive.json", lambda value: value.update(num_speculative_tokens=9)),
    ),
    "SGLang's additive cost not compared": (
        "tables",
        "if two is not None and _measured(two) not in models:",
        "if False:",
        edit("engines/sglang/sps-2d.json", lambda value: value.update(bias_seconds=1.0)),
    ),
    "additive costs not compared": (
        "consistency",
        "if additive != dict(scheduler.additive):",
        "if False:",
        edit("scheduler/scheduler.json", lambda value: value["additive"].update(x=value["additive"]["cpu-reference"])),
    ),
    "the model that schedules not compared": (
        "consistency",
        "if dict(scheduler.cost_models) not in (models, {}):",
        "if False:",
        edit("scheduler/scheduler.json", lambda value: value["cost_models"].update({"cpu-reference": "curve"})),
    ),
    "TensorRT-LLM's drafter not compared": (
        "tables",
        "compare(path, {key: (found.get(key), wanted) for key, wanted in expected.items()})",
        "pass",
        raw("engines/tensorrt_llm/config-1.4.0rc1.yaml", b"speculative_config: {max_draft_len: 9}\n"),
    ),
    "TensorRT-LLM's costs not compared": (
        "tables",
        "if costs is not None and _measured(costs) not in tables:",
        "if False:",
        edit("engines/tensorrt_llm/cost_table.json", lambda value: value.update(fixed_overhead_ms=1.0)),
    ),
    "TensorRT-LLM's temperatures not compared": (
        "tables",
        "if calibration is not None and _measured(calibration) not in [",
        "if False and calibration is not None and _measured(calibration) not in [",
        edit("engines/tensorrt_llm/calibration.json", lambda value: value.update(temperatures=[9.0, 9.0, 9.0])),
    ),
    "SGLang's curve not compared": (
        "tables",
        "if [sps.get(key) for key in keys] not in curves:",
        "if False:",
        edit("engines/sglang/sps.json", lambda value: value.update(max_batch_tokens=99)),
    ),
    "temperatures not compared": (
        "consistency",
        "if scheduler.calibrations != calibration.temperatures:",
        "if False:",
        edit(
            "scheduler/scheduler.json",
            lambda value: value["calibrations"].append({**value["calibrations"][1], "temperature": 0.5}),
        ),
    ),
    "summary not compared": (
        "consistency",
        "            speculation_profile(metrics, certificate),\n",
        "            typed(contents, PROFILE, SpeculationProfile),\n",
        edit("speculation_profile.json", lambda value: value["absent"].update(x="y")),
    ),
    "certificate and evidence not compared": (
        "consistency",
        "if entries != beside:",
        "if False:",
        edit("certificate.json", lambda value: value["entries"][0].update(measured_at="2026-11-30T00:00:00+00:00")),
    ),
    "holes in the weights": (
        "tensors",
        "if position != size - 8 - length:",
        "if False:",
        lambda folder, tmp, reseal: (
            append("evidence/evaluate/records/temperature-0.safetensors", b"hidden")(folder, tmp, reseal),
            reseal(folder),
        ),
    ),
    "a passed check without drafts": (
        "certificate",
        "(lossless.drafts == 0 or lossless.n == 0)",
        "False",
        lambda folder, tmp, reseal: both_entries(folder, reseal, lambda entry: entry["lossless"].update(drafts=0)),
    ),
    "hidden ratios": (
        "certificate",
        "if drafting != set(ratios):",
        "if False:",
        lambda folder, tmp, reseal: both_entries(folder, reseal, lambda entry: entry["against_none"].pop()),
    ),
}


def both_configs(folder, reseal, change):
    for name in ("speculative_config.json", "speculative_config.adaptive.json"):
        edit(f"engines/vllm/{name}", change)(folder, None, lambda _: None)
    reseal(folder)


def rewrite_manifest(folder, change):
    path = folder / "manifest.json"
    value = json.loads(path.read_bytes())
    change(value)
    path.write_bytes(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())


def reclass(folder):
    """Count a launch script as evidence, so that the package's digest would not cover it."""

    def change(value):
        next(item for item in value["files"] if item["path"] == "engines/vllm/launch.sh")["class"] = "evidence"

    rewrite_manifest(folder, change)


def without(folder, name, reseal):
    """Say that a file is made from the target, and remove it."""

    def change(value):
        next(item for item in value["files"] if item["path"] == name)["made_from"] = "target"

    rewrite_manifest(folder, change)
    reseal(folder)
    (folder / name).unlink()


def add(folder, name, data, reseal):
    (folder / name).write_bytes(data)
    entry = {"path": name, "bytes": 0, "sha256": "", "class": "evidence"}
    rewrite_manifest(
        folder,
        lambda value: value.update(files=sorted([*value["files"], entry], key=lambda item: item["path"])),
    )
    reseal(folder)


def both_entries(folder, reseal, change):
    for name in ("certificate.json", "evidence/certify/cpu-reference.json"):
        value = json.loads((folder / name).read_bytes())
        change(value["entries"][0] if "entries" in value else value)
        (folder / name).write_text(json.dumps(value))
    reseal(folder)


@contextmanager
def mutant(module: str, old: str, new: str):
    """`dspark.package.verify` with one neighbour (or itself) mutated; afterwards the real modules are back."""
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("dspark.package.")}
    try:
        spec = importlib.util.find_spec(f"dspark.package.{module}")
        source = Path(spec.origin).read_text(encoding="utf-8")
        assert source.count(old) == 1, f"the mutant of {module} does not fit the source any more"
        mutated = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = mutated
        exec(compile(source.replace(old, new), spec.origin, "exec"), mutated.__dict__)
        yield importlib.import_module("dspark.package.verify")
    finally:
        package = sys.modules["dspark.package"]  # holds what was imported from it
        for name in [name for name in sys.modules if name.startswith("dspark.package.")]:
            del sys.modules[name]
            vars(package).pop(name.rpartition(".")[2], None)
        for name, module in kept.items():
            sys.modules[name] = module
            if name.count(".") == 2:
                setattr(package, name.rpartition(".")[2], module)


@pytest.mark.parametrize("name", MUTANTS)
def test_without_the_rule_the_damage_passes(package, tmp_path, reseal, name):
    module, old, new, damage = MUTANTS[name]
    damage(package, tmp_path, reseal)
    with pytest.raises(IntegrityError):
        verify(package)
    with mutant(module, old, new) as loaded:
        loaded.verify(package)


def test_without_the_comparison_any_digest_would_do(package):
    with pytest.raises(IntegrityError):
        verify(package, digest="0" * 64)
    with mutant("verify", "if digest is None:\n        return", "if digest:\n        return") as loaded:
        loaded.verify(package, digest="0" * 64)


def test_without_the_question_any_signature_would_do(package, tmp_path):
    key = write_keys(tmp_path / "key.pem")
    (package / "manifest.sig").write_bytes(bytes(64))
    with pytest.raises(IntegrityError, match="no signature of this package"):
        verify(package, key=key)
    with mutant("verify", "if key is not None:\n        require", "if False:\n        require") as loaded:
        loaded.verify(package, key=key)
