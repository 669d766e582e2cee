from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from dspark.calibration import Records, assess, fit_temperatures
from dspark.decoding.history import History, Timing
from dspark.decoding.records import Cycles, Decoded, calibration_records
from dspark.evaluation.acceptance import measure_acceptance
from dspark.evaluation.expectation import expectation

EOS = 1


def decoded(logits, accepted, known=None):
    """One request; blocks of two drafts."""
    count, gamma = np.shape(logits)
    accepted = np.array(accepted)
    cycles = Cycles(
        drafted=np.zeros((count, gamma), np.int32),
        verified=np.full(count, gamma),
        accepted=accepted,
        committed=accepted + 1,
        known=np.full(count, gamma) if known is None else np.array(known),
        confidence_logits=np.array(logits, np.float32),
        draft_seconds=np.ones(count),
        verify_seconds=np.ones(count),
        rows=np.ones(count, np.int32),
    )
    return Decoded(3, [5] * (1 + int(cycles.committed.sum())), "length", 0.0, "fixed", 0.1, cycles)


def test_by_hand():
    """Confidences 1/2 and 3/4: survival .5 + .375, so 1.875 is promised; 2 and 1 accepted of two blocks: 2.5 came."""
    found = expectation([decoded([[0, np.log(3)]] * 2, [2, 1])])
    assert found.tau.value == pytest.approx(1.875) and found.measured.value == 2.5
    assert found.error.value == pytest.approx(1.875 / 2.5 - 1) and not found.calibrated and found.error.n == 1


def test_temperatures_are_applied():
    found = expectation([decoded([[2 * np.log(3), 0]], [0])], [2.0, 1.0])
    assert found.calibrated and found.tau.value == pytest.approx(1 + 0.75 + 0.375)


def test_blocks_without_a_whole_outcome_are_left_out():
    found = expectation([decoded([[0, 0], [9, 9]], [1, 1], known=[2, 1]), decoded([[0, 0]], [2])])
    assert found.tau.value == pytest.approx(1.75) and found.measured.value == 2.5 and found.tau.n == 2
    assert expectation([decoded([[0, 0]], [0], known=[0])]) is None


def test_confidences_that_are_right_promise_what_comes():
    generator = np.random.default_rng(0)
    logits = generator.normal(0.5, 1, (4000, 3))
    hits = generator.random((4000, 3)) < 1 / (1 + np.exp(-logits))
    accepted = np.cumprod(hits, axis=1).sum(axis=1)
    parts = np.array_split(np.arange(4000), 50)
    found = expectation([decoded(logits[part], accepted[part]) for part in parts])
    low, high = found.error.ci95
    assert abs(found.error.value) < 0.03 and low < 0 < high
    doubled = expectation([decoded(logits + 1, accepted)])
    assert doubled.error.value > 0.2


def right_drafts_with_ends() -> list[Decoded]:
    """Every outcome of blocks of three drafts that are each accepted four times in five, as often as it occurs.

    One block in five drafts an end of sequence, at each position alike; ends are accepted as often as other drafts.
    """
    decoded = []
    for end in [None] * 12 + [0, 1, 2]:
        drafts = [EOS if place == end else 7 for place in range(3)]
        for coins in product(range(5), repeat=3):
            accepted = [*(coin < 4 for coin in coins), False].index(False)
            one = History(4, 3, 20, frozenset({EOS}), 0.0, "fixed")
            one.begin(5, 0.1)
            one.add(drafts, 3, accepted, EOS, np.full(3, np.log(4), np.float32), Timing(0.1, 0.1, 1))
            decoded.append(one.result())
    return decoded


def test_drafted_ends_do_not_make_right_confidences_look_wrong():
    """By enumeration, so without noise: 1 + .8 + .64 + .512 tokens come, as promised, and T = 1 is right.

    With what lies behind an end counted where the end was rejected, and only there, position 3 would be accepted in
    less than .512 of the blocks, and less would come than 2.952.
    """
    decoded = right_drafts_with_ends()
    found = expectation(decoded)
    assert found.measured.value == pytest.approx(2.952) and found.tau.value == pytest.approx(2.952, rel=1e-6)
    records = Records(**vars(calibration_records(decoded)))
    positions = assess(records, [1, 1, 1]).positions
    assert [one.accepted / one.samples for one in positions] == pytest.approx([0.8, 0.64, 0.512])
    assert max(one.ece_before.value for one in positions) < 1e-6
    assert fit_temperatures(records).temperatures == (1.0, 1.0, 1.0)


def test_acceptance_and_tau_are_right_where_ends_are_drafted():
    """Four in five at each position, of what got there. A block brings 1 + .8 + .64 + .512 tokens; one that drafts an
    end at the first position always 1, the end or another token; at the second 1 + .8, at the third 1 + .8 + .64."""
    figures = measure_acceptance(right_drafts_with_ends())
    assert [one.value for one in figures.conditional] == pytest.approx([0.8] * 3)
    assert [one.value for one in figures.marginal] == pytest.approx([0.8, 0.64, 0.512])
    assert figures.tau.value == pytest.approx((12 * 2.952 + 1 + 1.8 + 2.44) / 15)
