"""The chain of EAGLE-3: what it sees, and that drafting with a cache is what was trained. Its numbers are held against
DeepSpec's own in tests/unit/test_deepspec.py."""

import json

import pytest
import torch
from safetensors.torch import load_file

from dspark.drafters.checkpoint import read_checkpoint, write_deepspec, write_training_checkpoint, write_union
from dspark.drafters.eagle3 import Eagle3Drafter
from dspark.errors import IntegrityError, SettingsError

ROWS, LENGTH, GAMMA = 2, 11, 4
ANCHORS = torch.tensor([[2, 5, 9], [1, 6, 10]])


@pytest.fixture
def make_eagle3(make_config):
    """Drafters whose every parameter is random, norms included, so that each one shows in the output."""

    def make(**changes):
        config = make_config(kind="eagle3", layers=1, markov_type="none", markov_rank=0, confidence=False, **changes)
        generator = torch.Generator().manual_seed(3)
        ends = (torch.randn(40, 32, generator=generator) for _ in range(2))
        drafter = Eagle3Drafter(config, *ends, seed=1)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
        return drafter.requires_grad_(False).eval()

    return make


def inputs():
    generator = torch.Generator().manual_seed(7)
    return (
        torch.randn(ROWS, LENGTH, 64, generator=generator),
        torch.randint(6, 40, (ROWS, LENGTH + GAMMA), generator=generator),
    )


def hidden(drafter, features, ids):
    """h of every step of every chain, [B, N, K, d]."""
    projected = drafter.project(features)
    context = drafter.pairs(projected, ids[:, 1 : LENGTH + 1])
    start = projected.gather(1, (ANCHORS - 1).unsqueeze(-1).expand(-1, -1, projected.shape[-1]))
    chains = drafter.chains(context, start, ANCHORS)
    return torch.stack([drafter.step(chains, ids.gather(1, ANCHORS + j)) for j in range(GAMMA)], 2)


def test_no_chain_sees_a_position_at_or_behind_its_anchor(make_eagle3):
    drafter = make_eagle3()
    features, ids = inputs()
    before = hidden(drafter, features, ids)
    changed = features.clone()
    changed[:, 5:] += 10.0
    after = hidden(drafter, changed, ids)
    assert torch.equal(before[0, :2], after[0, :2])  # anchors 2 and 5 of row 0
    assert torch.equal(before[1, :1], after[1, :1])  # anchor 1 of row 1
    for row, chain in ((0, 2), (1, 1), (1, 2)):
        assert not torch.isclose(before[row, chain], after[row, chain]).all()


def test_a_step_sees_the_tokens_up_to_its_own(make_eagle3):
    """Step j reads tokens 1 .. p + j: token 0 is nobody's, token 7 is seen from step 7 - p on, by that chain alone."""
    drafter = make_eagle3()
    features, ids = inputs()
    before = hidden(drafter, features, ids)
    for position, unseen in ((0, lambda p, j: True), (7, lambda p, j: p + j < 7)):
        changed = ids.clone()
        changed[:, position] = 5
        after = hidden(drafter, features, changed)
        for row in range(ROWS):
            for chain, p in enumerate(ANCHORS[row].tolist()):
                for j in range(GAMMA):
                    same = torch.equal(before[row, chain, j], after[row, chain, j])
                    assert same == unseen(p, j), (position, row, p, j)


def test_a_chain_sees_its_own_earlier_steps(make_eagle3):
    """Forgetting them moves the next step: the anchor's pair and the drafted tokens are keys of the chain."""
    drafter = make_eagle3()
    features, ids = inputs()
    projected = drafter.project(features)
    start = projected.gather(1, (ANCHORS - 1).unsqueeze(-1).expand(-1, -1, projected.shape[-1]))
    chains = drafter.chains(drafter.pairs(projected, ids[:, 1 : LENGTH + 1]), start, ANCHORS)
    drafter.step(chains, ids.gather(1, ANCHORS))
    chains.own.clear()
    forgotten = drafter.step(chains, ids.gather(1, ANCHORS + 1))
    assert (forgotten - hidden(drafter, features, ids)[:, :, 1]).abs().max() > 1e-2


@pytest.mark.parametrize("cuts", [(11,), (1, 11), (4, 6, 11), tuple(range(1, 12))])
def test_chains_from_a_cache_equal_the_one_shot_form(make_eagle3, cuts):
    """Whatever the context came in: whole, or in pieces that each leave one pair waiting for its token."""
    drafter = make_eagle3()
    features, ids = inputs()
    whole = hidden(drafter, features, ids)
    cache, known = drafter.new_cache(ROWS, 32), 0
    for cut in cuts:
        # Row 0 stops at position 9, row 1 goes on to 10; what lies behind is written and not kept.
        kept = torch.tensor([min(cut, 9) - min(known, 9), min(cut, 10) - min(known, 10)])
        if not kept.any():
            break
        drafter.extend(cache, features[:, known:cut], ids[:, known:cut], kept)
        known = cut
    chains = drafter.chains_from_cache(cache)
    for j in range(GAMMA):
        step = drafter.step(chains, torch.stack([ids[0, 9 + j], ids[1, 10 + j]])[:, None])[:, 0]
        torch.testing.assert_close(step, whole[:, 2, j], atol=1e-5, rtol=1e-5)


def test_rejected_positions_leave_nothing_behind(make_eagle3):
    drafter = make_eagle3()
    features, ids = inputs()

    def drafted(behind):
        cache = drafter.new_cache(ROWS, 32)
        dirty = features.clone()
        dirty[0, 3:6], dirty[1, 5:6] = behind, behind
        drafter.extend(cache, dirty[:, :6], ids[:, :6], torch.tensor([3, 5]))
        rest = torch.stack([features[0, 3:6], features[1, 5:8]]), torch.stack([ids[0, 3:6], ids[1, 5:8]])
        drafter.extend(cache, *rest, torch.tensor([2, 1]))
        chains = drafter.chains_from_cache(cache)
        return drafter.step(chains, torch.tensor([[ids[0, 5]], [ids[1, 6]]]))

    assert torch.equal(drafted(0.0), drafted(100.0))


def test_a_chain_needs_something_to_start_from(make_eagle3):
    drafter = make_eagle3()
    with pytest.raises(RuntimeError, match="not called"):
        drafter.chains_from_cache(drafter.new_cache(1, 8))
    cache = drafter.new_cache(ROWS, 4)
    features, ids = inputs()
    with pytest.raises(SettingsError, match="holds 4"):
        drafter.extend(cache, features, ids[:, :LENGTH], torch.tensor([6, 6]))


def test_parameters_are_named_and_shaped_as_deepspec_names_them(make_eagle3):
    """deepspec.md, section 4.1, with d 32, m 2, h 4, kv 2, hd 6, I 48: q, k and v read 2d."""
    shapes = {name: tuple(value.shape) for name, value in make_eagle3().named_parameters()}
    assert shapes == {
        "fc.weight": (32, 64),
        "norm.weight": (32,),
        "layers.0.input_layernorm.weight": (32,),
        "layers.0.hidden_norm.weight": (32,),
        "layers.0.post_attention_layernorm.weight": (32,),
        "layers.0.self_attn.q_proj.weight": (24, 64),
        "layers.0.self_attn.k_proj.weight": (12, 64),
        "layers.0.self_attn.v_proj.weight": (12, 64),
        "layers.0.self_attn.o_proj.weight": (32, 24),
        "layers.0.self_attn.q_norm.weight": (6,),
        "layers.0.self_attn.k_norm.weight": (6,),
        "layers.0.mlp.gate_proj.weight": (48, 32),
        "layers.0.mlp.up_proj.weight": (48, 32),
        "layers.0.mlp.down_proj.weight": (32, 48),
    }


@pytest.mark.parametrize(
    "changes",
    [{"layers": 2}, {"markov_type": "vanilla", "markov_rank": 4}, {"draft_vocab_size": 10}],
)
def test_what_eagle3_does_not_have_is_refused(make_config, changes):
    fields = {"kind": "eagle3", "layers": 1, "markov_type": "none", "markov_rank": 0, "confidence": False}
    with pytest.raises(ValueError, match="eagle3"):
        make_config(**fields | changes)


@pytest.mark.parametrize("dialect", ["training", "union", "deepspec"])
def test_a_checkpoint_gives_the_same_drafter_back(tmp_path, make_eagle3, record, dialect):
    drafter = make_eagle3()
    if dialect == "training":
        write_training_checkpoint(tmp_path, drafter, record)
    elif dialect == "union":
        write_union(tmp_path, drafter, record, dtype="float32")
    else:
        write_deepspec(tmp_path, drafter, record, drafter.head, dtype="float32")
    found = read_checkpoint(tmp_path, drafter.embedding, drafter.head, record=record)
    assert found.config == drafter.config
    features, ids = inputs()
    assert torch.equal(hidden(found, features, ids), hidden(drafter, features, ids))


def test_what_readers_are_told_of_a_chain(tmp_path, make_eagle3, record):
    """vLLM reads layer inputs (k + 1), how many are tapped, and that a state is handed on un-normed; a chain is causal.

    What it shares with its target is left out.
    """
    drafter = make_eagle3()
    write_union(tmp_path, drafter, record)
    config = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "architectures": ["Eagle3Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "target_layer_ids": [1, 3],
        "eagle_aux_hidden_state_layer_ids": [2, 4],
        "num_aux_hidden_states": 2,
        "is_causal": True,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "norm_output": False,
        "draft_vocab_size": 40,
        "vocab_size": 40,
        "speculators_model_type": "eagle3",
        "enable_confidence_head": False,
    }
    assert {key: config[key] for key in expected} == expected
    assert config["speculators_config"]["algorithm"] == "eagle3"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert "sample_from_anchor" not in config
    assert set(load_file(tmp_path / "model.safetensors")) == set(drafter.state_dict())


def test_the_dialect_of_deepspecs_evaluator_has_what_its_model_insists_on(tmp_path, make_eagle3, record):
    drafter = make_eagle3()
    write_deepspec(tmp_path, drafter, record, drafter.head)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3Eagle3Model"]
    assert (config["ttt_length"], config["draft_num_hidden_layers"]) == (4, 1) and "step_loss_decay" in config
    assert {"embed_tokens.weight", "lm_head.weight"} < set(load_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_causal": False}, "is_causal is False, not True"),
        ({"norm_before_residual": True}, "norm_before_residual is True, not False"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3]}, r"must be target_layer_ids \+ 1"),
        ({"architectures": ["Qwen3DSparkModel"]}, "not \\['Eagle3Qwen3ForCausalLM'\\]"),
    ],
)
def test_another_chain_than_ours_is_refused(tmp_path, make_eagle3, record, change, message):
    drafter = make_eagle3()
    write_union(tmp_path, drafter, record)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(IntegrityError, match=message):
        read_checkpoint(tmp_path, drafter.embedding, drafter.head)


@pytest.mark.parametrize("kind", ["medusa", 3, ["eagle3"], None])
def test_a_kind_of_the_future_is_refused(tmp_path, make_eagle3, record, kind):
    drafter = make_eagle3()
    write_union(tmp_path, drafter, record)
    config = json.loads((tmp_path / "config.json").read_text())
    config["dspark"]["kind"] = kind
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(IntegrityError, match="which this version does not know"):
        read_checkpoint(tmp_path, drafter.embedding, drafter.head)
