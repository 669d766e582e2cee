import pytest
import torch

from dspark.errors import SettingsError

LENGTH = 13


def one_shot(drafter, features, lengths, anchor_ids):
    """h of one block per row with the whole context at once."""
    rows = len(lengths)
    lengths = torch.as_tensor(lengths)
    return drafter.block_hidden(
        drafter.block_inputs(anchor_ids)[:, None],
        drafter.project(features),
        torch.arange(LENGTH).expand(rows, LENGTH),
        lengths[:, None, None] + torch.arange(drafter.config.gamma),
        torch.arange(LENGTH) < lengths[:, None, None],
    )[:, 0]


@pytest.fixture
def sequences():
    generator = torch.Generator().manual_seed(5)
    return torch.randn(2, LENGTH, 64, generator=generator), torch.tensor([8, 31])


def test_context_added_bit_by_bit_equals_the_context_at_once(make_drafter, sequences):
    """Rows grow by different counts; features behind a row's count are rubbish that the next call overwrites."""
    drafter, (features, anchors) = make_drafter(), sequences
    cache = drafter.new_cache(2, LENGTH)
    lengths = [0, 0]
    for counts in ([4, 1], [0, 3], [2, 4], [5, 5]):
        chunk = torch.full((2, 5, 64), 1e3)
        for row, count in enumerate(counts):
            chunk[row, :count] = features[row, lengths[row] : lengths[row] + count]
            lengths[row] += count
        drafter.extend(cache, chunk, torch.tensor(counts))
        assert cache.lengths.tolist() == lengths
        found = drafter.block_from_cache(anchors, cache)
        assert torch.allclose(found, one_shot(drafter, features, lengths, anchors), atol=1e-5)
    assert lengths == [11, 13]


def test_any_way_to_cut_the_context_gives_the_same_block(make_drafter, sequences):
    drafter, (features, anchors) = make_drafter(draft_vocab_size=10), sequences
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        cache = drafter.new_cache(2, LENGTH)
        while int(cache.lengths.max()) < LENGTH - 3:
            counts = torch.randint(0, 4, (2,), generator=generator)
            chunk = torch.zeros(2, 3, 64)
            for row, (start, count) in enumerate(zip(cache.lengths.tolist(), counts.tolist(), strict=True)):
                chunk[row, :count] = features[row, start : start + count]
            drafter.extend(cache, chunk, counts)
        expected = one_shot(drafter, features, cache.lengths, anchors)
        assert torch.allclose(drafter.block_from_cache(anchors, cache), expected, atol=1e-5)


def test_positions_beyond_the_capacity_are_dropped_unless_they_are_kept(make_drafter, sequences):
    """The last verification of a sequence may run over the end; only what is kept must fit."""
    drafter, (features, anchors) = make_drafter(), sequences
    cache = drafter.new_cache(2, 6)
    drafter.extend(cache, features[:, :4], torch.tensor([4, 3]))
    drafter.extend(cache, torch.stack([features[0, 4:8], features[1, 3:7]]), torch.tensor([2, 3]))
    expected = one_shot(drafter, features, [6, 6], anchors)
    assert torch.allclose(drafter.block_from_cache(anchors, cache), expected, atol=1e-5)
    with pytest.raises(SettingsError, match="holds 6"):
        drafter.extend(cache, features[:, 6:8], torch.tensor([0, 1]))
    assert cache.lengths.tolist() == [6, 6]


@pytest.mark.parametrize("counts", [[-1, 0], [3, 0]])
def test_counts_must_lie_between_zero_and_the_new_positions(make_drafter, sequences, counts):
    drafter, (features, _) = make_drafter(), sequences
    with pytest.raises(SettingsError, match="cannot keep"):
        drafter.extend(drafter.new_cache(2, LENGTH), features[:, :2], torch.tensor(counts))


def test_rubbish_behind_a_row_s_end_is_never_seen(make_drafter, sequences):
    drafter, (features, anchors) = make_drafter(), sequences
    clean, dirty = drafter.new_cache(2, LENGTH), drafter.new_cache(2, LENGTH)
    drafter.extend(clean, features[:, :6], torch.tensor([3, 6]))
    changed = features[:, :6].clone()
    changed[0, 3:] = 7.0
    drafter.extend(dirty, changed, torch.tensor([3, 6]))
    assert torch.equal(drafter.block_from_cache(anchors, clean), drafter.block_from_cache(anchors, dirty))


def test_an_empty_context_gives_a_block(make_drafter, sequences):
    drafter, (features, anchors) = make_drafter(), sequences
    found = drafter.block_from_cache(anchors, drafter.new_cache(2, LENGTH))
    assert torch.allclose(found, one_shot(drafter, features, [0, 0], anchors), atol=1e-5)


def test_the_cache_has_the_drafter_s_dtype(make_drafter):
    cache = make_drafter().to(torch.bfloat16).new_cache(3, 5)
    assert cache.keys[0].dtype == torch.bfloat16
    assert cache.keys[0].shape == (3, 2, 5, 6)
    assert cache.capacity == 5


def test_rows_leave_and_join_on_the_same_memory(make_drafter, sequences):
    """Two rows, the first leaves, and another one takes the free row: each has the block of its context at once."""
    drafter, (features, anchors) = make_drafter(), sequences
    cache = drafter.new_cache(2, LENGTH)
    memory = [keys.data_ptr() for keys in cache.keys]
    drafter.extend(cache, features, torch.tensor([9, 12]))
    cache.keep([1])
    assert cache.lengths.tolist() == [12]
    joining = cache.spare(1)
    drafter.extend(joining, features[:1, :6], torch.tensor([5]))
    cache.take(joining)
    drafter.extend(cache, torch.stack([features[1, 12:], features[0, 5:6]]), torch.tensor([1, 1]))
    assert cache.lengths.tolist() == [13, 6]
    expected = one_shot(drafter, features.flip(0), [13, 6], anchors)
    assert torch.allclose(drafter.block_from_cache(anchors, cache), expected, atol=1e-5)
    assert [keys.data_ptr() for keys in cache.keys] == memory
    with pytest.raises(SettingsError, match="cannot take 1 more rows in: 2 of 2 are in use"):
        cache.spare(1)
