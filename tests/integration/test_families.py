"""The real ten stages on a tiny random target of families whose layers are not Llama's or Qwen3's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dspark.io.yamlfile import read_yaml

if TYPE_CHECKING:
    from sandbox import Sandbox

pytestmark = pytest.mark.long
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 10.0,
        "hidden_size_per_layer_input": 0,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
# Engines that get no files, and a word of the reason.
ABSENT = {
    "gemma4_text": {"llamacpp": "GGUF", "sglang": "Gemma 4's layers", "tensorrt_llm": "gemma4_text"},
    "qwen3_moe": {"llamacpp": "GGUF"},
}


def make_tiny_of(family: str, sandbox: Sandbox) -> None:
    path = sandbox.root / "pipeline/targets/tiny.yaml"
    spec = read_yaml(path)
    spec["source"]["config"] |= {"model_type": family, **FAMILIES[family]}
    path.write_text(json.dumps(spec))  # JSON is YAML


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_become_a_verified_package(family: str, sandbox: Sandbox) -> None:
    make_tiny_of(family, sandbox)
    done = sandbox.dspark("run", "--target", "tiny", "--no-publish", "--json", timeout=600)
    assert done.code == 0, done.err
    assert [stage["status"] for stage in done.json["stages"]] == ["ran"] * 10
    package = sandbox.root / "builds/tiny/package"
    verified = sandbox.dspark("package", "verify", str(package), "--json")
    assert verified.code == 0, verified.err

    lossless = json.loads((package / "evidence/evaluate/lossless.json").read_text())
    assert lossless["result"] == "pass"
    certificate = json.loads((package / "certificate.json").read_text())
    engines = {item["engine"]: item for item in certificate["engines"]}
    absent = {name: item["reason"] for name, item in engines.items() if item["status"] == "absent"}
    assert absent.keys() == ABSENT[family].keys()
    assert all(word in absent[name] for name, word in ABSENT[family].items())
    assert Path(package / "engines/onnxruntime/draft_block.onnx").is_file()
    parity = json.loads((package / "evidence/parity.json").read_text())
    assert all(dialect["verdict"] == "equal" for dialect in parity["dialects"].values())


def test_a_recipe_that_no_drafter_of_the_target_can_follow_is_refused_before_any_stage(sandbox: Sandbox) -> None:
    make_tiny_of("gemma4_text", sandbox)
    build = {"name": "chains", "target": "tiny", "recipe": "eagle3", "domains": ["math"]}
    (sandbox.root / "pipeline/builds/chains.yaml").write_text(json.dumps(build))
    done = sandbox.dspark("run", "--build", "chains", "--no-publish", timeout=300)
    assert done.code == 2, done.err
    assert "target tiny: its drafters are made of Gemma 4's layers, and none of kind 'eagle3' is" in done.err
    assert "dspark plan --build NAME --settings" in done.err
    assert not (sandbox.root / "corpora").exists()
