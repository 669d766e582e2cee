"""The layout is closed, names are portable, and no two of them are one name somewhere."""

from __future__ import annotations

import pytest

from dspark.package.layout import collision, folded, path_mistake, place_of


@pytest.mark.parametrize(
    ("path", "file_class"),
    [
        ("drafter/model.safetensors", "model"),
        ("engines/llamacpp/drafter.gguf", "model"),
        ("engines/onnxruntime/draft_block.onnx", "model"),
        ("engines/onnxruntime/draft_block.onnx.data", "model"),
        ("engines/onnxruntime/target_ends.onnx.data", "model"),
        ("engines/onnxruntime/io.json", "model"),
        ("engines/tensorrt/build.json", "model"),
        ("scheduler/scheduler.json", "deploy"),
        ("scheduler/cost/cpu-reference.json", "deploy"),
        ("engines/sglang/sps.json", "deploy"),
        ("engines/sglang/env", "deploy"),
        ("engines/vllm/launch.sh", "deploy"),
        ("engines/vllm/speculative_config.adaptive.json", "deploy"),
        ("engines/sglang/sps-2d.json", "deploy"),
        ("engines/tensorrt_llm/config-1.4.0rc4.scheduled.yaml", "deploy"),
        ("engines/tensorrt_llm/cost_table.json", "deploy"),
        ("certificate.json", "evidence"),
        ("monitoring/prometheus-rules.yaml", "evidence"),
        ("evidence/smoke.jsonl", "evidence"),
        ("README.md", "evidence"),
        ("evidence/evaluate/metrics.json", "evidence"),
        ("evidence/evaluate/records/math.jsonl", "evidence"),
    ],
)
def test_each_file_of_the_design_has_its_class(path, file_class):
    assert path_mistake(path) is None
    assert place_of(path).file_class == file_class


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../outside.json",
        "evidence/../../outside.json",
        "evidence/./a.json",
        "evidence//a.json",
        "evidence/a.json/",
        "evidence/.hidden.json",
        "evidence/-flag.json",
        "evidence/a b.json",
        "evidence/a\\b.json",
        "evidence/a\n.json",
        "evidence/a.json\n",
        "evidence/é.json",
        "evidence/" + "a" * 300 + ".json",
        "C:/evidence/a.json",
        "manifest.json",
        "manifest.sig",
        "evidence/model.pkl",
        "evidence/weights.pt",
        "evidence/script.py",
        "drafter/extra.safetensors",
        "engines/unknown/launch.sh",
        "engines/vllm/config.yaml",
        "engines/tensorrt_llm/1.4/config.yaml",
        "somewhere.json",
        "",
    ],
)
def test_a_path_that_is_not_of_the_layout_is_refused(path):
    assert path_mistake(path) is not None


def test_names_that_a_file_system_takes_for_one_collide():
    assert collision(["a/x", "b/x"]) is None
    assert collision(["a/X", "a/x"]) == ("a/X", "a/x")
    assert collision(["A/x", "a/y"]) == ("A", "a")  # folders merge where case is ignored
    assert collision(["a/\u00e9", "a/e\u0301"]) is not None  # composed and decomposed
    assert collision(["\u00df", "ss"]) is not None  # full case folding
    assert collision(["a", "a/b"]) is not None  # a file cannot be a folder too


def test_folding_is_stable():
    """Case folding can undo a composition, so the form is composed again: applying it twice changes nothing."""
    for name in ("\u00c9", "e\u0301", "\u0130", "\u1e9e", "\u03b0", "\u212b", "\u01f0"):
        assert folded(folded(name)) == folded(name)
