from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark import processor
from dspark.config.models import Hardware, ServingProfile
from dspark.io.jsonfile import canonical_json
from dspark.profiling.fingerprint import ABSENT, _in_range, fingerprint, profile_mistakes

PROFILE = ServingProfile(name="cpu", engine="reference", access="local")


def test_the_same_machine_has_the_same_fingerprint():
    assert canonical_json(fingerprint(PROFILE)) == canonical_json(fingerprint(PROFILE))


def test_it_tells_versions_threads_and_hardware():
    found = fingerprint(PROFILE.model_copy(update={"threads": 3}))
    assert found["engine"] == "reference"
    assert found["threads"] == 3
    assert found["versions"]["torch"].startswith("2.")
    assert found["hardware"]["cores"] == len(os.sched_getaffinity(0))
    assert found["max_num_seqs"] == 8 and found["context"] == 256


@pytest.mark.parametrize("change", [{"threads": 1}, {"dtype": "float16"}, {"draft_backend": "onnxruntime"}])
def test_whatever_changes_the_timings_changes_it(change: dict[str, object]):
    before, after = (
        fingerprint(PROFILE.model_copy(update={"threads": 2})),
        fingerprint(PROFILE.model_copy(update={"threads": 2, **change})),
    )
    assert before != after
    assert before["launch_args_digest"] != after["launch_args_digest"]


def test_names_and_descriptions_do_not():
    assert fingerprint(PROFILE) == fingerprint(PROFILE.model_copy(update={"name": "b", "description": "other"}))


def test_other_instruction_sets_are_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(processor, "_CPUINFO", cpuinfo)
    prints = []
    for flags in ("sse avx512f", "avx512f sse", "sse"):
        cpuinfo.write_text(f"model name : Some CPU\nflags : {flags}\n\nmodel name : Another\n")
        prints.append(fingerprint(PROFILE)["hardware"])
    assert prints[0]["cpu"] == "Some CPU"
    assert prints[0] == prints[1] != prints[2]
    cpuinfo.unlink()
    assert "cpu_flags_digest" not in fingerprint(PROFILE)["hardware"]


def fake_tool(folder: Path, script: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)


def test_gpus_and_their_driver_are_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fake_tool(tmp_path, "echo 'NVIDIA X, 570.1, 143771 MiB'; echo 'NVIDIA X, 570.1, 143771 MiB'")
    gpu = {"name": "NVIDIA X", "driver": "570.1", "memory": "143771 MiB"}
    assert fingerprint(PROFILE)["hardware"]["gpus"] == [gpu, gpu]
    fake_tool(tmp_path, "exit 9")
    assert "gpus" not in fingerprint(PROFILE)["hardware"]


def test_a_profile_of_a_gpu_says_what_is_computed_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name : X\nflags : avx2\n")
    monkeypatch.setattr(processor, "_CPUINFO", cpuinfo)
    here = fingerprint(PROFILE)
    there = fingerprint(PROFILE.model_copy(update={"hardware": Hardware(accelerator="NVIDIA H100")}))
    assert (here["dtype"], here["kv_dtype"]) == ("float32", "float32"), "this processor has no bfloat16"
    assert (there["dtype"], there["kv_dtype"], there["device"]) == ("bfloat16", "bfloat16", "cuda")
    assert "device" not in here, "certificates of the CPU stay what they are"
    assert here["launch_args_digest"] != there["launch_args_digest"]


def test_it_loads_none_of_the_libraries_it_names():
    script = (
        "import sys; from dspark.config.models import ServingProfile; from dspark.profiling.fingerprint import *;"
        "fingerprint(ServingProfile(name='a', engine='reference', access='local'));"
        "print(sorted({'torch', 'transformers', 'onnxruntime', 'mlflow', 'dvc'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_llamacpp_is_its_wheel_with_the_profiles_parallelism():
    served = ServingProfile(name="cpu", engine="llamacpp", access="local", dtype="float16", threads=1)
    found = fingerprint(served)
    assert found["engine"] == "llamacpp" and found["threads"] == 1 and found["attention_backend"] == "ggml"
    assert found["engine_version"] == ABSENT or found["engine_version"].startswith("xllamacpp 20")
    assert found["parallel"] == {"tp": 1, "dp": 1, "pp": 1}


@pytest.mark.parametrize(
    ("wanted", "version", "inside"),
    [
        (">=2026.10", "2026.10.11549", True),
        (">=2026.10", "2026.9", False),
        (">=0.5.23,<0.6", "0.5.23", True),
        (">=0.5.23,<0.6", "0.6", False),
        (">=0.5.23,<0.6", "0.6.0", False),
        ("==1.2", "1.2.0", True),
        (">1", "1.0.1", True),
        ("<=1", "unknown", False),
    ],
)
def test_versions_lie_in_ranges_by_their_numbers(wanted: str, version: str, inside: bool):
    assert _in_range(version, wanted) is inside


def test_a_profile_of_another_machine_or_version_is_not_this_ones():
    here = fingerprint(PROFILE)
    assert profile_mistakes(PROFILE, here) == []
    newer = PROFILE.model_copy(update={"engine_versions": ">=99"})
    assert profile_mistakes(newer, here) == [f"it is for reference >=99, here is {here['engine_version']}"]
    gpus = PROFILE.model_copy(update={"hardware": Hardware(accelerator="NVIDIA H100", count=2)})
    without = here | {"hardware": {"cpu": "any"}}
    assert profile_mistakes(gpus, without) == ["it is for 2 x NVIDIA H100, this machine has no GPU"]
    one, two = ({"gpus": [{"name": "NVIDIA H100 80GB HBM3"}] * count} for count in (1, 2))
    assert len(profile_mistakes(gpus, here | {"hardware": one})) == 1
    assert profile_mistakes(gpus, here | {"hardware": two}) == []
    far = ServingProfile(name="far", engine="sglang", access="none", reason="far", engine_versions=">=9")
    assert profile_mistakes(far, here) == []
