from __future__ import annotations

import numpy as np
import pytest

from dspark.decoding.records import Cycles, Decoded
from dspark.evaluation.expectation import expectation


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
