"""Weights that are not those of their config, or no numbers: refused by name, before anything is made of them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.config.models import TargetSpec
from dspark.errors import Interrupted, PreflightError
from dspark.targets.catalogue import add_target, list_targets
from dspark.targets.layout import read_config
from dspark.targets.materialise import materialise
from dspark.targets.weights import check_finite, check_weights


def change(folder, edit):
    """Save the model's weights again, edited in place."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def spec_of(folder, dtype="float32"):
    return TargetSpec.model_validate(
        {"name": "mine", "source": {"kind": "folder", "path": str(folder)}, "dtype": dtype}
    )


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "olmo2", "gemma4_unified"])
def test_what_transformers_saves_is_taken_whatever_the_family(make_folder, tmp_path, family):
    folder = make_folder(family=family)
    check_weights(folder, read_config(folder))
    check_finite(folder, "float32")


@pytest.mark.parametrize(("declared", "said"), [(8, "is 8, the weights have 5"), (4, "is 4, the weights have 5")])
def test_a_config_of_other_depth_is_refused_when_the_target_is_added(make_folder, tmp_path, declared, said):
    """transformers would make up three layers, or leave the last one out, and say no more than a warning."""
    with pytest.raises(PreflightError, match=f"num_hidden_layers {said} layers"):
        add_target(tmp_path / "targets", "mine", make_folder(num_hidden_layers=declared, layer_types=None))
    assert list_targets(tmp_path / "targets") == []


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.down_proj.weight", "model.layers.0.self_attn.q_norm.weight", "model.norm.weight"]
)
@pytest.mark.parametrize("verb", ["add", "fetch"])
def test_a_tensor_that_is_missing_is_named(make_folder, tmp_path, name, verb):
    folder = change(make_folder(), lambda tensors: tensors.pop(name))
    short = name.split(".", 3)[3] if "layers" in name else name
    with pytest.raises(PreflightError, match=short) as caught:
        if verb == "add":
            add_target(tmp_path, "mine", folder)
        else:
            materialise(spec_of(folder), root=tmp_path / "workspace")
    assert "config.json" in caught.value.message
    assert caught.value.hint
    assert not (tmp_path / "workspace/targets").exists()


def test_a_head_that_is_not_there_is_missed_only_where_it_is_not_tied(make_folder, tmp_path):
    folder = change(make_folder(), lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(PreflightError, match=r"there is no lm_head\.weight"):
        check_weights(folder, read_config(folder))
    check_weights(folder, read_config(folder) | {"tie_word_embeddings": True})


def test_a_layer_of_another_width_is_refused_with_both_counts(make_folder, tmp_path):
    """A layer of the config: 3 x 32 x 48 in the MLP; what is stored there has 40 for 48, so 768 weights fewer."""

    def narrow(tensors):
        for name in ("gate_proj", "up_proj"):
            tensors[f"model.layers.1.mlp.{name}.weight"] = torch.zeros(40, 32)
        tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(32, 40)

    whole = 3 * 32 * 48 + 32 * (32 + 16 + 16 + 32) + 2 * 32 + 2 * 8
    with pytest.raises(
        PreflightError, match=f"layer 1 has {whole - 3 * 32 * 8} weights, by config.json it has {whole}"
    ):
        add_target(tmp_path, "mine", change(make_folder(), narrow))


def test_what_old_writers_store_beside_the_weights_is_let_be(make_folder, tmp_path):
    def old(tensors):
        tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    add_target(tmp_path, "mine", change(make_folder(), old))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_number_that_is_none_is_enough_and_its_tensor_is_named(make_folder, tmp_path, value):
    def spoil(tensors):
        tensors["model.layers.2.mlp.down_proj.weight"][5, 7] = value

    folder = change(make_folder(), spoil)
    with pytest.raises(PreflightError, match=r"layers\.2\.mlp\.down_proj\.weight is not finite"):
        materialise(spec_of(folder), root=tmp_path)
    assert not (tmp_path / "targets").exists()
    assert not (tmp_path / ".dspark/store").exists()


def test_a_weight_is_judged_in_the_dtype_that_it_is_loaded_in(make_folder, tmp_path):
    """The largest float16 is 65504."""

    def enlarge(tensors):
        tensors["lm_head.weight"][0, 0] = 70000.0

    folder = change(make_folder(), enlarge)
    check_finite(folder, "float32")
    check_finite(folder, "bfloat16")
    with pytest.raises(PreflightError, match=r"lm_head\.weight is too large for float16") as caught:
        check_finite(folder, "float16")
    assert "bfloat16" in caught.value.hint


def test_the_pass_over_the_weights_can_be_stopped(make_folder):
    def stop():
        raise Interrupted("stop")

    with pytest.raises(Interrupted):
        check_finite(make_folder(), "float32", stop)
