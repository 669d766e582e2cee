from __future__ import annotations

import hashlib

import pytest
import torch
from transformers import DynamicCache

from dspark.errors import PreflightError
from dspark.targets.attention import grouped_attention
from dspark.targets.loading import load_target, tensor_digest
from dspark.targets.materialise import materialise


def tokens(rows, length, seed=0):
    return torch.randint(4, 260, (rows, length), generator=torch.Generator().manual_seed(seed))


def reference(target, ids):
    """transformers' own account of all layers: hidden_states[k + 1] is the output of layer k, the last one normed."""
    return target.model(ids, output_hidden_states=True)


def test_tap_k_is_the_output_of_layer_k(target):
    ids = tokens(2, 9)
    states = reference(target, ids).hidden_states
    expected = torch.cat([states[tap + 1] for tap in target.taps], dim=-1)
    assert target.taps == (1, 2)
    torch.testing.assert_close(target.hidden(ids).taps, expected, rtol=0, atol=0)


def test_the_last_hidden_state_is_normed_and_gives_the_logits(target):
    ids = tokens(2, 9)
    output = reference(target, ids)
    hidden = target.hidden(ids).last_hidden
    torch.testing.assert_close(hidden, output.hidden_states[-1], rtol=0, atol=0)
    torch.testing.assert_close(target.logits(hidden), output.logits)


def test_no_logits_are_computed_unless_asked_for(target, monkeypatch):
    def refuse(*args):
        raise AssertionError("the head ran")

    monkeypatch.setattr(target.model.lm_head, "forward", refuse)
    assert target.hidden(tokens(1, 3)).last_hidden.shape == (1, 3, 32)


def test_hooks_are_gone_after_a_pass_even_a_failed_one(target):
    before = [len(layer._forward_hooks) for layer in target.decoder.layers]
    target.hidden(tokens(1, 3))
    with pytest.raises(IndexError):
        target.hidden(torch.tensor([[10_000]]))
    assert [len(layer._forward_hooks) for layer in target.decoder.layers] == before


def test_an_explicit_mask_says_the_same_as_the_causal_one(target):
    ids = tokens(2, 7)
    mask = torch.ones(7, 7, dtype=torch.bool).tril().expand(2, 1, 7, 7)
    torch.testing.assert_close(target.hidden(ids, attention_mask=mask).taps, target.hidden(ids).taps)


def test_an_explicit_mask_hides_what_it_hides(target):
    """Two trains of thought in one row: the second sees only itself and equals a row of its own."""
    ids, other = tokens(1, 5), tokens(1, 4, seed=1)
    mask = torch.block_diag(torch.ones(5, 5).tril(), torch.ones(4, 4).tril()).bool()[None, None]
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    joined = target.hidden(torch.cat([ids, other], 1), attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(joined.taps[:, 5:], target.hidden(other).taps)


def test_padding_on_the_left_moves_no_token(target):
    ids = tokens(1, 6)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), ids], 1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])
    torch.testing.assert_close(target.hidden(padded, attention_mask=mask).taps[:, 3:], target.hidden(ids).taps)


def test_positions_count_from_the_first_real_token(target):
    """Attention sees differences of positions only; what a drafter is given must be the positions themselves."""
    seen = []
    handle = target.decoder.register_forward_pre_hook(
        lambda module, args, options: seen.append(options["position_ids"].tolist()), with_kwargs=True
    )
    try:
        target.hidden(tokens(2, 4), attention_mask=torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]))
    finally:
        handle.remove()
    assert seen == [[[0, 0, 0, 1], [0, 1, 2, 3]]]


def test_steps_with_a_cache_equal_one_pass(target):
    ids = tokens(2, 8)
    whole = target.hidden(ids)
    cache = DynamicCache()
    parts = [target.hidden(ids[:, a:b], cache=cache) for a, b in ((0, 5), (5, 6), (6, 8))]
    torch.testing.assert_close(torch.cat([part.taps for part in parts], 1), whole.taps)
    torch.testing.assert_close(torch.cat([part.last_hidden for part in parts], 1), whole.last_hidden)
    assert cache.get_seq_length() == 8


def test_steps_with_a_cache_and_padding_equal_one_pass(target):
    ids = tokens(1, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    cache = DynamicCache()
    target.hidden(
        torch.cat([torch.zeros(1, 2, dtype=torch.int64), ids[:, :4]], 1), attention_mask=mask[:, :6], cache=cache
    )
    step = target.hidden(ids[:, 4:], attention_mask=mask, cache=cache)
    torch.testing.assert_close(step.taps, target.hidden(ids).taps[:, 4:], atol=1e-4, rtol=1e-5)


def test_a_target_is_frozen_and_shares_what_it_ties(target):
    assert not target.embedding.requires_grad
    assert (target.head is target.embedding) == target.model.config.tie_word_embeddings
    assert (target.record.head_digest == target.record.embedding_digest) == target.model.config.tie_word_embeddings
    assert target.eos_token_ids == {2}
    assert target.mask_token_id == 3


def test_the_record_holds_the_digests_of_the_very_tensors(target):
    assert tensor_digest(target.embedding) == target.record.embedding_digest
    assert tensor_digest(target.head) == target.record.head_digest


def test_a_tensors_digest_is_of_its_header_and_bytes():
    tensor = torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16)
    # bfloat16 is the upper half of float32: 1.0 = 0x3f80, -2.0 = 0xc000, little endian.
    expected = hashlib.sha256(b"bfloat16 [1, 2]\n" + bytes.fromhex("803f00c0")).hexdigest()
    assert tensor_digest(tensor) == expected
    assert tensor_digest(tensor.t()) != expected


def test_another_dtype_can_be_asked_for(target, workspace, processor_flags):
    processor_flags("avx512_bf16")
    half = load_target(target.record, workspace, dtype="bfloat16")
    assert (half.dtype, half.dtype_name) == (torch.bfloat16, "bfloat16")
    assert target.dtype == torch.float32


def test_a_processor_without_bfloat16_computes_in_float32_with_the_same_weights(random_spec, tmp_path, processor_flags):
    record = materialise(random_spec("a", dtype="bfloat16"), root=tmp_path)
    processor_flags("avx512_bf16")
    half = load_target(record, tmp_path)
    processor_flags("avx2")
    single = load_target(record, tmp_path)
    assert (half.dtype_name, single.dtype_name) == ("bfloat16", "float32")
    mine = dict(single.model.named_parameters())
    assert all(torch.equal(mine[name], value.float()) for name, value in half.model.named_parameters())


def test_a_device_without_room_for_a_target_is_refused_with_the_way_out(target, workspace, monkeypatch):
    from transformers import PreTrainedModel

    def full(model, device):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    monkeypatch.setattr(PreTrainedModel, "to", full)
    with pytest.raises(PreflightError, match=r"takes 0\.0 GiB, cuda:1 has no room") as caught:
        load_target(target.record, workspace, device="cuda:1")
    assert "DSPARK_DEVICE=cpu" in caught.value.hint


def test_a_target_that_is_not_in_the_store_names_the_command(target, tmp_path):
    with pytest.raises(PreflightError) as caught:
        load_target(target.record, tmp_path)
    assert caught.value.hint == f"dspark targets fetch {target.record.name}"


@pytest.mark.parametrize("kv_heads", [2, 6])
@pytest.mark.parametrize("queries", [1, 4, 40])
@pytest.mark.parametrize("masked", [True, False])
def test_grouped_attention_equals_attention_written_out(kv_heads, queries, masked):
    """Few queries are laid together per group, many are not; heads in transformers' layout, a transposed view."""
    generator = torch.Generator().manual_seed(1)
    keys = max(queries, 4)
    query, key, value = (
        torch.randn(2, length, heads, 8, generator=generator).transpose(1, 2)
        for heads, length in ((6, queries), (kv_heads, keys), (kv_heads, keys))
    )
    causal = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    hidden = torch.tensor([False, True])[:, None, None, None] & (torch.arange(keys) == 1) & (keys > queries)
    mask = causal & ~hidden if masked else None  # in the second row, one key is hidden as a padding column is
    output, _ = grouped_attention(torch.nn.Module(), query, key, value, mask, scaling=0.3)
    group = 6 // kv_heads
    scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * 0.3
    # No mask stands for a causal one; a single query is the newest and sees everything.
    visible = causal if mask is None else mask
    expected = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value.repeat_interleave(group, 1)
    torch.testing.assert_close(output, expected.transpose(1, 2))
