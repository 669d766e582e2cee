import numpy as np
import pytest

from dspark.training.anchors import anchor_candidates, draw_anchors, response_mask, spaced_anchors, supervised_slots


def mask(text):
    """`..##` : two prompt tokens, two response tokens."""
    return np.array([character == "#" for character in text])


def test_an_anchor_and_its_successor_are_response_tokens():
    """The last prompt token (1) is none, nor is the last token (5): nothing follows it."""
    assert anchor_candidates(mask("..####")).tolist() == [2, 3, 4]
    assert anchor_candidates(mask(".##..##")).tolist() == [1, 5]
    assert anchor_candidates(mask("..#")).tolist() == []
    assert anchor_candidates(mask("#.#.#")).tolist() == []
    assert response_mask(4, 2).tolist() == [False, False, True, True]


def test_slots_are_supervised_until_the_first_position_that_is_no_response():
    """gamma 3; labels of anchor p are p+1, p+2, p+3. The turn ends at 3, another begins at 5."""
    turns = mask(".###.##")
    found = supervised_slots(turns, np.array([1, 2, 3, 5]), 3)
    assert found.tolist() == [
        [True, True, False],  # 2, 3, not 4
        [True, False, False],  # 3, not 4; 5 is a response again but not contiguous
        [False, False, False],
        [True, False, False],  # 6, then the sequence ends
    ]


def test_draws_are_distinct_sorted_candidates_and_depend_on_the_key_alone():
    turn = response_mask(50, 10)
    one = draw_anchors(turn, 8, (0, 3, 7))
    assert len(set(one.tolist())) == 8
    assert one.tolist() == sorted(one.tolist())
    assert set(one.tolist()) <= set(range(10, 49))
    assert one.tolist() == draw_anchors(turn, 8, (0, 3, 7)).tolist()
    for key in [(1, 3, 7), (0, 4, 7), (0, 3, 8)]:
        assert one.tolist() != draw_anchors(turn, 8, key).tolist()


def test_draws_are_uniform_over_the_candidates():
    """2000 draws of 2 from 8: each candidate 500 +- 5 standard deviations of 19.4."""
    turn = response_mask(10, 1)
    counts = np.bincount(np.concatenate([draw_anchors(turn, 2, (0, step)) for step in range(2000)]), minlength=10)
    assert counts[[0, 9]].tolist() == [0, 0]
    assert abs(counts[1:9] - 500).max() < 97


@pytest.mark.parametrize("choose", [lambda m, n: draw_anchors(m, n, (0,)), spaced_anchors])
def test_few_candidates_are_all_taken(choose):
    assert choose(response_mask(6, 2), 9).tolist() == [2, 3, 4]
    assert choose(response_mask(3, 2), 9).tolist() == []


def test_spaced_anchors_reach_from_the_first_candidate_to_the_last():
    assert spaced_anchors(response_mask(12, 1), 4).tolist() == [1, 4, 7, 10]
