"""What differs between families, against transformers' own forward pass of each."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dspark.targets.masks import within_window
from dspark.targets.traits import (
    EMBEDDINGS,
    FAMILIES,
    family_of,
    global_attention,
    logit_cap,
    unsupported,
    windows,
)

IDS = torch.randint(3, 40, (2, 13), generator=torch.Generator().manual_seed(5))
# The published config of Gemma 4 12B, as far as it matters here (deepspec.md, section 1.4).
GEMMA4_12B = {
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "hidden_size": 3840,
    "num_hidden_layers": 48,
    "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
}


def test_each_family_is_what_transformers_loads_for_its_model_type():
    for model_type, family in FAMILIES.items():
        assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] == family.architecture
        assert family_of(family.architecture) is family


def test_taps_and_logits_are_those_of_a_plain_forward_pass(family_target):
    """hidden_states[k + 1] is the output of layer k; logits come with whatever the family does to them."""
    expected = family_target.model(IDS, output_hidden_states=True)
    found = family_target.hidden(IDS)
    taps = torch.cat([expected.hidden_states[tap + 1] for tap in family_target.taps], -1)
    torch.testing.assert_close(found.taps, taps, rtol=0, atol=0)
    torch.testing.assert_close(family_target.logits(found.last_hidden), expected.logits)
    cap = family_target.logit_cap
    if cap is not None:
        assert 0.5 * cap < expected.logits.abs().max() < cap  # it bites, or nothing was shown


def test_an_explicit_causal_mask_becomes_the_familys_own(family_target):
    length = IDS.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).tril().expand(2, 1, length, length)
    explicit = family_target.hidden(IDS, attention_mask=mask)
    torch.testing.assert_close(explicit.taps, family_target.hidden(IDS).taps)
    torch.testing.assert_close(explicit.last_hidden, family_target.hidden(IDS).last_hidden)


def test_windows_end_what_a_token_sees(family_target):
    """With one layer of windows a change 5 positions back shows at most through later layers of full attention."""
    changed = IDS.clone()
    changed[:, 0] = (IDS[:, 0] + 1 - 3) % 37 + 3
    layers = family_target.windows
    first = torch.stack([family_target.hidden(ids).taps[..., :32] for ids in (IDS, changed)])  # layer 0
    moved = ((first[0] - first[1]).abs() > 1e-6).any(-1).all(0)  # experts sum their tokens in another order
    assert moved.tolist() == [position < (layers[0] or 99) for position in range(IDS.shape[1])]


def test_windows_are_counted_in_visible_keys_whatever_stands_between():
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    assert within_window(causal, 2).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    padded = torch.tensor([[1, 1, 0, 0, 1, 1]]).bool()  # a common beginning, padding, the row's own
    assert within_window(padded, 3).int().tolist() == [[0, 1, 0, 0, 1, 1]]
    assert within_window(causal, 5) is causal


def test_windows_of_both_kinds_of_families():
    kinds = ["sliding_attention", "full_attention"]
    text = {"sliding_window": 8, "layer_types": kinds}
    assert windows(FAMILIES["gemma4_text"], text, 2) == (8, None)
    assert windows(FAMILIES["mistral"], text, 2) == (8, 8)
    assert windows(FAMILIES["mistral"], {"sliding_window": None}, 2) == (None, None)
    assert windows(FAMILIES["llama"], {}, 3) == (None, None, None)


def test_gemma4_12b_has_its_global_geometry_in_either_spelling():
    """One key-value head of 512: the published config says it by name, transformers layer by layer."""
    assert global_attention(GEMMA4_12B) == (16, 1, 512)
    whole = AutoConfig.for_model("gemma4_unified_text", **GEMMA4_12B)
    text = json.loads(whole.to_json_string(use_diff=False))
    assert "global_head_dim" not in text
    assert global_attention(text) == (16, 1, 512)
    assert windows(FAMILIES["gemma4_unified_text"], text, 48)[:7] == (1024,) * 5 + (None, 1024)
    assert logit_cap(text) == 30.0
    plain = {"num_attention_heads": 4, "hidden_size": 32}
    assert (global_attention(plain), logit_cap(plain)) == ((4, 4, 8), None)


def test_weights_of_models_that_also_see_lie_one_level_down():
    assert FAMILIES["gemma4_unified"].embedding == "model.language_model.embed_tokens.weight"
    assert FAMILIES["qwen3"].embedding == "model.embed_tokens.weight"
    assert {family.embedding for family in FAMILIES.values()} == set(EMBEDDINGS)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "an encoder and a decoder"),
        ({"model_type": "bart", "architectures": ["BartForCausalLM"]}, "an encoder and a decoder"),
        ({"model_type": "mamba2"}, "carries a state from token to token.*rejected"),
        ({"model_type": "rwkv"}, "carries a state"),
        ({"model_type": "x", "layer_types": ["linear_attention", "full_attention"]}, r"a state.*\(linear_attention\)"),
        ({"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}}, "carries a state"),
        ({"model_type": "gemma4_text", "use_bidirectional_attention": "all"}, "not causal"),
        ({"model_type": "llama", "is_causal": False}, "not causal"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "no head that continues a text"),
        ({"model_type": "llama4_text", "attention_chunk_size": 8192}, "within chunks"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "caps attention scores"),
        ({"model_type": "gpt_oss"}, "sinks"),
        ({"model_type": "granite"}, "scales logits"),
        ({"model_type": "gpt2"}, "not laid out as"),
        ({"model_type": "clip", "vision_config": {}}, "without a text model of its own"),
        ({"model_type": "llava", "text_config": {"model_type": "llama"}}, "supported by itself: supply it as LlamaFor"),
        ({"model_type": "llava", "text_config": {"model_type": "phi"}}, "model_type 'llava' is not supported"),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForSequenceClass"),
        ({"model_type": "phi4"}, "model_type 'phi4' is not supported$"),
        ({}, "names no model_type"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(config, reason):
    from re import search

    assert search(reason, unsupported(config) or "")


def test_what_transformers_writes_for_each_family_is_accepted():
    for model_type in FAMILIES:
        config = AutoConfig.for_model(model_type)
        assert unsupported(json.loads(config.to_json_string(use_diff=False))) is None, model_type
