from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dspark.training.batches import epoch_order, make_batch


def sequence(tokens, prompt_length):
    """A hand-made sequence whose features say which position they belong to."""
    length = len(tokens)
    position = torch.arange(length, dtype=torch.float32)
    return SimpleNamespace(
        token_ids=torch.tensor(tokens),
        prompt_length=prompt_length,
        taps=position[:, None].repeat(1, 2),
        last_hidden=100 + position[:, None],
        logsumexp=200 + position,
    )


def test_labels_previous_tokens_and_target_states_are_aligned():
    """Anchor 3 (token 13), gamma 3: labels are tokens 4, 5, 6; each label's predecessor is teacher-forced and the
    target's state that predicts a label stands one position before it. Anchor 5 has one label left.
    """
    batch = make_batch([sequence([10, 11, 12, 13, 14, 15, 16], 2)], [np.array([3, 5])], 3, None)
    assert batch.anchor_ids.tolist() == [13, 15]
    assert batch.slot_rows.tolist() == [0, 1, 2, 3]
    assert batch.targets.labels.tolist() == [14, 15, 16, 16]
    assert batch.previous_ids.tolist() == [13, 14, 15, 15]
    assert batch.targets.target_hidden[:, 0].tolist() == [103, 104, 105, 105]
    assert batch.targets.logsumexp.tolist() == [203, 204, 205, 205]
    assert batch.targets.slots.tolist() == [0, 1, 2, 0]


def test_a_block_sees_the_context_strictly_before_its_anchor():
    batch = make_batch([sequence(list(range(8)), 2)], [np.array([2, 5])], 3, None)
    assert batch.features[:, 0].tolist() == [0, 1, 2, 3, 4]  # nothing from the last anchor on
    (visible,) = batch.packing.visible()
    assert visible[0].tolist() == [
        [True, True, False, False, False],
        [True, True, True, True, True],
    ]


def test_sequences_are_packed_behind_one_another_without_padding():
    """Two blocks and one; contexts of four and of two positions. The sequence without an anchor takes no room."""
    rows = [sequence(list(range(10, 18)), 2), sequence([7, 8, 9], 3), sequence(list(range(5)), 1)]
    batch = make_batch(rows, [np.array([3, 4]), np.array([], dtype=np.int64), np.array([2])], 2, None)
    assert batch.features[:, 0].tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.anchors.tolist() == batch.packing.seen.tolist() == [3, 4, 2]
    assert (batch.packing.blocks, batch.packing.contexts) == ((2, 1), (4, 2))
    first, second = batch.packing.visible()
    assert first.tolist() == [[[True, True, True, False], [True, True, True, True]]]
    assert second.tolist() == [[[True, True]]]
    # Blocks are numbered over all sequences: 0 and 1 | 2, two slots each.
    assert batch.slot_rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.targets.labels.tolist() == [14, 15, 15, 16, 3, 4]


def test_labels_become_columns_of_the_draft_vocabulary():
    columns = torch.full((20,), -1)
    columns[[14, 16]] = torch.tensor([0, 1])
    batch = make_batch([sequence([10, 11, 12, 13, 14, 15, 16], 2)], [np.array([3])], 3, columns)
    assert batch.targets.labels.tolist() == [0, -1, 1]
    assert batch.previous_ids.tolist() == [13, 14, 15]  # previous tokens stay target ids


def test_a_cut_sequence_ends_its_turn_there():
    batch = make_batch([sequence([10, 11, 12, 13, 14, 15, 16], 2)], [np.array([3])], 3, None, max_length=6)
    assert batch.targets.labels.tolist() == [14, 15]


def test_an_epoch_has_every_sequence_at_most_once_and_drops_the_tail():
    lengths = np.arange(10, 33)
    batches = epoch_order(lengths, 4, seed=1, epoch=0)
    assert len(batches) == 5
    seen = np.concatenate(batches)
    assert len(seen) == len(set(seen.tolist())) == 20


def test_the_order_is_a_function_of_seed_and_epoch():
    lengths = np.arange(64)

    def order(seed, epoch):
        return np.concatenate(epoch_order(lengths, 4, seed, epoch)).tolist()

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


@pytest.mark.parametrize("count", [32, 256])
def test_sequences_of_a_batch_have_similar_lengths(count):
    """Within groups of 8 batches sorted by length: the mean spread inside a batch is a fraction of the whole."""
    lengths = np.random.default_rng(0).integers(20, 400, count)
    spread = np.mean([np.ptp(lengths[batch]) for batch in epoch_order(lengths, 4, 0, 0)])
    assert spread < 0.3 * np.ptp(lengths)
