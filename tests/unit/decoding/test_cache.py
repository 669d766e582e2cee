from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark.decoding.cache import SlotCache
from dspark.targets.loading import Target

CPU = torch.device("cpu")


def counts(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def run(target: Target, cache: SlotCache, ids: list[list[int]]) -> torch.Tensor:
    """Final hidden states of one window, [B, Q, d]."""
    tokens = torch.tensor(ids)
    positions, mask = cache.window(tokens.shape[1], CPU)
    return target.last_hidden(tokens, attention_mask=mask, position_ids=positions, cache=cache)


def test_a_window_sees_each_row_up_to_its_own_position():
    cache = SlotCache(1, 2, 10)
    cache.advance(counts(1, 3))
    positions, mask = cache.window(2, CPU)
    assert positions.tolist() == [[1, 2], [3, 4]]
    assert mask.int().tolist() == [[[[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]], [[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]]]


def test_aligned_rows_share_one_mask():
    cache = SlotCache(1, 3, 10)
    cache.advance(counts(2, 2, 2))
    positions, mask = cache.window(2, CPU)
    assert positions.tolist() == [[2, 3]] * 3
    assert mask.int().tolist() == [[[[1, 1, 1, 0], [1, 1, 1, 1]]]]


def test_keys_reach_to_the_longest_row_and_not_to_the_capacity():
    cache = SlotCache(1, 2, 1000)
    cache.advance(counts(5, 2))
    cache.window(3, CPU)
    keys, values = cache.update(torch.ones(2, 2, 3, 4), torch.ones(2, 2, 3, 4), 0)
    assert keys.shape == values.shape == (2, 2, 8, 4)
    assert keys[1, 0, :, 0].tolist() == [0, 0, 1, 1, 1, 0, 0, 0]


def test_a_window_beyond_the_capacity_is_refused():
    cache = SlotCache(1, 2, 6)
    cache.advance(counts(1, 4))
    with pytest.raises(ValueError, match="no room for 3 tokens after 4 of 6"):
        cache.window(3, CPU)


def test_ragged_incremental_passes_equal_one_pass_per_sequence(family_target: Target):
    """Rows of different prompts and different accepted counts, rolled back in between, against plain forwards.

    The rejected tokens (39) leave garbage behind each row's length, which must not show, nor push anything out of a
    window of 5 positions, which every row outgrows.
    """
    target = family_target
    texts = [[3, 4, 5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16, 17], [20, 21, 22, 23, 24, 25, 26, 27, 28]]
    cache = SlotCache(target.record.num_layers, 3, 12)
    run(target, cache, [[3, 4, 39, 39], [11, 12, 13, 39], [20, 21, 22, 23]])
    cache.advance(counts(2, 3, 4))
    run(target, cache, [[5, 6, 7], [14, 39, 39], [24, 25, 39]])
    cache.advance(counts(3, 1, 2))
    last = run(target, cache, [[8, 9, 10], [15, 16, 17], [26, 27, 28]])
    for row, text in enumerate(texts):
        whole = target.last_hidden(torch.tensor([text]))[0, -3:]
        torch.testing.assert_close(last[row], whole, atol=2e-5, rtol=1e-4)
    assert cache.get_seq_length() == 6
    assert cache.get_mask_sizes(3, 0) == (9, 0)
    assert cache.get_max_length() == 12


def test_dropping_rows_keeps_the_others_contexts(family_target: Target):
    target = family_target
    cache = SlotCache(target.record.num_layers, 4, 10)
    run(target, cache, [[3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14]])
    cache.advance(counts(3, 2, 1, 3))
    cache.keep([0, 3])
    last = run(target, cache, [[30, 31], [32, 33]])
    for row, text in enumerate([[3, 4, 5, 30, 31], [12, 13, 14, 32, 33]]):
        whole = target.last_hidden(torch.tensor([text]))[0, -2:]
        torch.testing.assert_close(last[row], whole, atol=2e-5, rtol=1e-4)


def test_rows_that_join_begin_anew_and_leave_the_others_alone(family_target: Target):
    """Four sequences on three slots: one joins behind two, one of these leaves, and the fourth takes the free slot.

    The pass of who joins covers its row alone. What stood in its slot before must not show.
    """
    target = family_target
    texts = {
        "a": [3, 4, 5, 6, 7, 8, 9],
        "b": [11, 12, 13, 14, 15, 16, 17, 18],
        "c": [20, 21, 22, 23, 24, 25],
        "d": [30, 31, 32, 33],
    }
    cache = SlotCache(target.record.num_layers, 3, 12)
    cache.keep([])

    def join(ids: list[list[int]], *lengths: int) -> None:
        first = len(cache.lengths)
        cache.join(len(ids))
        tokens = torch.tensor(ids)
        positions, mask = cache.window(tokens.shape[1], CPU, first=first)
        last = target.last_hidden(tokens, attention_mask=mask, position_ids=positions, cache=cache)
        assert last.shape[0] == len(ids)
        cache.advance(counts(*lengths))

    join([[3, 4, 5], [11, 12, 39]], 3, 2)
    join([[20, 21, 22, 23]], 4)
    run(target, cache, [[6, 39, 39], [13, 14, 15], [24, 39, 39]])
    cache.advance(counts(1, 3, 1))
    cache.keep([2, 1])  # a leaves, c takes its place
    join([[30, 31]], 2)
    assert cache.lengths.tolist() == [5, 5, 2]
    last = run(target, cache, [[25, 39, 39], [16, 17, 18], [32, 33, 39]])
    for row, (name, width) in enumerate((("c", 1), ("b", 3), ("d", 2))):
        whole = target.last_hidden(torch.tensor([texts[name]]))[0, -width:]
        torch.testing.assert_close(last[row, :width], whole, atol=2e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="no slots for 1 rows beside 3 of 3"):
        cache.join(1)
