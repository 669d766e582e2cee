"""DSpark with its heads off, which is DFlash: what it drafts, and how it is stored for engines that know heads only."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.decoding.drafting import proposable
from dspark.drafters.base import Drafter
from dspark.drafters.checkpoint import (
    NEUTRAL_RANK,
    read_checkpoint,
    served_form,
    write_deepspec,
    write_training_checkpoint,
    write_union,
)
from dspark.drafters.kinds import build_drafter, require_dspark
from dspark.drafters.reduced import read_trainable
from dspark.errors import IntegrityError, SettingsError, StageError
from dspark.io.digest import digest_file

HEADLESS = {"markov_type": "none", "markov_rank": 0, "confidence": False}
ANCHORS = torch.tensor([8, 31])


def hidden(drafter):
    features = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(2))
    cache = drafter.new_cache(2, 7)
    drafter.extend(cache, features, torch.tensor([7, 4]))
    return drafter.block_from_cache(ANCHORS, cache)


@torch.no_grad()
def logits(drafter):
    """Draft logits of one block per row along the greedy chain, [2, gamma, Vd]."""
    states, rows, previous = hidden(drafter), [], ANCHORS
    base, chain = drafter.base_logits(states), drafter.chain()
    for slot in range(drafter.config.gamma):
        rows.append(base[:, slot] + chain.bias(previous, states[:, slot]))
        previous = drafter.to_target_ids(rows[-1].argmax(-1))
    return torch.stack(rows, 1)


@pytest.fixture
def whole_head(make_drafter):
    return make_drafter().head


def test_it_is_the_backbone_of_dspark_and_nothing_else(make_config, make_drafter):
    """From one seed both have the same backbone; the logits are the LM head's, and no confidence is stated."""
    full = make_drafter()
    headless = build_drafter(make_config(**HEADLESS), full.embedding, full.head, seed=1).eval()
    untouched = build_drafter(make_config(), full.embedding, full.head, seed=1).state_dict()
    assert {name for name in untouched if "_head." not in name} == set(headless.state_dict())
    assert all(torch.equal(value, untouched[name]) for name, value in headless.state_dict().items())
    states = hidden(headless)
    assert torch.allclose(logits(headless), states @ full.head.T, atol=1e-5)
    assert headless.confidence_logits(states, ANCHORS.unsqueeze(1).expand(2, 4)) is None


def test_a_sequential_head_may_stand_without_a_confidence_head(make_config, make_drafter):
    full = make_drafter()
    drafter = build_drafter(make_config(confidence=False), full.embedding, full.head)
    assert not any("confidence" in name for name in drafter.state_dict())
    weights = {name: value for name, value in full.state_dict().items() if "confidence" not in name}
    drafter.load_state_dict(weights)
    assert torch.allclose(logits(drafter), logits(full), atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"markov_type": "none", "markov_rank": 4, "confidence": False}, "markov_rank 4 does not go with .* 'none'"),
        ({"markov_rank": 0, "confidence": False}, "markov_rank 0 does not go with .* 'vanilla'"),
        ({"markov_rank": 1}, "markov_rank 1"),
        ({"markov_type": "none", "markov_rank": 0}, "a confidence head reads the sequential head"),
    ],
)
def test_heads_that_do_not_go_together_are_refused(make_config, changes, reason):
    with pytest.raises(ValueError, match=reason):
        make_config(**changes)


def test_geometries_name_the_family_and_a_rank_where_there_is_one(make_config):
    """Costs are kept by geometry, so drafters that cost differently must not share one."""
    assert make_config().geometry == "dspark-g4-l2-r4-v40"
    assert make_config(markov_type="rnn").geometry == "dspark-rnn-g4-l2-r4-v40"
    assert make_config(**HEADLESS, draft_vocab_size=10).geometry == "dflash-g4-l2-v10"


@pytest.mark.parametrize("reduced", [None, 10])
def test_engines_are_given_a_neutral_head_that_changes_no_logit(tmp_path, make_drafter, record, whole_head, reduced):
    drafter = make_drafter(**HEADLESS, draft_vocab_size=reduced)
    write_union(tmp_path, drafter, record, dtype="float32")
    union = read_checkpoint(tmp_path, drafter.embedding, whole_head, record=record)
    assert (union.config.markov_type, union.config.markov_rank, union.config.confidence) == ("vanilla", 16, False)
    columns = drafter.draft_token_ids if reduced else torch.arange(40)
    assert torch.allclose(logits(union)[..., columns], logits(drafter), atol=1e-5)
    outside = torch.ones(40, dtype=torch.bool)
    outside[columns] = False
    assert (logits(union)[..., outside] < -900).all()
    # What drafts from the union leaves all of it out again.
    lean = proposable(union)
    assert lean.config == drafter.config and torch.allclose(logits(lean), logits(drafter), atol=1e-5)


def test_the_union_config_is_that_of_a_dspark_drafter_without_confidences(tmp_path, make_drafter, record):
    """engine-formats.md: SGLang needs a rank above 0; llama.cpp and vLLM must be told that there is no confidence."""
    write_union(tmp_path, make_drafter(**HEADLESS), record)
    config = json.loads((tmp_path / "config.json").read_text())
    found = {key: config[key] for key in ("markov_rank", "markov_head_type", "sample_from_anchor")}
    assert found == {"markov_rank": NEUTRAL_RANK, "markov_head_type": "vanilla", "sample_from_anchor": True}
    assert config["enable_confidence_head"] is False and config["confidence_head_with_markov"] is False
    assert (config["dspark"]["markov_type"], config["dspark"]["kind"]) == ("none", "dspark")
    tensors = load_file(tmp_path / "model.safetensors")
    assert not any("confidence" in name for name in tensors)
    assert tensors["markov_head.markov_w1.weight"].shape == tensors["markov_head.markov_w2.weight"].shape == (40, 16)


@pytest.mark.parametrize("reduced", [None, 10])
@pytest.mark.parametrize("write", [write_union, write_training_checkpoint])
def test_what_was_trained_comes_back_without_the_neutral_head(
    tmp_path, make_drafter, record, whole_head, reduced, write
):
    drafter = make_drafter(**HEADLESS, draft_vocab_size=reduced)
    write(tmp_path, drafter, record, **({"dtype": "float32"} if write is write_union else {}))
    again = read_trainable(tmp_path, drafter.embedding, whole_head, record=record)
    assert again.config == drafter.config and torch.equal(again.draft_token_ids, drafter.draft_token_ids)
    before, after = drafter.state_dict(), again.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("reduced", [None, 10])
def test_a_neutral_head_that_says_something_is_refused(tmp_path, make_drafter, record, whole_head, reduced):
    drafter = make_drafter(**HEADLESS, draft_vocab_size=reduced)
    write_union(tmp_path, drafter, record, dtype="float32")
    tensors = load_file(tmp_path / "model.safetensors")
    row = int(drafter.draft_token_ids[0]) if reduced else 0
    tensors["markov_head.markov_w2.weight"][row, 3] = 0.5
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["dspark"]["weights_sha256"] = digest_file(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(IntegrityError, match=r"says that the drafter has no sequential head, .*markov_w2.* holds one"):
        read_trainable(tmp_path, drafter.embedding, whole_head, record=record)


def test_deepspec_is_given_a_drafter_of_rank_0_as_its_own_dflash_has_it(tmp_path, make_drafter, record, whole_head):
    """deepspec.md, 1.4 and 4.2: markov_rank 0, no type, no heads; embedding and head are stored."""
    drafter = make_drafter(**HEADLESS)
    write_deepspec(tmp_path, drafter, record, whole_head, dtype="float32")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["markov_rank"] == 0 and "markov_head_type" not in config
    assert not any(name.startswith(("markov", "confidence")) for name in load_file(tmp_path / "model.safetensors"))
    again = read_checkpoint(tmp_path, drafter.embedding, whole_head, record=record)
    assert again.config == drafter.config and torch.allclose(logits(again), logits(drafter), atol=1e-5)


def test_a_drafter_with_heads_is_served_as_it_is(make_drafter):
    drafter = make_drafter()
    assert served_form(drafter) is drafter and proposable(drafter) is drafter


def test_a_tensor_that_training_never_moved_is_still_found(tmp_path, make_drafter, record):
    """The neutral head is all zeros by design; nothing else may be."""
    drafter = make_drafter(**HEADLESS)
    drafter.fc.weight.zero_()
    with pytest.raises(StageError, match=r"all 0 or all 1: fc\.weight$"):
        write_union(tmp_path, drafter, record)


def test_what_knows_only_blocks_names_the_kind_that_it_cannot_take(make_config, make_drafter):
    class Other(Drafter):
        """A drafter of another kind."""

    full = make_drafter()
    other = Other(make_config(), full.embedding, full.head)
    with pytest.raises(SettingsError, match="exporting works on drafters of kind dspark"):
        require_dspark(other, "exporting")
    assert require_dspark(full, "exporting") is full


def test_training_may_start_from_a_drafter_that_only_lacks_heads(make_config):
    """Before anything is computed, by the configs alone: `dspark run` refuses such builds at once."""
    bare, silent, full = make_config(**HEADLESS), make_config(confidence=False), make_config()
    for earlier, config in ((bare, full), (bare, silent), (silent, full), (bare, bare), (full, full)):
        config.require_startable(earlier, "here")
    for earlier, config in ((full, bare), (silent, bare), (full, silent)):
        with pytest.raises(SettingsError, match="here: training cannot start from these weights"):
            config.require_startable(earlier, "here")
    with pytest.raises(SettingsError, match=r"weights: gamma is 3, here 4$"):
        full.require_startable(make_config(**HEADLESS, gamma=3), "here")
