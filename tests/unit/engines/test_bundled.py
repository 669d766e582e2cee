"""Files for targets that bring their drafter along: what the released readers need, and nothing they do not know."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dspark.drafters.bundled import bundled_drafter
from dspark.engines.bundled import ABSENT, BundledInputs, BundledTarget, bundled_files
from dspark.io.yamlfile import parse_yaml

CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "dspark_block_size": 5,
    "dspark_markov_rank": 256,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
}
REPOSITORY = "deepseek-ai/DeepSeek-V4-Flash-DSpark"
HUB = BundledTarget(REPOSITORY, REPOSITORY, "0123abc", {"kind": "hub", "repo": REPOSITORY})
PROGRAMS = {"sglang": "python3", "tensorrt_llm": "trtllm-serve", "vllm": "vllm"}


def made(folder: Path, target: BundledTarget = HUB) -> Path:
    for path, content in bundled_files(BundledInputs(bundled_drafter(CONFIG, "config.json"), target)).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def launched(tmp_path: Path, engine: str, **environment: str) -> dict[str, Any]:
    """Run an engine's script with a stand-in for the engine that reports its call."""
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    stand_in = tools / PROGRAMS[engine]
    stand_in.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys\n"
        "if sys.argv[1] == '-c':\n"
        f"    os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])\n"
        "call = {'arguments': sys.argv[1:], 'mode': os.environ.get('SGLANG_RAGGED_VERIFY_MODE')}\n"
        "if '--config' in sys.argv:\n"
        "    call['config'] = open(sys.argv[sys.argv.index('--config') + 1]).read()\n"
        "print(json.dumps(call))\n"
    )
    stand_in.chmod(0o755)
    ran = subprocess.run(
        ["bash", str(tmp_path / engine / "launch.sh"), "--port", "1 2"],
        env={
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "LC_ALL": "C.UTF-8",
            "TMPDIR": str(tmp_path),
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    call: dict[str, Any] = json.loads(ran.stdout)
    return call


def test_sglang_finds_the_drafter_in_the_target_and_verifies_whole_blocks_until_it_was_measured(tmp_path: Path) -> None:
    made(tmp_path)
    call = launched(tmp_path, "sglang")
    words = call["arguments"]
    assert words == [
        *("-m", "sglang.launch_server", "--model-path", REPOSITORY, "--revision", "0123abc"),
        *("--speculative-algorithm", "DSPARK", "--speculative-dspark-block-size", "5"),
        *("--speculative-num-draft-tokens", "6", "--port", "1 2"),  # gamma + 1
    ]
    assert call["mode"] == "static"
    (tmp_path / "sglang/sps.json").write_text("{}")
    assert launched(tmp_path, "sglang")["mode"] == "static"  # without temperatures it would go by raw confidences
    (tmp_path / "sglang/sts.json").write_text("{}")
    scheduled = launched(tmp_path, "sglang")
    assert scheduled["mode"] == "compact"
    assert scheduled["arguments"][12:16] == [
        *("--speculative-dspark-sps-table-path", "sps.json"),
        *("--speculative-dspark-confidence-sts-path", "sts.json"),
    ]
    assert launched(tmp_path, "sglang", SGLANG_RAGGED_VERIFY_MODE="cap-accept")["mode"] == "cap-accept"


def test_vllm_is_told_the_method_and_no_model(tmp_path: Path) -> None:
    made(tmp_path)
    words = launched(tmp_path, "vllm")["arguments"]
    assert words[:4] == ["serve", REPOSITORY, "--revision", "0123abc"] and words[4] == "--speculative-config"
    config = json.loads(words[5])
    # Keys that vLLM 0.32.0 knows; without `model` it takes the target's own checkpoint.
    known = {"method", "num_speculative_tokens", "draft_sample_method", "rejection_sample_method"}
    assert config.keys() == known | {"enable_adaptive_verification"}
    assert (config["method"], config["num_speculative_tokens"]) == ("dspark", 5)
    assert config["enable_adaptive_verification"] is False
    adaptive = json.loads(launched(tmp_path, "vllm", DSPARK_ADAPTIVE="1")["arguments"][5])
    assert adaptive == config | {"enable_adaptive_verification": True}


def test_tensorrt_llm_is_given_the_target_as_the_drafters_checkpoint(tmp_path: Path) -> None:
    made(tmp_path)
    call = launched(tmp_path, "tensorrt_llm")
    assert call["arguments"][0] == REPOSITORY
    expected = {"decoding_type": "DSpark", "max_draft_len": 5, "speculative_model": REPOSITORY}
    assert parse_yaml(call["config"]) == {"speculative_config": expected}
    model = tmp_path / "my model's: folder"
    model.mkdir()
    named = parse_yaml(launched(tmp_path, "tensorrt_llm", DSPARK_TARGET=str(model))["config"])
    assert named["speculative_config"]["speculative_model"] == str(model.resolve())
    # The file in the folder stays as it is.
    assert b"speculative_model:" not in (tmp_path / "tensorrt_llm/config.yaml").read_bytes()


@pytest.mark.parametrize("engine", sorted(PROGRAMS))
def test_a_folder_must_be_named_and_no_path_of_this_machine_is_written(tmp_path: Path, engine: str) -> None:
    made(tmp_path, BundledTarget("this target", source={"kind": "folder"}))
    ran = subprocess.run(
        ["bash", str(tmp_path / engine / "launch.sh")], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert ran.returncode != 0 and "set DSPARK_TARGET" in ran.stderr
    assert all(str(tmp_path) not in path.read_text() for path in (tmp_path / engine).iterdir())


def test_the_other_engines_have_a_reason() -> None:
    assert set(ABSENT) == {"llamacpp", "onnxruntime", "tensorrt"} and all(ABSENT.values())
