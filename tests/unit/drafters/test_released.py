"""Released drafters read for a build: exactly what was stored, or refused with everything that is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).parent))  # foreign_layouts.py

from foreign_layouts import LAYOUTS, chain, flat, speculators, write

from dspark.config.models import DrafterSettings, MarkovSettings
from dspark.drafters.checkpoint import read_checkpoint, write_union
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.fitting import read_released_config, released_config, require_declared, settings_of
from dspark.drafters.released import foreign_ends, read_released
from dspark.errors import DataError, IntegrityError, SettingsError


@pytest.fixture
def shaped(record: Any) -> Any:
    """The target's record with heads as the drafters of these tests have them."""
    return SimpleNamespace(**{**vars(record), "text_config": record.text_config | {"head_dim": 6}})


def read(folder: Path, drafter: Any, record: Any) -> Any:
    return read_released(folder, record, drafter.embedding, drafter.head)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_is_what_was_released_bit_by_bit(
    make_drafter: Any, shaped: Any, tmp_path: Path, layout: str, dtype: torch.dtype
) -> None:
    drafter = make_drafter()
    stored = {name: value.to(dtype) for name, value in drafter.state_dict().items()}
    found = read(write(tmp_path / "d", LAYOUTS[layout](drafter), stored), drafter, shaped)
    assert found.config == drafter.config and not found.training
    assert found.state_dict().keys() == stored.keys()
    for name, value in found.state_dict().items():
        assert value.dtype == torch.float32 and torch.equal(value.to(dtype), stored[name])


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_the_other_heads_are_taken_as_they_are(make_drafter: Any, shaped: Any, tmp_path: Path, kind: str) -> None:
    drafter = make_drafter(markov_type=kind)
    found = read(write(tmp_path / "d", flat(drafter), drafter.state_dict()), drafter, shaped)
    assert all(torch.equal(value, drafter.state_dict()[name]) for name, value in found.state_dict().items())
    assert settings_of(found.config, "x") == DrafterSettings(
        gamma=4, layers=2, markov=MarkovSettings(type=kind, rank=4)
    )


@pytest.mark.parametrize("reduced", [None, 12])
def test_a_drafter_folder_of_a_package_is_read_as_it_was_trained(
    make_drafter: Any, shaped: Any, tmp_path: Path, reduced: int | None
) -> None:
    drafter = make_drafter(draft_vocab_size=reduced)
    whole = torch.randn(40, 32, generator=torch.Generator().manual_seed(9))
    if reduced is not None:
        whole[drafter.draft_token_ids] = drafter.head
    write_union(tmp_path / "d", drafter, shaped, dtype="float32")
    found = read_released(tmp_path / "d", shaped, drafter.embedding, drafter.head if reduced is None else whole)
    assert found.config == drafter.config and torch.equal(found.draft_token_ids, drafter.draft_token_ids)
    assert all(torch.equal(value, drafter.state_dict()[name]) for name, value in found.state_dict().items())
    other = SimpleNamespace(**{**vars(shaped), "embedding_digest": "0" * 64})
    with pytest.raises(IntegrityError, match="belongs to org/tiny"):
        read_released(tmp_path / "d", other, drafter.embedding, whole)


@pytest.mark.parametrize(
    ("change", "reason", "hint"),
    [
        ({"hidden_size": 64}, "its hidden size is 64, that of target tiny is 32", "name the target"),
        ({"vocab_size": 41}, "its vocabulary is 41, that of target tiny is 40", "name the target"),
        ({"num_target_layers": 36}, "its target has 36 layers, target tiny has 6", "name the target"),
        ({"target_layer_ids": [0, 2]}, r"reads the outputs of layers \[0, 2\], the taps are \[1, 3\]", "taps: [0, 2]"),
        ({"mask_token_id": 6}, "its mask token is 6, the target's is 5", "mask_token_id: 6"),
        ({"intermediate_size": 64}, "intermediate_size is 64, not 48", "cost could not be profiled"),
        ({"attention_bias": True}, "attention_bias is True, not False", "cost could not be profiled"),
        ({"block_size": 65}, "gamma: .*less than or equal to 64", ""),
        ({"architectures": ["Gemma4Eagle3Model"]}, "no drafter that is known here", "what can be imported"),
        ({"architectures": ["Gemma4DSparkModel"]}, "model_type is 'qwen3', .* made of Gemma 4's layers", "published"),
        ({"model_type": "gemma4_text"}, "model_type is 'gemma4_text', .* made of Qwen3's layers", "published"),
        ({"final_logit_softcapping": 30.0}, "Qwen3 layers have .* no soft cap", ""),
        ({"rope_scaling": {"type": "dynamic"}}, "RoPE type 'dynamic'", ""),
        ({"sample_from_anchor": False}, "its first slot drafts nothing", ""),
    ],
)
def test_a_drafter_of_another_target_is_refused_by_its_config(
    make_drafter: Any, shaped: Any, change: dict[str, Any], reason: str, hint: str
) -> None:
    with pytest.raises(DataError, match=reason) as refused:
        released_config(flat(make_drafter()) | change, shaped, "config.json")
    assert hint in refused.value.hint and refused.value.message.startswith("config.json: ")


def test_taps_and_mask_token_are_said_together(make_drafter: Any, shaped: Any) -> None:
    value = flat(make_drafter()) | {"target_layer_ids": [0, 2], "mask_token_id": 6}
    with pytest.raises(DataError, match=r"layers.*mask token") as refused:
        released_config(value, shaped, "config.json")
    assert refused.value.hint.endswith("taps: [0, 2], mask_token_id: 6")
    assert "pipeline/targets/tiny.yaml" in refused.value.hint


def test_a_target_with_its_drafter_inside_is_sent_to_its_engines(shaped: Any) -> None:
    with pytest.raises(DataError, match="only the engines that serve it can run") as refused:
        released_config({"architectures": ["DeepseekV4ForCausalLM"]}, shaped, "config.json")
    assert "--out DIR" in refused.value.hint


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"norm.weight": None}, "norm.weight is missing"),
        ({"fc.weight": torch.full((32, 64), float("nan"))}, "fc.weight is not finite"),
        ({"extra": torch.zeros(2)}, "extra is unexpected"),
        ({"fc.weight": torch.ones(32, 63)}, r"fc.weight is \[32, 63\], expected \[32, 64\]"),
        ({"norm.weight": torch.ones(32)}, "all 0 or all 1, as if training had never moved them: norm.weight"),
        ({"confidence_head.proj.bias": None}, "confidence_head.proj.bias is missing"),
        ({"confidence_head.proj.weight": None}, "confidence_head.proj.weight is missing"),
    ],
)
def test_tensors_that_no_build_could_go_on_with_are_refused(
    make_drafter: Any, shaped: Any, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    drafter = make_drafter()
    tensors = {name: value for name, value in (drafter.state_dict() | change).items() if value is not None}
    with pytest.raises(DataError, match=reason):
        read(write(tmp_path / "d", flat(drafter), tensors), drafter, shaped)


def test_a_reduced_vocabulary_of_others_gets_a_constant_channel_and_says_the_same(
    make_drafter: Any, shaped: Any, tmp_path: Path
) -> None:
    """A rank of 4 becomes 8. What engines load then has the whole vocabulary, and proposes the same tokens."""
    drafter = make_drafter(draft_vocab_size=12)
    drafter.markov_head.markov_w1.weight[:, 0] = torch.randn(40, generator=torch.Generator().manual_seed(4))
    ids = drafter.draft_token_ids
    whole = torch.randn(40, 32, generator=torch.Generator().manual_seed(9))
    whole[ids] = drafter.head
    value = speculators(drafter) | {"draft_vocab_size": 12}
    tensors = drafter.state_dict() | {"lm_head.weight": whole[ids], "d2t": ids - torch.arange(12)}
    found = read_released(write(tmp_path / "d", value, tensors), shaped, drafter.embedding, whole)
    assert found.config == drafter.config.model_copy(update={"markov_rank": 8})
    assert released_config(value, shaped, "x") == found.config and settings_of(found.config, "x").markov.rank == 8
    assert torch.equal(found.draft_token_ids, ids) and found.markov_head.constant_channel
    changed = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight")
    stored = drafter.state_dict()
    assert all(torch.equal(t, stored[name]) for name, t in found.state_dict().items() if name not in changed)
    assert torch.equal(found.markov_head.markov_w1.weight[:, 4:], stored[changed[0]])
    assert torch.equal(found.markov_head.markov_w2.weight[:, 4:], stored[changed[1]])

    def said(one: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, previous = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)), torch.arange(5)
        return one.base_logits(hidden) + one.chain().bias(previous, hidden), one.confidence_logits(hidden, previous)

    for mine, theirs in zip(said(found), said(drafter), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    write_union(tmp_path / "union", found, shaped, dtype="float32")
    served = read_checkpoint(tmp_path / "union", drafter.embedding, whole, record=shaped)
    assert torch.equal(said(served)[0].argmax(-1), ids[said(drafter)[0].argmax(-1)])


DEEPSPEC = Path(__file__).parents[2] / "data" / "deepspec"


@pytest.mark.parametrize("name", ["dspark", "dspark-gated", "dspark-rnn", "dflash", "eagle3"])
def test_what_deepspec_itself_wrote_is_read_as_the_kind_that_it_is(shaped: Any, tmp_path: Path, name: str) -> None:
    """Its own `config.json` and tensors; what such drafters compute is held against it in test_deepspec.py."""
    with safe_open(DEEPSPEC / f"{name}.safetensors", "pt") as file:
        value = json.loads(file.metadata()["config"])
        tensors = {
            key.removeprefix("weights/"): file.get_tensor(key)
            for key in file.keys()  # noqa: SIM118
            if key.startswith("weights/")
        }
    mask = value.get("mask_token_id", 9)  # a chain has none
    target = {
        "hidden_size": 16, "vocab_physical": 24, "num_layers": 8, "max_position": 64, "mask_token_id": mask,
        "taps": tuple(value["target_layer_ids"]),
        "text_config": {
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 24,
            "rms_norm_eps": 1e-5,
        },
    }  # fmt: skip
    record = SimpleNamespace(**vars(shaped) | target)
    ends = tensors["embed_tokens.weight"].float(), tensors["lm_head.weight"].float()
    folder = write(tmp_path / "d", value, tensors)
    found = read_released(folder, record, *ends)
    own = {key: tensor for key, tensor in tensors.items() if key not in ("embed_tokens.weight", "lm_head.weight")}
    assert found.state_dict().keys() == own.keys() and foreign_ends(folder, *ends) == []
    assert all(torch.equal(tensor, own[key].float()) for key, tensor in found.state_dict().items())
    settings = settings_of(found.config, "x")
    assert (settings.family, settings.gamma, found.config.mask_token_id) == (name, 4, mask)
    assert settings.confidence is (name not in ("dflash", "eagle3"))
    assert settings.layers == value["num_hidden_layers"]


def test_without_a_confidence_head_there_is_none_whatever_the_file_says(
    make_drafter: Any, shaped: Any, tmp_path: Path
) -> None:
    drafter = make_drafter(confidence=False)
    value = flat(drafter)
    assert value["enable_confidence_head"] is True
    found = read(write(tmp_path / "d", value, drafter.state_dict()), drafter, shaped)
    assert found.config == drafter.config and settings_of(found.config, "x").confidence is False
    assert read_released_config(tmp_path / "d", shaped) == drafter.config


def test_a_confidence_head_needs_a_sequential_one_to_read(make_drafter: Any, shaped: Any, tmp_path: Path) -> None:
    drafter = make_drafter(markov_type="none", markov_rank=0, confidence=False)
    head = {"confidence_head.proj.weight": torch.randn(1, 32), "confidence_head.proj.bias": torch.randn(1)}
    with pytest.raises(DataError, match="confidence head without the sequential head"):
        read(write(tmp_path / "d", flat(drafter), drafter.state_dict() | head), drafter, shaped)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"norm_before_fc": True}, "norm_before_fc is set"),
        ({"layer_types": ["sliding_attention"]}, "chains attend through a window"),
        ({"num_hidden_layers": 2}, "kind eagle3 has one layer"),
        ({"draft_vocab_size": 12}, "kind eagle3 has the whole vocabulary"),
    ],
)
def test_other_eagle3_drafters_are_refused_by_their_config(
    make_config: Any, shaped: Any, change: dict[str, Any], reason: str
) -> None:
    config = make_config(kind="eagle3", layers=1, markov_type="none", markov_rank=0, confidence=False)
    value = chain(SimpleNamespace(config=config))
    assert released_config(value, shaped, "x") == config
    with pytest.raises(DataError, match=reason):
        released_config(value | change, shaped, "config.json")


@pytest.mark.parametrize("heads", [{"markov_type": "none", "markov_rank": 0}, {}])
def test_a_reduced_vocabulary_without_a_confidence_head_says_the_same(
    make_drafter: Any, shaped: Any, tmp_path: Path, heads: dict[str, Any]
) -> None:
    """A Markov head gets its constant channel; without one, what stands for it in the union has it anyhow."""
    drafter = make_drafter(draft_vocab_size=12, confidence=False, **heads)
    ids = drafter.draft_token_ids
    whole = torch.randn(40, 32, generator=torch.Generator().manual_seed(9))
    whole[ids] = drafter.head
    tensors = drafter.state_dict() | {"lm_head.weight": whole[ids], "d2t": ids - torch.arange(12)}
    folder = write(tmp_path / "d", flat(drafter) | {"draft_vocab_size": 12}, tensors)
    found = read_released(folder, shaped, drafter.embedding, whole)
    assert found.config == drafter.config.model_copy(update={"markov_rank": 0 if heads else 8})
    assert torch.equal(found.draft_token_ids, ids)
    write_union(tmp_path / "union", found, shaped, dtype="float32", untrained=True)
    hidden, previous = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)), torch.arange(5)
    served = read_checkpoint(tmp_path / "union", drafter.embedding, whole, record=shaped)
    said = [one.base_logits(hidden) + one.chain().bias(previous, hidden) for one in (drafter, served)]
    if not heads:
        assert torch.equal(said[1].argmax(-1), ids[said[0].argmax(-1)])
    torch.testing.assert_close(said[1][:, ids], said[0], rtol=1e-6, atol=1e-6)


def test_shards_are_read_by_their_index_and_pickles_beside_them_are_not(
    make_drafter: Any, shaped: Any, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    drafter = make_drafter()
    tensors = {name: value.clone() for name, value in drafter.state_dict().items()}
    folder = write(tmp_path / "d", flat(drafter), {})
    (folder / "model.safetensors").unlink()
    halves = {
        "model-00001-of-00002.safetensors": list(tensors)[::2],
        "model-00002-of-00002.safetensors": list(tensors)[1::2],
    }
    for file, names in halves.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    places = {name: file for file, names in halves.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "training_state.rank0.pt").write_bytes(b"a pickle")
    (folder / "other.safetensors").write_bytes(b"no part of it")
    found = read(folder, drafter, shaped)
    assert all(torch.equal(value, tensors[name]) for name, value in found.state_dict().items())
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(DataError, match="model-00002-of-00002"):
        read(folder, drafter, shaped)


def test_matrices_of_another_target_are_noticed(make_drafter: Any, tmp_path: Path) -> None:
    drafter = make_drafter()
    ends = {"embed_tokens.weight": drafter.embedding.bfloat16(), "lm_head.weight": drafter.head.bfloat16()}
    own = write(tmp_path / "own", flat(drafter), drafter.state_dict() | ends)
    assert foreign_ends(own, drafter.embedding, drafter.head) == []
    ends["lm_head.weight"] = ends["lm_head.weight"] + 1
    other = write(tmp_path / "other", flat(drafter), drafter.state_dict() | ends)
    assert foreign_ends(other, drafter.embedding, drafter.head) == ["lm_head.weight"]
    assert (
        foreign_ends(write(tmp_path / "none", flat(drafter), drafter.state_dict()), drafter.embedding, drafter.head)
        == []
    )


def test_a_build_must_describe_the_drafter_that_it_imports(make_config: Any) -> None:
    config = make_config()
    require_declared(config, settings_of(config, "x"), "mine")
    # More tokens than there are means all of them.
    require_declared(
        config, DrafterSettings(gamma=4, layers=2, markov=MarkovSettings(rank=4), draft_vocab_size=99), "mine"
    )
    with pytest.raises(
        SettingsError, match=r"drafter\.gamma is 7, the imported drafter's is 4; drafter\.layers is 5"
    ) as refused:
        require_declared(config, DrafterSettings(draft_vocab_size=12), "mine")
    assert "--set drafter.draft_vocab_size=null" in refused.value.hint and "--set drafter.gamma=4" in refused.value.hint


def test_a_build_says_which_kind_and_heads_it_imports(make_config: Any) -> None:
    config = make_config(kind="eagle3", layers=1, markov_type="none", markov_rank=0, confidence=False)
    require_declared(config, settings_of(config, "x"), "mine")
    with pytest.raises(SettingsError, match=r"drafter\.kind is dspark, the imported drafter's is eagle3") as refused:
        require_declared(config, DrafterSettings(gamma=4, layers=1), "mine")
    assert "--set drafter.kind=eagle3" in refused.value.hint and "--set drafter.confidence=false" in refused.value.hint


def test_our_own_drafter_class_reads_what_the_fixture_made(make_drafter: Any) -> None:
    """The fixtures' drafters are moved off their initial values everywhere, or the tests above would prove little."""
    drafter = make_drafter()
    assert isinstance(drafter, DSparkDrafter)
    assert not [name for name, v in drafter.state_dict().items() if bool((v == 0).all()) or bool((v == 1).all())]


def test_quantised_weights_are_refused_by_their_headers(make_drafter: Any, shaped: Any, tmp_path: Path) -> None:
    drafter = make_drafter()
    tensors = drafter.state_dict() | {"fc.weight": drafter.fc.weight.to(torch.float8_e4m3fn)}
    with pytest.raises(DataError, match="stored as F8_E4M3, only F32, BF16, F16 are read"):
        read(write(tmp_path / "d", flat(drafter), tensors), drafter, shaped)
