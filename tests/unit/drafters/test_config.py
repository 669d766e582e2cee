import pytest
import torch

from dspark.config.models import DrafterSettings, MarkovSettings
from dspark.drafters.backbone import inverse_frequencies
from dspark.drafters.config import DrafterConfig, rope_parameters
from dspark.errors import SettingsError


def test_widths_come_from_the_target_and_depth_from_the_recipe(record):
    settings = DrafterSettings(gamma=7, layers=2, markov=MarkovSettings(rank=64), draft_vocab_size=16)
    config = DrafterConfig.of(record, settings)
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (32, 48, 8)  # 32 / 4 heads
    assert (config.gamma, config.layers, config.taps, config.num_target_layers) == (7, 2, (1, 3), 6)
    assert config.context_size == 64
    assert config.geometry == "dspark-g7-l2-r64-v16"


def test_a_draft_vocabulary_as_large_as_the_target_s_means_the_whole_one(record):
    config = DrafterConfig.of(record, DrafterSettings(draft_vocab_size=40))
    assert config.draft_vocab_size is None
    assert config.geometry.endswith("-v40")


def test_the_last_layer_is_never_a_tap(make_config):
    make_config(taps=(1, 4))
    with pytest.raises(ValueError, match="last layer is never a tap"):
        make_config(taps=(1, 5))


@pytest.mark.parametrize("taps", [(3, 1), (1, 1), (-1, 2), ()])
def test_taps_ascend_without_repeats(make_config, taps):
    with pytest.raises(ValueError, match="taps"):
        make_config(taps=taps)


def test_both_spellings_of_rope_are_read_alike():
    new = rope_parameters({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    old = rope_parameters({"rope_theta": 1e6, "rope_scaling": None})
    assert new == old == {"rope_type": "default", "rope_theta": 1e6}
    scaled = rope_parameters({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert scaled == {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional"])
def test_rope_that_changes_with_the_length_is_refused_with_the_reason(record, kind):
    record.text_config["rope_parameters"] = {"rope_type": kind, "rope_theta": 1e4}
    with pytest.raises(SettingsError, match=f"tiny.*{kind}.*cached keys wrong"):
        DrafterConfig.of(record, DrafterSettings())


def test_rope_on_part_of_a_head_is_refused(record):
    record.text_config["partial_rotary_factor"] = 0.25
    with pytest.raises(SettingsError, match="part of each head"):
        DrafterConfig.of(record, DrafterSettings())


def test_another_activation_is_refused(record):
    record.text_config["hidden_act"] = "gelu"
    with pytest.raises(SettingsError, match="hidden_act is 'gelu'"):
        DrafterConfig.of(record, DrafterSettings())


def test_default_rope_frequencies_are_powers_of_theta(make_config):
    frequencies, scaling = inverse_frequencies(make_config(head_dim=4))
    assert frequencies.tolist() == pytest.approx([1.0, 0.01])  # 10000^0, 10000^(-2/4)
    assert scaling == 1.0


def test_linear_rope_divides_the_frequencies_by_its_factor(make_config):
    plain, _ = inverse_frequencies(make_config())
    scaled, _ = inverse_frequencies(make_config(rope={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}))
    assert torch.allclose(scaled * 4, plain)


def test_llama3_rope_keeps_high_frequencies_and_divides_low_ones(make_config):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    plain, _ = inverse_frequencies(make_config(head_dim=8))
    scaled, _ = inverse_frequencies(make_config(head_dim=8, rope=rope))
    assert scaled[0] == plain[0]
    assert scaled[-1] * 8 == pytest.approx(float(plain[-1]))


def test_a_target_config_without_a_needed_field_is_refused_by_name(record):
    del record.text_config["intermediate_size"]
    with pytest.raises(SettingsError, match="tiny: its config has no 'intermediate_size'"):
        DrafterConfig.of(record, DrafterSettings())
