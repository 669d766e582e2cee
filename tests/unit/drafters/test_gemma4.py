"""Drafters with Gemma 4's layers, against transformers' own modules of that family (deepspec.md, section 1.5).

The reference attends with transformers' attention over [context ; block], which is what a draft layer does; norms, MLP,
rotation and the scaled embedding are transformers' as well, built from the `config.json` that we write.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel

from dspark.config.models import DrafterSettings, MarkovSettings
from dspark.drafters.backbone import inverse_frequencies
from dspark.drafters.checkpoint import read_checkpoint, write_deepspec, write_training_checkpoint, write_union
from dspark.drafters.config import DrafterConfig
from dspark.drafters.foreign import load_drafter
from dspark.drafters.inspection import inspect_folder
from dspark.drafters.kinds import build_drafter
from dspark.drafters.reduced import read_trainable
from dspark.drafters.released import read_released
from dspark.errors import DataError, IntegrityError, SettingsError, StageError

GEMMA4 = {
    "layer_style": "gemma4",
    "shared_key_value": True,
    "logit_cap": 3.0,
    "head_dim": 16,
    "num_key_value_heads": 1,
    "rope": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 10000.0},
    "target_model_type": "gemma4_text",
}
HEADLESS = {"markov_type": "none", "markov_rank": 0, "confidence": False}
EAGLE3 = {"kind": "eagle3", "layers": 1, **HEADLESS}
HEADS = {
    "vanilla": {},
    "gated": {"markov_type": "gated"},
    "rnn": {"markov_type": "rnn"},
    "no confidence": {"confidence": False},
    "dflash": HEADLESS,
    "one token": {**HEADLESS, "gamma": 1, "layers": 1},
    "reduced": {"draft_vocab_size": 10},
    "reduced dflash": {**HEADLESS, "draft_vocab_size": 10},
}
LENGTH, GAMMA = 9, 4


@pytest.fixture(params=[True, False], ids=["k_eq_v", "own values"])
def drafter(request, make_drafter):
    drafter = make_drafter(**GEMMA4 | {"shared_key_value": request.param})
    for number, layer in enumerate(drafter.layers):
        layer.layer_scalar.fill_(1.25 - number / 4)
    return drafter


def inputs():
    generator = torch.Generator().manual_seed(4)
    return torch.randn(1, LENGTH, 64, generator=generator), torch.tensor([17])


def hidden(drafter, features, anchor):
    """h of one block behind the whole context, [gamma, d]."""
    return drafter.block_hidden(
        drafter.block_inputs(anchor).unsqueeze(1),
        drafter.project(features),
        torch.arange(LENGTH).unsqueeze(0),
        LENGTH + torch.arange(drafter.config.gamma).view(1, 1, -1),
        torch.ones(1, 1, LENGTH, dtype=torch.bool),
    )[0, 0]


@torch.no_grad()
def drafted(drafter):
    """Target ids of one block, greedily."""
    features, anchor = inputs()
    states, chain, tokens = hidden(drafter, features, anchor).unsqueeze(1), drafter.chain(), [anchor]
    for base, h in zip(drafter.base_logits(states), states, strict=True):
        logits = base + chain.bias(tokens[-1], h)
        tokens.append(drafter.to_target_ids(logits.argmax(-1)))
    return torch.cat(tokens[1:]).tolist()


def of_gemma4(record):
    """The record of a target whose drafters are as `GEMMA4` says."""
    record.architecture, record.model_type = "Gemma4ForCausalLM", "gemma4_text"
    record.text_config = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "head_dim": 8,
        "global_head_dim": 16,
        "attention_k_eq_v": True,
        "intermediate_size": 48,
        "rms_norm_eps": 1e-5,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 3.0,
        "rope_parameters": {
            "full_attention": GEMMA4["rope"],
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }
    return record


def transformers_model(drafter, folder):
    config = AutoConfig.from_pretrained(folder, attn_implementation="eager")
    model = Gemma4TextModel(config).eval()
    tensors = {name: value for name, value in drafter.state_dict().items() if name.startswith(("layers.", "norm."))}
    missing, unexpected = model.load_state_dict(tensors | {"embed_tokens.weight": drafter.embedding}, strict=False)
    assert (missing, unexpected) == ([], [])
    return model


@torch.no_grad()
def test_a_block_is_what_transformers_modules_make_of_context_and_block(drafter, record, tmp_path):
    write_union(tmp_path, drafter, record, dtype="float32")
    model = transformers_model(drafter, tmp_path)
    features, anchor = inputs()
    context = drafter.project(features)
    x = model.embed_tokens(drafter.block_inputs(anchor))  # scaled by sqrt(d)
    rotation = model.rotary_emb(x, torch.arange(LENGTH + GAMMA).unsqueeze(0), "full_attention")
    for layer in model.layers:
        sources = torch.cat([context, layer.input_layernorm(x)], 1)
        attended, _ = layer.self_attn(
            hidden_states=sources, position_embeddings=rotation, attention_mask=None, shared_kv_states={}
        )
        x = x + layer.post_attention_layernorm(attended[:, LENGTH:])
        x = x + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(x)))
        x = x * layer.layer_scalar
    expected = model.norm(x)[0]
    torch.testing.assert_close(hidden(drafter, features, anchor), expected, atol=1e-5, rtol=1e-5)
    base = torch.tanh(expected @ drafter.head.T / 3) * 3
    torch.testing.assert_close(drafter.base_logits(expected), base, atol=1e-5, rtol=1e-5)
    w1, w2 = drafter.markov_head.markov_w1.weight, drafter.markov_head.markov_w2.weight
    bias = drafter.chain().bias(anchor, expected[:1])
    torch.testing.assert_close(bias, w1[anchor] @ w2.T)  # added behind the cap, not capped itself


def test_the_incremental_form_equals_the_one_shot_form(drafter):
    features, anchor = inputs()
    cache = drafter.new_cache(1, 20)
    for start, end, kept in ((0, 4, 3), (3, 8, 5), (8, 9, 1)):
        drafter.extend(cache, features[:, start:end], torch.tensor([kept]))
    torch.testing.assert_close(drafter.block_from_cache(anchor, cache)[0], hidden(drafter, features, anchor))


def test_the_training_form_equals_the_definition_and_every_parameter_learns(drafter):
    features, anchor = inputs()
    with torch.no_grad():
        expected = hidden(drafter, features, anchor)
    drafter.requires_grad_(True)
    found = hidden(drafter, features, anchor)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    found.square().mul(torch.arange(found.numel()).view_as(found)).sum().backward()
    backbone = {name: value for name, value in drafter.named_parameters() if "head" not in name}
    assert not [name for name, value in backbone.items() if value.grad is None or not value.grad.any()]
    assert "layers.0.layer_scalar" in dict(drafter.named_buffers())


def test_proportional_frequencies_are_transformers_own(make_config):
    described = AutoConfig.for_model(
        "gemma4_text",
        head_dim=16,
        global_head_dim=16,
        num_hidden_layers=1,
        rope_parameters={"full_attention": GEMMA4["rope"]},
    )
    expected, _ = ROPE_INIT_FUNCTIONS["proportional"](described, layer_type="full_attention")
    found, scaling = inverse_frequencies(make_config(**GEMMA4))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert scaling == 1.0 and found.count_nonzero() == 2


def test_the_union_checkpoint_gives_the_drafter_back(drafter, record, tmp_path):
    write_union(tmp_path, drafter, record, dtype="float32")
    again = read_checkpoint(tmp_path, drafter.embedding, drafter.head, record=record)
    assert again.config == drafter.config
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in drafter.state_dict().items())
    assert ("layers.0.self_attn.v_proj.weight" in again.state_dict()) != drafter.config.shared_key_value


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_every_head_stands_on_these_layers(make_drafter, record, tmp_path, heads):
    """A reader of each dialect drafts the same tokens, and what was trained comes back."""
    drafter, whole = make_drafter(**GEMMA4 | heads), make_drafter(**GEMMA4).head
    write_union(tmp_path / "union", drafter, record, dtype="float32")
    write_deepspec(tmp_path / "deepspec", drafter, record, whole, dtype="float32")
    write_training_checkpoint(tmp_path / "training", drafter, record)
    for dialect in ("union", "deepspec", "training"):
        read = read_checkpoint(tmp_path / dialect, drafter.embedding, whole, record=record)
        assert (read.config.layer_style, read.config.logit_cap) == ("gemma4", 3.0)
        assert drafted(read) == drafted(drafter)
        again = read_trainable(tmp_path / dialect, drafter.embedding, whole, record=record)
        assert again.config == drafter.config
        assert all(torch.equal(value, again.state_dict()[name]) for name, value in drafter.state_dict().items())


def test_what_does_not_learn_is_no_sign_of_a_broken_gradient_and_everything_else_is(make_drafter, record, tmp_path):
    drafter = make_drafter(**GEMMA4)
    assert bool((drafter.layers[0].layer_scalar == 1).all())
    write_union(tmp_path, drafter, record)
    drafter.layers[1].post_feedforward_layernorm.weight.fill_(1)
    with pytest.raises(StageError, match=r"all 0 or all 1: layers\.1\.post_feedforward_layernorm\.weight$"):
        write_union(tmp_path, drafter, record)


def test_the_config_is_the_published_one(make_drafter, record, tmp_path):
    """Architecture, geometry, cap and rope as DeepSpec's released Gemma 4 drafter names them (section 1.4)."""
    write_union(tmp_path, make_drafter(**GEMMA4), record, dtype="float32")
    config = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "architectures": ["Gemma4DSparkModel"],
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 3.0,
        "rope_parameters": {"full_attention": GEMMA4["rope"]},
        "layer_types": ["full_attention"] * 2,
        "tie_word_embeddings": False,
    }
    assert {key: config[key] for key in expected} == expected
    assert "hidden_act" not in config and "speculators_config" not in config


def test_a_config_that_contradicts_itself_is_refused(make_drafter, record, tmp_path):
    drafter = make_drafter(**GEMMA4)
    write_union(tmp_path, drafter, record, dtype="float32")
    path = tmp_path / "config.json"
    right = json.loads(path.read_text())
    for change, said in (
        ({"global_head_dim": 32}, "global_head_dim is 32, not 16"),
        ({"architectures": ["Qwen3DSparkModel"]}, "architectures"),
        ({"model_type": "llama"}, "model_type is 'llama', drafters of kind dspark are of 'qwen3', 'gemma4_text'"),
        ({"model_type": "qwen3"}, "architectures"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu', not 'gelu_pytorch_tanh'"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers is 1, not 0"),
    ):
        path.write_text(json.dumps(right | change))
        with pytest.raises(IntegrityError, match=said):
            read_checkpoint(tmp_path, drafter.embedding, drafter.head)


def published(drafter, record, folder):
    """The same drafter as DeepSpec writes it: the target's config with the drafter's fields, its ends stored too."""
    write_union(folder / "ours", drafter, record, dtype="float32")
    shutil.copytree(folder / "ours", folder / "theirs")
    path = folder / "theirs/config.json"
    config = json.loads(path.read_text())
    for key in ("dspark", "sample_from_anchor", "is_causal", "has_embed_tokens", "aux_hidden_state_layer_ids"):
        del config[key]
    sliding = {"rope_type": "default", "rope_theta": 10000.0}
    config |= {
        "head_dim": 8,
        "num_key_value_heads": 2,
        "sliding_window": 1024,
        "rope_parameters": config["rope_parameters"] | {"sliding_attention": sliding},
    }
    path.write_text(json.dumps(config))
    tensors = load_file(folder / "theirs/model.safetensors")
    ends = {"embed_tokens.weight": drafter.embedding, "lm_head.weight": drafter.head}
    save_file(tensors | ends, folder / "theirs/model.safetensors")
    return path


def test_a_published_gemma4_drafter_is_loaded_exactly(make_drafter, record, tmp_path):
    drafter = make_drafter(**GEMMA4)
    record.model_type = "gemma4_text"
    path = published(drafter, record, tmp_path)
    loaded = load_drafter(path.parent, record, drafter.embedding, drafter.head)
    assert loaded.config == drafter.config
    features, anchor = inputs()
    assert torch.equal(hidden(loaded, features, anchor), hidden(drafter, features, anchor))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"enable_moe_block": True}))
    with pytest.raises(DataError, match="experts"):
        load_drafter(path.parent, record, drafter.embedding, drafter.head)


def test_a_published_gemma4_drafter_is_taken_into_builds_for_its_own_target_alone(make_drafter, record, tmp_path):
    drafter = make_drafter(**GEMMA4)
    path = published(drafter, record, tmp_path)
    ends = drafter.embedding, drafter.head
    with pytest.raises(DataError, match="made of Gemma 4's layers, drafters of target tiny of Qwen3's"):
        read_released(path.parent, record, *ends)
    found = read_released(path.parent, of_gemma4(record), *ends)
    assert found.config == drafter.config
    assert all(torch.equal(value, found.state_dict()[name]) for name, value in drafter.state_dict().items())
    record.text_config["final_logit_softcapping"] = 30.0
    with pytest.raises(DataError, match=r"logit_cap is 3\.0, not 30\.0"):
        read_released(path.parent, record, *ends)


def test_a_description_shows_the_shape_of_global_attention(make_drafter, record, tmp_path):
    found = inspect_folder(published(make_drafter(**GEMMA4), record, tmp_path).parent)
    assert (found.kind, found.layout, found.problems) == ("dspark", "deepspec", ())
    assert (found.attention_heads, found.key_value_heads, found.head_dim) == (4, 1, 16)


def test_eagle3_is_not_made_of_these_layers(make_config, make_drafter, record, tmp_path):
    with pytest.raises(ValueError, match="no drafter of kind eagle3 is made of Gemma 4's layers"):
        make_config(**GEMMA4 | EAGLE3)
    settings = DrafterSettings(kind="eagle3", layers=1, markov=MarkovSettings(type="none"), confidence=False)
    ends = (make_drafter().embedding, make_drafter().head)
    write_union(tmp_path, build_drafter(make_config(**EAGLE3), *ends), record, untrained=True)
    with pytest.raises(DataError, match="made of Qwen3's layers, drafters of target tiny of Gemma 4's"):
        read_released(tmp_path, of_gemma4(record), *ends)
    with pytest.raises(SettingsError, match="Gemma 4's layers, and none of kind 'eagle3' is") as refused:
        DrafterConfig.of(record, settings)
    assert "recipe of kind dspark" in refused.value.hint and "dspark plan --build NAME" in refused.value.hint
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "gemma4_text"}))
    with pytest.raises(IntegrityError, match=r"model_type is 'gemma4_text', .* kind eagle3 are of 'qwen3'$"):
        read_checkpoint(tmp_path, *ends)


def test_a_target_decides_the_layers_of_its_drafter(family_target):
    """Global geometry, shared projection, cap and partial rotation for Gemma 4; plain Qwen3 layers for all others."""
    config = DrafterConfig.of(family_target.record, DrafterSettings(gamma=3, layers=1, markov=MarkovSettings(rank=4)))
    text = family_target.record.text_config
    if family_target.family.drafter == "qwen3":
        assert (config.layer_style, config.head_dim, config.num_key_value_heads) == ("qwen3", 8, 2)
        assert (config.logit_cap, config.embedding_scale, config.score_scale) == (None, 1.0, 8**-0.5)
        return
    assert (config.layer_style, config.head_dim, config.logit_cap) == ("gemma4", 16, 4.0)
    assert config.shared_key_value is text["attention_k_eq_v"]
    assert config.num_key_value_heads == (1 if text["attention_k_eq_v"] else 2)
    assert config.rope == {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}
    assert (config.embedding_scale, config.score_scale) == (32**0.5, 1.0)


def test_what_only_gemma4_layers_have_is_refused_elsewhere(make_config, record):
    for change in ({"logit_cap": 30.0}, {"shared_key_value": True}):
        with pytest.raises(ValueError, match="Qwen3 layers"):
            make_config(**change)
    with pytest.raises(ValueError, match="proportional"):
        make_config(rope=GEMMA4["rope"])
    record.architecture = "Gemma4ForCausalLM"
    record.text_config |= {"hidden_activation": "relu"}
    with pytest.raises(
        SettingsError, match="hidden_activation is 'relu', the drafter's layers use 'gelu_pytorch_tanh'"
    ):
        DrafterConfig.of(record, DrafterSettings())
