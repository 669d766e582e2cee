import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.drafters.checkpoint import (
    UNREACHABLE,
    read_checkpoint,
    union_tensors,
    write_training_checkpoint,
    write_union,
)
from dspark.errors import IntegrityError, SettingsError, StageError
from dspark.io.digest import digest_file

ANCHORS = torch.tensor([8, 31])


@pytest.fixture
def features():
    return torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(2))


def outputs(drafter, features):
    """Draft logits with a greedy chain, chosen target ids and confidence logits of one block per row."""
    cache = drafter.new_cache(2, 7)
    drafter.extend(cache, features.to(drafter.fc.weight.dtype), torch.tensor([7, 4]))
    h = drafter.block_from_cache(ANCHORS, cache)
    chain, base, previous, logits, tokens, confidences = drafter.chain(), drafter.base_logits(h), ANCHORS, [], [], []
    for slot in range(drafter.config.gamma):
        logits.append(base[:, slot] + chain.bias(previous, h[:, slot]))
        confidences.append(drafter.confidence_logits(h[:, slot], previous))
        previous = drafter.to_target_ids(logits[-1].argmax(-1))
        tokens.append(previous)
    return torch.stack(logits, 1), torch.stack(tokens, 1), torch.stack(confidences, 1)


@pytest.mark.parametrize("reduced", [None, 10])
def test_the_training_dialect_gives_back_every_bit(tmp_path, make_drafter, record, features, reduced):
    drafter = make_drafter(draft_vocab_size=reduced)
    write_training_checkpoint(tmp_path, drafter, record)
    again = read_checkpoint(tmp_path, drafter.embedding, whole_head(make_drafter), record=record)
    assert again.config == drafter.config
    assert torch.equal(again.draft_token_ids, drafter.draft_token_ids)
    before, after = drafter.state_dict(), again.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    for one, two in zip(outputs(again, features), outputs(drafter, features), strict=True):
        assert torch.allclose(one, two, atol=1e-6)  # how tensors lie in memory may decide the last bit of a product


def whole_head(make_drafter):
    return make_drafter().head


@pytest.mark.parametrize("reduced", [None, 10])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_union_dialect_drafts_the_same_tokens_with_the_same_logits_and_confidences(
    tmp_path, make_drafter, record, features, reduced, dtype
):
    drafter = make_drafter(draft_vocab_size=reduced)
    write_union(tmp_path, drafter, record, dtype=dtype)
    wanted = getattr(torch, dtype)
    embedding, head = drafter.embedding.to(wanted), whole_head(make_drafter).to(wanted)
    union = read_checkpoint(tmp_path, embedding, head, record=record)
    assert union.config.draft_vocab_size is None
    assert union.fc.weight.dtype == wanted
    logits, tokens, confidences = outputs(union, features)
    expected_logits, expected_tokens, expected_confidences = outputs(drafter.to(wanted), features)
    columns = drafter.draft_token_ids if reduced else torch.arange(40)
    tolerance = 1e-5 if dtype == "float32" else 5e-2
    assert torch.allclose(logits[..., columns], expected_logits, atol=tolerance, rtol=tolerance)
    assert torch.allclose(confidences, expected_confidences, atol=tolerance, rtol=tolerance)
    if dtype == "float32":
        assert torch.equal(tokens, expected_tokens)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_whole_vocabulary_softmax_never_proposes_a_token_outside_the_draft_vocabulary(
    tmp_path, make_drafter, record, features, dtype
):
    drafter = make_drafter(draft_vocab_size=10)
    write_union(tmp_path, drafter, record, dtype=dtype)
    wanted = getattr(torch, dtype)
    union = read_checkpoint(tmp_path, drafter.embedding.to(wanted), whole_head(make_drafter).to(wanted))
    logits, _, _ = outputs(union, features)
    outside = torch.ones(40, dtype=torch.bool)
    outside[drafter.draft_token_ids] = False
    assert (torch.softmax(logits, -1)[..., outside] == 0).all()
    rows = union.markov_head.markov_w2.weight[outside]
    assert (rows[:, 0] == UNREACHABLE).all()  # exact in this dtype
    assert (rows[:, 1:] == 0).all()


def test_the_config_is_what_engines_read(tmp_path, make_drafter, record):
    """Fields and values of engine-formats.md, section 0, written out by hand."""
    write_union(tmp_path, make_drafter(draft_vocab_size=10), record)
    config = json.loads((tmp_path / "config.json").read_text())
    own = config.pop("dspark")
    layers = {
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "vocab_size": 40,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rope_theta": 10000.0,
        "layer_types": ["full_attention", "full_attention"],
        "tie_word_embeddings": False,
    }
    proposal = {"proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    assert config == layers | {
        "architectures": ["Qwen3DSparkModel"],
        "dtype": "bfloat16",
        "eos_token_id": [2],
        "is_causal": False,
        "has_embed_tokens": False,
        "block_size": 4,
        "mask_token_id": 5,
        "target_layer_ids": [1, 3],
        "aux_hidden_state_layer_ids": [2, 4],
        "num_target_layers": 6,
        "sample_from_anchor": True,
        "markov_rank": 4,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "speculators_model_type": "dspark",
        "speculators_version": "0.9.0",
        "draft_vocab_size": 40,
        "target_hidden_size": 32,
        "sliding_window_non_causal": False,
        "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": "org/tiny", "architectures": ["LlamaForCausalLM"]},
        },
    }
    assert own["dialect"] == "union"
    assert own["proposed_vocab_size"] == 10
    assert own["weights_sha256"] == digest_file(tmp_path / "model.safetensors")


def test_the_file_holds_the_engines_tensors_and_no_copy_of_the_target_s(tmp_path, make_drafter, record):
    drafter = make_drafter(draft_vocab_size=10)
    write_union(tmp_path, drafter, record)
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(tensors) == {name for name, _ in drafter.named_parameters()}
    assert tensors["markov_head.markov_w2.weight"].shape == (40, 4)
    assert tensors["confidence_head.proj.weight"].shape == (1, 36)
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}


def test_scaled_rope_stands_in_both_spellings(tmp_path, make_drafter, record):
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    drafter = make_drafter(rope=rope)
    write_union(tmp_path, drafter, record)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_scaling"] == {"rope_type": "linear", "type": "linear", "factor": 2.0}
    assert config["rope_theta"] == 10000.0
    assert read_checkpoint(tmp_path, drafter.embedding, drafter.head).config.rope == rope


def test_a_target_without_a_public_id_is_named_never_by_path(tmp_path, make_drafter, record):
    record.public_id = None
    write_union(tmp_path, make_drafter(), record)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "tiny"


def test_transformers_reads_the_config_as_qwen3(tmp_path, make_drafter, record):
    from transformers import AutoConfig

    write_union(tmp_path, make_drafter(), record)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config).__name__ == "Qwen3Config"
    assert (config.block_size, config.target_layer_ids, config.sample_from_anchor) == (4, [1, 3], True)


def test_a_tensor_that_training_never_moved_is_not_exported(tmp_path, make_drafter, record):
    drafter = make_drafter()
    drafter.norm.weight.fill_(1.0)
    with pytest.raises(StageError, match=r"norm\.weight"):
        write_union(tmp_path, drafter, record)
    assert not list(tmp_path.iterdir())
    write_union(tmp_path, drafter, record, untrained=True)
    drafter.norm.weight.fill_(1.5)
    drafter.confidence_head.proj.bias.zero_()
    with pytest.raises(StageError, match=r"confidence_head\.proj\.bias"):
        write_union(tmp_path, drafter, record)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_neither_written_nor_read(tmp_path, make_drafter, record, value):
    drafter = make_drafter()
    good = tmp_path / "good"
    write_training_checkpoint(good, drafter, record)
    drafter.fc.weight[0, 0] = value
    for write in (write_training_checkpoint, write_union):
        with pytest.raises(StageError, match=r"not finite: fc\.weight"):
            write(tmp_path / "bad", drafter, record)
    replace(good, {"fc.weight": drafter.fc.weight})
    with pytest.raises(IntegrityError, match=r"not finite: fc\.weight"):
        read_checkpoint(good, drafter.embedding, drafter.head)


def replace(folder, changes, drop=()):
    """Change tensors of a checkpoint and make its digest right again."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: value for name, value in tensors.items() if name not in drop}, folder / "model.safetensors")
    edit(folder, dspark={"weights_sha256": digest_file(folder / "model.safetensors")})


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "drop", "message"),
    [
        ({}, ["norm.weight"], r"norm\.weight is missing"),
        ({"embed_tokens.weight": torch.zeros(40, 32)}, [], r"embed_tokens\.weight is unexpected"),
        ({"fc.weight": torch.ones(32, 32)}, [], r"fc\.weight is \[32, 32\], expected \[32, 64\]"),
        ({"norm.weight": torch.ones(32).half()}, [], "different dtypes"),
        ({"d2t_ids": torch.arange(10).flip(0)}, [], "ascending"),
        ({}, ["d2t_ids"], "draft_token_ids"),
    ],
)
def test_other_tensors_than_the_config_needs_are_refused(tmp_path, make_drafter, record, changes, drop, message):
    """Engines don't notice missing tensors (package.md, rule 8): the reader does."""
    drafter = make_drafter(draft_vocab_size=10)
    write_training_checkpoint(tmp_path, drafter, record)
    replace(tmp_path, changes, drop)
    with pytest.raises(IntegrityError, match=message):
        read_checkpoint(tmp_path, drafter.embedding, whole_head(make_drafter))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sample_from_anchor": False}, "sample_from_anchor is False, not True"),
        ({"is_causal": None}, "is_causal is None, not False"),
        ({"architectures": ["DFlashDraftModel"]}, "architectures"),
        ({"aux_hidden_state_layer_ids": [1, 3]}, "target_layer_ids \\+ 1"),
        ({"block_size": 0}, "gamma"),
        ({"block_size": None}, "gamma"),
        ({"mask_token_id": 40}, "outside the vocabulary"),
        ({"target_layer_ids": 3}, "iterable"),
        ({"dspark": {"dialect": "other"}}, "not written by dspark"),
    ],
)
def test_a_config_that_means_another_drafter_is_refused(tmp_path, make_drafter, record, changes, message):
    drafter = make_drafter()
    write_union(tmp_path, drafter, record)
    edit(tmp_path, **changes)
    with pytest.raises(IntegrityError, match=message):
        read_checkpoint(tmp_path, drafter.embedding, drafter.head)


def test_a_missing_field_is_named(tmp_path, make_drafter, record):
    drafter = make_drafter()
    write_union(tmp_path, drafter, record)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["num_target_layers"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(IntegrityError, match="'num_target_layers' is missing"):
        read_checkpoint(tmp_path, drafter.embedding, drafter.head)


def test_one_flipped_bit_or_a_missing_file_is_refused(tmp_path, make_drafter, record):
    drafter = make_drafter()
    write_union(tmp_path, drafter, record)
    path = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(IntegrityError, match=r"model\.safetensors"):
        read_checkpoint(tmp_path, drafter.embedding, drafter.head)
    path.unlink()
    with pytest.raises(IntegrityError, match=r"model\.safetensors: missing"):
        read_checkpoint(tmp_path, drafter.embedding, drafter.head)
    shutil.rmtree(tmp_path)
    with pytest.raises(IntegrityError, match=r"config\.json"):
        read_checkpoint(tmp_path, drafter.embedding, drafter.head)


def test_a_drafter_of_another_target_is_refused(tmp_path, make_drafter, record):
    drafter = make_drafter()
    write_union(tmp_path, drafter, record)
    record.name, record.head_digest = "other", "0" * 64
    with pytest.raises(IntegrityError, match=r"belongs to org/tiny, not to this other \(head_digest differ"):
        read_checkpoint(tmp_path, drafter.embedding, drafter.head, record=record)


def test_equal_drafters_give_equal_files(tmp_path, make_drafter, record):
    for name in "ab":
        write_union(tmp_path / name, make_drafter(draft_vocab_size=10), record)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_reduced_vocabulary_without_the_constant_channel_becomes_no_whole_one(tmp_path, make_drafter, record):
    """Its other tokens could not be kept out: -1000 times whatever stands in channel 0 may be a large bias."""
    drafter = make_drafter(draft_vocab_size=10)
    drafter.markov_head.markov_w1.weight[3, 0] = -1
    with pytest.raises(SettingsError, match="no constant channel"):
        write_union(tmp_path, drafter, record)
    write_training_checkpoint(tmp_path, drafter, record)
    again = read_checkpoint(tmp_path, drafter.embedding, whole_head(make_drafter))
    assert torch.equal(again.markov_head.markov_w1.weight, drafter.markov_head.markov_w1.weight)


def test_union_tensors_leave_the_drafter_as_it_is(make_drafter):
    drafter = make_drafter(draft_vocab_size=10)
    assert union_tensors(drafter)["markov_head.markov_w2.weight"].shape == (40, 4)
    assert drafter.markov_head.markov_w2.weight.shape == (10, 4)
