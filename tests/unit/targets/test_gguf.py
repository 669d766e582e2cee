"""A target as GGUF: names, keys, the order of a Llama's rows, its tokenizer, and what is refused."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import torch

from dspark.errors import PreflightError, SettingsError
from dspark.io.gguffile import Key, read_gguf, write_gguf
from dspark.targets.gguf import copied_tokenizer, neighbouring_pairs, tokenizer_keys, write_target_gguf


@pytest.fixture(params=["llama", "qwen3"])
def target(request, family):
    """Of the families that are written."""
    return family(request.param)


@pytest.fixture
def written(target, workspace, tmp_path):
    write_target_gguf(tmp_path / "target.gguf", target.record, workspace)
    return read_gguf(tmp_path / "target.gguf")


def test_keys_say_what_the_target_is(target, written):
    family = target.record.model_type
    assert {name: key.value for name, key in written.keys.items() if not name.startswith("tokenizer.")} == {
        "general.architecture": family,
        "general.type": "model",
        "general.name": target.record.name,
        "general.file_type": 0,
        f"{family}.block_count": 5,
        f"{family}.context_length": 128,
        f"{family}.embedding_length": 32,
        f"{family}.feed_forward_length": 48,
        f"{family}.attention.head_count": 4,
        f"{family}.attention.head_count_kv": 2,
        f"{family}.attention.key_length": 8,
        f"{family}.attention.value_length": 8,
        f"{family}.rope.dimension_count": 8,
        f"{family}.rope.freq_base": 10000.0,
        f"{family}.attention.layer_norm_rms_epsilon": float(np.float32(1e-6)),
        f"{family}.vocab_size": 280,
    }


def test_tensors_are_the_targets_under_llamacpps_names(target, written):
    state, read = target.model.state_dict(), written.tensors()
    same = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.4.attn_v.weight": "model.layers.4.self_attn.v_proj.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
    }
    for mine, theirs in same.items():
        assert np.array_equal(read[mine], state[theirs].numpy()), mine
    # The Llama's embedding is tied and its rows are turned; the Qwen3 has a head and norms of queries and keys.
    if target.record.model_type == "llama":
        assert "output.weight" not in read and len(read) == 2 + 5 * 9
        turned = neighbouring_pairs(state["model.layers.3.self_attn.q_proj.weight"].numpy(), 4)
        assert np.array_equal(read["blk.3.attn_q.weight"], turned)
    else:
        assert np.array_equal(read["output.weight"], state["lm_head.weight"].numpy()) and len(read) == 3 + 5 * 11
        assert np.array_equal(read["blk.3.attn_q.weight"], state["model.layers.3.self_attn.q_proj.weight"].numpy())
        assert np.array_equal(read["blk.3.attn_k_norm.weight"], state["model.layers.3.self_attn.k_norm.weight"].numpy())


def test_rotated_pairs_come_to_stand_beside_each_other():
    """Two heads of four rows, pairs (0, 2) and (1, 3) in each, written out by hand."""
    rows = np.arange(8, dtype=np.float32)[:, None]
    assert neighbouring_pairs(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_transformers_reads_the_file_back_as_the_same_model(target, workspace, tmp_path):
    """Its own reader of GGUF files undoes names and order: an independent check of both.

    It takes the config from us, since it does not read a Qwen3's width of heads.
    """
    from transformers import AutoModelForCausalLM

    write_target_gguf(tmp_path / "t.gguf", target.record, workspace)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="t.gguf", dtype=torch.float32, config=target.model.config
    )
    ids = torch.tensor([[5, 40, 100, 7, 200, 9]])
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, target.model(ids).logits, atol=1e-5)


@pytest.mark.parametrize(("precision", "kind"), [("F16", "F16"), ("Q8_0", "Q8_0")])
def test_smaller_files_keep_vectors_in_float32(target, workspace, tmp_path, precision, kind):
    write_target_gguf(tmp_path / "t.gguf", target.record, workspace, precision=precision)
    types = read_gguf(tmp_path / "t.gguf").types
    assert types["blk.1.attn_q.weight"] == types["token_embd.weight"] == kind
    assert types["blk.1.attn_norm.weight"] == types["output_norm.weight"] == "F32"
    assert types["blk.1.ffn_down.weight"] == "F16"  # rows of 48 do not divide into blocks of 32


def test_the_byte_tokenizer_gets_all_its_ids(target, written):
    keys = written.keys
    tokens, kinds = keys["tokenizer.ggml.tokens"].value, keys["tokenizer.ggml.token_type"].value
    assert len(tokens) == len(kinds) == 280
    assert tokens[:4] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
    assert kinds[:5] == [3, 3, 3, 3, 1]
    # The tokenizer knows 260 ids; the embedding's other rows are tokens nobody can say.
    assert kinds[259:261] == [1, 5] and len(set(tokens)) == 280
    assert keys["tokenizer.ggml.pre"].value == "gpt-2" and keys["tokenizer.ggml.merges"].value == ["Ā Ā"]
    assert "ĀĀ" not in tokens
    assert (keys["tokenizer.ggml.bos_token_id"].value, keys["tokenizer.ggml.eos_token_id"].value) == (1, 2)


def test_a_tokenizer_can_be_copied_whole(target, workspace, tmp_path):
    keys = {
        "general.architecture": Key("llama", "STRING"),
        "llama.block_count": Key(9, "UINT32"),
        "tokenizer.ggml.model": Key("gpt2", "STRING"),
        "tokenizer.ggml.pre": Key("smollm", "STRING"),
        "tokenizer.ggml.tokens": Key([f"t{number}" for number in range(280)], "STRING"),
        "tokenizer.ggml.add_space_prefix": Key(False, "BOOL"),
        "tokenizer.chat_template": Key("{{ messages }}", "STRING"),
    }
    write_gguf(tmp_path / "origin.gguf", keys, {})
    write_target_gguf(tmp_path / "t.gguf", target.record, workspace, origin=tmp_path / "origin.gguf")
    read = read_gguf(tmp_path / "t.gguf").keys
    expected = {name: key for name, key in keys.items() if name.startswith("tokenizer.")}
    assert {name: key for name, key in read.items() if name.startswith("tokenizer.")} == expected
    short = {**keys, "tokenizer.ggml.tokens": Key(["t0"], "STRING")}
    write_gguf(tmp_path / "short.gguf", short, {})
    with pytest.raises(SettingsError, match="the tokenizer has 1 tokens, the embedding 280"):
        write_target_gguf(tmp_path / "t.gguf", target.record, workspace, origin=tmp_path / "short.gguf")
    del keys["tokenizer.ggml.tokens"]
    write_gguf(tmp_path / "none.gguf", keys, {})
    with pytest.raises(SettingsError, match=r"none\.gguf: this GGUF file holds no tokenizer"):
        copied_tokenizer(tmp_path / "none.gguf")


QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
BYTES = {**WORDS, "use_regex": False}


def split(regex, **more):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False, **more}


def in_turn(*steps):
    return {"type": "Sequence", "pretokenizers": list(steps)}


@pytest.mark.parametrize(
    ("cut", "name"),
    [
        (WORDS, "gpt-2"),
        (in_turn({"type": "Digits", "individual_digits": True}, WORDS), "smollm"),
        (in_turn(split(QWEN2), BYTES), "qwen2"),
        (in_turn(split(QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")), BYTES), "llama-bpe"),
        (BYTES, None),  # with merges it matters where text is cut
        (in_turn({"type": "Digits", "individual_digits": False}, WORDS), None),
        (in_turn(split(r"\s+"), BYTES), None),
        (in_turn(split(QWEN2, invert=True), BYTES), None),
        (in_turn(split(QWEN2, behavior="Removed"), BYTES), None),
        ({**WORDS, "add_prefix_space": True}, None),
        ({"type": "Metaspace"}, None),
        (None, None),
    ],
)
def test_only_known_ways_to_cut_text_are_named(target, tmp_path, cut, name):
    described = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**described, "pre_tokenizer": cut}))
    if name is not None:
        assert tokenizer_keys(target.record, tmp_path)["tokenizer.ggml.pre"].value == name
        assert tokenizer_keys(target.record, tmp_path)["tokenizer.ggml.merges"].value == ["a b"]
        return
    with pytest.raises(
        SettingsError, match=r"llama\.cpp has no known name for the way its tokenizer cuts text"
    ) as error:
        tokenizer_keys(target.record, tmp_path)
    assert "GGUF file of the target" in error.value.hint


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"type": "Unigram", "vocab": [], "merges": []}, "tokenizer is 'Unigram', only byte-level BPE"),
        ({"type": "BPE", "vocab": {}, "merges": [], "byte_fallback": True}, "bytes as a fallback, only byte-level BPE"),
    ],
)
def test_other_tokenizers_are_refused(target, tmp_path, model, said):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
    with pytest.raises(SettingsError, match=said):
        tokenizer_keys(target.record, tmp_path)


def test_what_cannot_be_said_is_refused_by_name(target, workspace, tmp_path):
    def write(**changes):
        record = target.record.model_copy(update=changes)
        write_target_gguf(tmp_path / "t.gguf", record, workspace)

    scaled = {**target.record.text_config, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}
    with pytest.raises(SettingsError, match="RoPE of type 'llama3' is not written"):
        write(text_config=scaled)
    # One layer fewer than the file holds: its tensors have no place, as biases would have none.
    with pytest.raises(SettingsError, match=r"model\.layers\.4\.input_layernorm\.weight has no place in the file"):
        write(num_layers=4)
    with pytest.raises(SettingsError, match=r"model\.layers\.5\.input_layernorm\.weight is missing"):
        write(num_layers=6)
    with pytest.raises(PreflightError, match="is not in") as error:
        write(digest="0" * 64)
    assert error.value.hint == f"dspark targets fetch {target.record.name}"
    assert not (tmp_path / "t.gguf").exists()


def test_equal_targets_give_equal_bytes(target, workspace, tmp_path):
    for name in ("a.gguf", "b.gguf"):
        write_target_gguf(tmp_path / name, target.record, workspace)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    assert gguf.GGUFReader(tmp_path / "a.gguf").alignment == 32


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma4_unified"])
def test_other_families_are_not_written(family, name, workspace, tmp_path):
    record = family(name).record
    with pytest.raises(
        SettingsError, match=f"a target of type '{record.model_type}' is not written as GGUF, only llama"
    ):
        write_target_gguf(tmp_path / "target.gguf", record, workspace)
    assert not (tmp_path / "target.gguf").exists()
