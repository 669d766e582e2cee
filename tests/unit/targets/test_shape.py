"""Closed forms of a target's size, held against the transformers classes themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dspark.config.models import TargetSpec
from dspark.errors import SettingsError
from dspark.targets.catalogue import read_target
from dspark.targets.completion import complete
from dspark.targets.materialise import materialise
from dspark.targets.shape import differences, shape_of
from dspark.targets.traits import text_part

CATALOGUE = Path(__file__).parents[3] / "pipeline/targets"
BASE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 280,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
GEMMA = {"global_head_dim": 16, "num_global_key_value_heads": 1, "sliding_window": 4}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 24}
CONFIGS = {
    "llama": {"model_type": "llama"},
    "llama, biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, tied": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral"},
    "olmo2": {"model_type": "olmo2"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "qwen3, biases": {"model_type": "qwen3", "attention_bias": True},
    "qwen3_moe": {"model_type": "qwen3_moe", **EXPERTS, "num_experts_per_tok": 2},
    "qwen3_moe, some layers": {
        "model_type": "qwen3_moe",
        **EXPERTS,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    },
    "smollm3": {"model_type": "smollm3", "pad_token_id": 0},
    "gemma4_unified": {"model_type": "gemma4_unified_text", **GEMMA},
    "gemma4_unified, keys are values": {"model_type": "gemma4_unified_text", **GEMMA, "attention_k_eq_v": True},
    "gemma4, layer inputs": {"model_type": "gemma4_text", **GEMMA, "hidden_size_per_layer_input": 12},
    "gemma4, shared keys": {
        "model_type": "gemma4_text",
        **GEMMA,
        "hidden_size_per_layer_input": 8,
        "num_hidden_layers": 9,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    "gemma4, experts": {
        "model_type": "gemma4_text",
        **GEMMA,
        **EXPERTS,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "top_k_experts": 2,
    },
}


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_transformers_class(name):
    config = {**BASE, **CONFIGS[name]}
    shape = shape_of(complete(config, "here"))
    model = on_meta(config)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.tie_word_embeddings == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma4_unified, keys are values", "gemma4, shared keys"])
def test_cached_values_are_those_that_a_forward_pass_caches(name):
    config = {**BASE, **CONFIGS[name], "sliding_window": None if name in ("llama", "qwen3") else 64}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    with torch.no_grad():
        cache = model.model(torch.arange(5)[None], use_cache=True).past_key_values
    holding = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    held = sum(layer.keys.numel() + layer.values.numel() for layer in holding)
    assert shape_of(complete(config, "here")).cached_values == held / 5


# Parameters as the model cards and reference pages round them.
@pytest.mark.parametrize(
    ("name", "billions", "digits"),
    [("smollm2-135m", 0.1345, 4), ("qwen3-4b", 4.0, 1), ("qwen3-8b", 8.2, 1), ("qwen3-14b", 14.8, 1)],
)
def test_the_catalogue_is_as_large_as_is_known(name, billions, digits):
    spec = read_target(CATALOGUE, name)
    assert spec.config is not None
    assert round(shape_of(complete(spec.config, name)).parameters / 1e9, digits) == billions


@pytest.mark.parametrize("path", sorted(CATALOGUE.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_target_of_the_catalogue_tells_its_shape(path):
    spec = read_target(CATALOGUE, path.stem)
    config = spec.config if spec.config is not None else spec.source.config  # only random ones need no `config`
    assert len(shape_of(complete(config, path.name)).layers) >= 4


def test_gemma_sees_everything_in_the_layers_that_are_tapped():
    spec = read_target(CATALOGUE, "gemma4-12b")
    shape = shape_of(complete(spec.config, "gemma4-12b"))
    full = [number for number, layer in enumerate(shape.layers) if layer.full]
    assert full == list(range(5, 48, 6)) and set(spec.taps[:4]) <= set(full)
    assert {(layer.kv_heads, layer.head_dim, layer.values) for layer in shape.layers if layer.full} == {(1, 512, False)}
    assert round(shape.parameters / 1e9) == 12


def test_a_mixture_works_less_than_it_weighs():
    shape = shape_of(complete({**BASE, **CONFIGS["qwen3_moe"]}, "here"))
    spared = 6 * 3 * 32 * 24 * 2  # two of four experts in each layer
    embeddings, norms = 2 * 280 * 32, 6 * (2 * 32 + 2 * 8) + 32
    assert shape.products_per_token == shape.parameters - embeddings - norms - spared


def test_differences_name_both_values():
    one = shape_of(complete({**BASE, "model_type": "qwen3"}, "here"))
    other = shape_of(complete({**BASE, "model_type": "qwen3", "intermediate_size": 64, "num_key_value_heads": 4}, ""))
    assert differences(one, one) == []
    found = differences(one, other)
    assert "intermediate_size is declared as 48, the model's is 64" in found
    assert "kv_heads of layer 0 is declared as 2, the model's is 4" in found
    text = {**BASE, **CONFIGS["gemma4_unified"]}
    plain = {**text, "model_type": "gemma4_text", "hidden_size_per_layer_input": 0}  # the same model's other name
    assert differences(shape_of(complete(text, "")), shape_of(complete(plain, ""))) == []
    deeper = shape_of(complete({**BASE, "model_type": "qwen3", "num_hidden_layers": 7}, "here"))
    assert differences(one, deeper) == ["num_hidden_layers is declared as 6, the model's is 7"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**BASE, "model_type": "t5"}, "encoder and a decoder"),
        ({**BASE, "model_type": "nonesuch"}, "nonesuch"),
        ({**BASE, "model_type": "gemma2"}, "caps attention scores"),
    ],
)
def test_configs_that_no_target_can_have_are_refused(config, message):
    with pytest.raises(SettingsError, match=message):
        complete(config, "here")


def spec_with(config):
    source = {"kind": "random", "config": {**BASE, "model_type": "llama", "initializer_range": 0.25}}
    return TargetSpec.model_validate({"name": "small", "source": source, "dtype": "float32", "config": config})


def test_a_fetched_target_is_held_against_its_declaration(tmp_path):
    right = {**BASE, "model_type": "llama"}
    record = materialise(spec_with(right), root=tmp_path / "right")
    assert record == materialise(spec_with(None), root=tmp_path / "without")
    with pytest.raises(SettingsError, match=r"small.yaml: config: hidden_size is declared as 64, the model's is 32"):
        materialise(spec_with({**right, "hidden_size": 64}), root=tmp_path / "wrong")


def test_the_declaration_changes_no_settings_that_stages_read():
    assert spec_with({**BASE, "model_type": "llama"}).model_dump() == spec_with(None).model_dump()
    assert "config" not in spec_with(None).model_dump()


def test_a_declaration_without_a_size_is_a_mistake(tmp_path):
    (tmp_path / "half.yaml").write_text(
        "source: {kind: hub, repo: a/b}\nconfig: {model_type: llama, hidden_size: 64}\n"
    )
    with pytest.raises(SettingsError, match="config lacks num_hidden_layers, num_attention_heads"):
        read_target(tmp_path, "half")


def test_of_a_model_that_also_sees_the_text_part_counts():
    text = {**BASE, **CONFIGS["gemma4_unified"]}
    whole = {"model_type": "gemma4_unified", "text_config": {**text}, "tie_word_embeddings": False}
    assert text_part(whole) == text
    assert shape_of(complete(whole, "here")).parameters == shape_of(complete(text, "here")).parameters
