from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark.errors import PreflightError, SettingsError
from dspark.targets.catalogue import add_target, list_targets, read_target

CHECKOUT = Path(__file__).parents[3]


def test_every_target_of_the_checkout_is_valid():
    folder = CHECKOUT / "pipeline" / "targets"
    assert {"smollm2-135m", "qwen3-4b", "qwen3-8b", "qwen3-14b", "gemma4-12b", "tiny"} <= set(list_targets(folder))
    specs = {name: read_target(folder, name) for name in list_targets(folder)}
    # Taps and mask token of DeepSpec's released drafters.
    assert specs["qwen3-8b"].taps == (1, 9, 17, 25, 33)
    assert specs["qwen3-14b"].taps == (1, 10, 19, 28, 37)
    assert {specs[f"qwen3-{size}"].mask_token_id for size in ("4b", "8b", "14b")} == {151669}
    assert 3 <= specs["smollm2-135m"].mask_token_id <= 16


def test_an_unknown_target_is_answered_with_the_nearest_name(tmp_path):
    (tmp_path / "qwen3-8b.yaml").write_text("source: {kind: hub, repo: Qwen/Qwen3-8B}\n")
    with pytest.raises(SettingsError, match="'qwen3-8' does not exist") as caught:
        read_target(tmp_path, "qwen3-8")
    assert "qwen3-8b" in caught.value.hint


def test_a_mistake_is_reported_with_its_line(tmp_path):
    (tmp_path / "t.yaml").write_text("source:\n  kind: hub\n  repo: a/b\ndtype: float64\n")
    with pytest.raises(SettingsError, match=r"t\.yaml:4: "):
        read_target(tmp_path, "t")


def test_adding_a_folder_writes_what_the_model_says_about_itself(tmp_path, make_folder):
    model = make_folder(dtype="bfloat16")
    (model / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 0], "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95})
    )
    (model / "chat_template.jinja").write_text("{% if enable_thinking %}{% endif %}")
    add_target(tmp_path, "mine", model)
    spec = read_target(tmp_path, "mine")
    assert spec.source.path == str(model)
    assert (spec.dtype, spec.thinking_mode) == ("bfloat16", "off")
    assert spec.sampling.model_dump() == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def test_a_folder_that_recommends_nothing_gets_the_defaults(tmp_path, make_folder):
    add_target(tmp_path, "mine", make_folder())
    spec = read_target(tmp_path, "mine")
    assert (spec.dtype, spec.thinking_mode, spec.sampling.temperature) == ("float32", "none", 1.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "mamba"}, r"a state from token to token.*\(model_type 'mamba'\)"),
        ({"model_type": "nobody"}, "model_type 'nobody' is not supported$"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForSequenceClassification"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\)"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_hidden_layers": 1}, "fewer than two layers"),
    ],
)
def test_a_model_that_cannot_be_a_target_is_refused_with_the_reason(tmp_path, make_folder, change, reason):
    with pytest.raises(PreflightError, match=reason) as caught:
        add_target(tmp_path, "mine", make_folder(**change))
    assert "dspark targets add NAME PATH" in caught.value.hint and "qwen3" in caught.value.hint
    assert list_targets(tmp_path) == []


def test_pickled_weights_are_never_loaded(tmp_path, make_folder):
    model = make_folder(drop=["model.safetensors"])
    (model / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(PreflightError, match=r"pickled \(pytorch_model\.bin\)"):
        add_target(tmp_path, "mine", model)


def test_missing_files_are_named(tmp_path, make_folder):
    model = make_folder(drop=["model.safetensors", "tokenizer.json"])
    with pytest.raises(PreflightError, match=r"missing tokenizer\.json, model\.safetensors"):
        add_target(tmp_path, "mine", model)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "model-00001-of-00002.safetensors").write_bytes(b"x")
    with pytest.raises(PreflightError, match=r"missing tokenizer\.json, model-00002-of-00002\.safetensors$"):
        add_target(tmp_path, "mine", model)


@pytest.mark.parametrize("name", ["../weights.safetensors", "/etc/passwd", "weights.bin", 3])
def test_an_index_that_points_elsewhere_is_refused(tmp_path, make_folder, name):
    model = make_folder(drop=["model.safetensors"])
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(PreflightError, match="index"):
        add_target(tmp_path, "mine", model)


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff"])
def test_a_broken_config_is_an_answer_not_a_traceback(tmp_path, make_folder, text):
    model = make_folder()
    (model / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(PreflightError, match=r"config\.json"):
        add_target(tmp_path, "mine", model)


def test_names_are_not_taken_twice_and_have_one_spelling(tmp_path, make_folder):
    model = make_folder()
    add_target(tmp_path, "mine", model)
    with pytest.raises(SettingsError, match="exists"):
        add_target(tmp_path, "mine", model)
    with pytest.raises(SettingsError, match="cannot be a name"):
        add_target(tmp_path, "../mine", model)
    with pytest.raises(PreflightError, match="is not a folder"):
        add_target(tmp_path, "other", tmp_path / "nowhere")
