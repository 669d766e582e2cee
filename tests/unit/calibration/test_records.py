from __future__ import annotations

import numpy as np
import pytest

from dspark.calibration import Records
from dspark.errors import CalibrationError

MASK = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]], dtype=bool)


def test_unknown_positions_are_neither_accepted_nor_rejected():
    """Row 2 was cut after position 1 (say, an end of sequence): its marks and logits behind that do not count."""
    valid = np.ones((4, 3), dtype=bool)
    valid[2, 1:] = False
    logits = np.zeros((4, 3))
    logits[2, 2] = np.nan
    records = Records(logits, MASK, valid)
    assert records.survived.tolist() == [[1, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0]]
    assert records.reached.tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0]]
    assert records.z[2].tolist() == [0, 0, 0]


def test_a_mask_that_is_not_a_prefix_is_refused(calibration_case):
    with pytest.raises(CalibrationError, match="accepted of row 0 is not a prefix: position 3 is set and position 2"):
        calibration_case("mask-not-a-prefix")
    with pytest.raises(CalibrationError, match="valid of row 1 is not a prefix"):
        Records(np.zeros((2, 2)), np.zeros((2, 2)), [[1, 1], [0, 1]])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"logits": np.zeros(4)}, r"must be \[n, gamma\]"),
        ({"logits": np.zeros((4, 0))}, r"must be \[n, gamma\]"),
        ({"accepted": MASK[:3]}, r"accepted has shape \(3, 3\)"),
        ({"valid": MASK[:, :2]}, r"valid has shape \(4, 2\)"),
        ({"accepted": MASK * 0.5}, "only true and false"),
        ({"logits": np.full((4, 3), np.nan)}, "row 0 at position 1 is nan"),
        ({"logits": np.where(MASK, np.inf, 0.0)}, "row 0 at position 1 is inf"),
        ({"conversation": [1, 2, 3]}, "4 rows need"),
        ({"temperature": -1.0}, "sampling that cannot be"),
        ({"label": "guessed"}, "sampling that cannot be"),
    ],
)
def test_records_that_cannot_be_used_are_refused(changes, says):
    with pytest.raises(CalibrationError, match=says):
        Records(**{"logits": np.zeros((4, 3)), "accepted": MASK, **changes})


def test_the_key_says_under_which_sampling_records_were_made():
    records = Records(np.zeros((4, 3)), MASK, temperature=0.0, label="greedy_match", top_k=5)
    assert str(records.key) == "temperature 0, top_k 5, top_p 1, rule standard, label greedy_match"


def test_conversations_stay_whole_when_split():
    names = [f"math-{index % 23}" for index in range(500)]
    records = Records(np.arange(1000.0).reshape(500, 2), np.zeros((500, 2)), conversation=names)
    first, second = records.split(seed=3)
    assert {first.conversations, second.conversations} == {12, 11}
    assert len(first) + len(second) == 500
    assert not set(first.conversation) & set(second.conversation)
    assert sorted(np.concatenate([first.z, second.z])[:, 0]) == sorted(records.z[:, 0])


def test_conversations_of_some_rows_are_counted():
    records = Records(np.zeros((6, 1)), np.zeros((6, 1)), conversation=["b", "a", "c", "b", "a", "d"])
    assert [len(set(records.conversation_of[[0, 3]])), set(records.conversation_of)] == [1, {0, 1, 2, 3}]
    assert records.conversations_among(np.array([1, 1, 0, 1, 1, 0], bool)) == 2
    assert records.conversations_among(np.zeros(6, bool)) == 0


def test_the_split_depends_on_ids_and_seed_not_on_the_order_of_rows():
    names = np.array([f"chat-{index % 40}" for index in range(200)])
    order = np.random.default_rng(0).permutation(200)

    def fit_half(ids, seed):
        return set(Records(np.zeros((200, 1)), np.zeros((200, 1)), conversation=ids).split(seed)[0].conversation)

    assert fit_half(names, 0) == fit_half(names[order], 0)
    assert fit_half(names, 0) != fit_half(names, 1)


def test_taking_rows_keeps_masks_and_sampling():
    valid = np.ones((4, 3), dtype=bool)
    valid[2, 1:] = False
    records = Records(np.zeros((4, 3)), MASK, valid, temperature=0.0, label="greedy_match", top_p=0.9, rule="block")
    part = records.take(np.array([False, True, True, False]))
    assert part.survived.tolist() == [[1, 0, 0], [1, 0, 0]]
    assert part.known.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert part.conversation.tolist() == ["1", "2"]
    assert part.key == records.key


def test_groups_hold_whole_conversations():
    names = np.repeat(np.arange(30), 4)
    records = Records(np.zeros((120, 1)), np.zeros((120, 1)), conversation=names)
    groups, count = records.groups(most=7)
    assert count == 7
    assert set(groups) == set(range(7))
    assert all(len(set(groups[names == name])) == 1 for name in range(30))
    assert records.groups(most=50)[1] == 30


def test_no_rows_are_no_conversations():
    empty = Records(np.zeros((0, 2)), np.zeros((0, 2)))
    assert empty.conversations == 0
    assert [len(half) for half in empty.split()] == [0, 0]
    assert empty.groups(5)[1] == 0
