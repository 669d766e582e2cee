from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.config.models import SplitShares
from dspark.corpus.prompts import Prompt
from dspark.corpus.shapes import Message
from dspark.corpus.splits import SPLITS, apportion, assign_split, hash_position, order_key, split_unit

SHARES = SplitShares()


def prompt(*turns, template=None, domain="d", name="x"):
    roles = ("user", "assistant") * len(turns)
    messages = tuple(Message(role, text) for role, text in zip(roles, turns, strict=False))
    return Prompt(f"{domain}/{name}", domain, template, messages, "file", 1)


@pytest.mark.parametrize(
    ("name", "seed", "head"),
    [
        ("root:what is the capital of peru?", 0, "54083b0a88e6bd0b"),
        ("template:math/river-boat", 7, "ce8520461895e02c"),
        ("template:math/river-boat", 0, "f3c22b13eba8eefe"),
    ],
)
def test_a_place_is_the_head_of_a_sha256(name, seed, head):
    """Heads computed with `printf '<seed>\\0<name>' | sha256sum`: a changed rule would reshuffle users' corpora."""
    assert hash_position(name, seed) == pytest.approx(int(head, 16) / 2**64, abs=1e-15)


def test_the_shares_cut_the_places_in_the_order_of_the_splits():
    """Places of the three names above: 0.328, 0.952 and, with seed 7, 0.807; cuts at 0.76, 0.82 and 0.90."""
    assert assign_split(prompt("What is the capital of Peru?"), SHARES) == "train"
    river = prompt("any text", template="river-boat", domain="math")
    assert assign_split(river, SHARES) == "eval"
    assert assign_split(river, SHARES, seed=7) == "dev"
    wide = SplitShares(train=0.5, dev=0.1, calibration=0.2, eval=0.2)
    assert assign_split(river, wide, seed=7) == "eval"
    assert assign_split(river, SplitShares(train=0.5, dev=0.2, calibration=0.2, eval=0.1), seed=7) == "calibration"


def test_each_split_gets_its_share_of_many_roots():
    """Binomial counts of 20000: each within five standard deviations (p < 1e-6 of a false alarm)."""
    n = 20_000
    counts = dict.fromkeys(SPLITS, 0)
    for index in range(n):
        counts[assign_split(prompt(f"question {index}"), SHARES)] += 1
    for split in SPLITS:
        share = getattr(SHARES, split)
        assert abs(counts[split] - n * share) < 5 * (n * share * (1 - share)) ** 0.5


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=5))
def test_a_conversation_and_its_beginnings_fall_into_one_split(turns):
    turns = [turn.encode("utf-8", "ignore").decode() or "x" for turn in turns]
    whole = assign_split(prompt(*turns), SHARES)
    assert {assign_split(prompt(*turns[:count]), SHARES) for count in range(1, len(turns) + 1)} == {whole}


def test_white_space_case_and_accents_as_marks_do_not_part_first_turns():
    units = {
        split_unit(prompt(text)) for text in ("Caf\u00e9  au lait?", "cafe\u0301 au lait?", " CAF\u00c9 AU LAIT? ")
    }
    assert len(units) == 1


def test_the_template_alone_decides_for_templated_prompts():
    one = prompt("2 + 3", template="sum", name="1")
    other = prompt("a quite different text", template="sum", name="2")
    assert split_unit(one) == split_unit(other)
    assert split_unit(one) != split_unit(prompt("2 + 3", template="sum", domain="other"))
    assert split_unit(one) != split_unit(prompt("2 + 3"))


def test_the_order_within_a_split_is_not_that_of_the_file():
    prompts = [prompt("x", name=str(index)) for index in range(50)]
    other = prompts[25:] + prompts[:25]
    assert sorted(prompts, key=order_key) == sorted(other, key=order_key) != prompts


def test_apportion_by_hand():
    """10 among 76, 6, 8, 10: exact shares 7.6, .6, .8, 1; the largest remainders are .8, then .6 of the first."""
    assert apportion(10, [76, 6, 8, 10]) == [7, 1, 1, 1]
    assert apportion(50, [76, 6, 8, 10]) == [38, 3, 4, 5]
    assert apportion(100, [76, 6, 8, 10]) == [76, 6, 8, 10]
    assert apportion(2, [76, 6, 8, 10]) == [1, 1, 0, 0]
    assert apportion(1, [76, 6, 8, 10]) == [1, 0, 0, 0]
    assert apportion(7, [0, 0, 0, 5]) == [0, 0, 0, 5]
    assert apportion(3, [0, 0, 0, 0]) == [0, 0, 0, 0]


@given(st.integers(1, 300), st.lists(st.integers(0, 100), min_size=4, max_size=4))
def test_apportion_gives_out_all_and_leaves_no_group_empty(total, counts):
    quotas = apportion(total, counts)
    assert sum(quotas) == min(total, sum(counts))
    assert all(0 <= quota <= count for quota, count in zip(quotas, counts, strict=True))
    if total >= sum(count > 0 for count in counts):
        assert all(quota > 0 for quota, count in zip(quotas, counts, strict=True) if count)
    if total < sum(counts):  # in proportion, but for rounding and the one that an empty group was given
        for quota, count in zip(quotas, counts, strict=True):
            assert quota >= total * count / sum(counts) - 4
            assert quota <= total * count / sum(counts) + 1
