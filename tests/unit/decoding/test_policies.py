from __future__ import annotations

import numpy as np
import pytest

from dspark.decoding.policies import Fixed, NoDrafts, Scheduled, Threshold, parse_policy
from dspark.decoding.prefixes import below_threshold
from dspark.errors import SettingsError
from dspark.scheduling.cost import CostCurve
from dspark.scheduling.prefix import PrefixScheduler


def logit(*probs: float) -> list[float]:
    return [float(np.log(p / (1 - p))) for p in probs]


BLOCKS = np.array([logit(0.9, 0.4, 0.9), logit(0.6, 0.7, 0.8), logit(0.2, 0.99, 0.99)], np.float32)


def test_no_drafts_verifies_nothing():
    assert NoDrafts().lengths(BLOCKS).tolist() == [0, 0, 0]
    assert not NoDrafts().drafts


@pytest.mark.parametrize(("k", "expected"), [(None, 3), (2, 2), (9, 3)])
def test_fixed_verifies_its_number_or_the_whole_block(k: int | None, expected: int):
    assert Fixed(k).lengths(BLOCKS).tolist() == [expected] * 3


def test_a_threshold_cuts_before_the_first_slot_below_it():
    """Per slot, not cumulative: .6 * .7 * .8 = .336 < .5, yet the second block passes whole."""
    assert Threshold(0.5).lengths(BLOCKS).tolist() == [1, 3, 0]
    assert Threshold(0.0).lengths(BLOCKS).tolist() == [3, 3, 3]


def test_a_threshold_looks_at_calibrated_confidences():
    """A temperature of 4 draws every confidence towards a half: .9 becomes .634, .4 becomes .475."""
    assert Threshold(0.6, [4.0, 4.0, 4.0]).lengths(BLOCKS).tolist() == [1, 0, 0]


def test_extreme_logits_are_certainties():
    blocks = np.array([[1e5, -1e5]], np.float32)
    assert below_threshold(blocks, 1.0).tolist() == [1]


def test_scheduled_is_algorithm_1_on_calibrated_survival():
    """Appendix A: SPS = 1, .5, .45 and a_1 = .8 admit nothing; with a free second token both of .9, .81 are admitted.

    theta_0 = 1, theta_1 = 1.9 * .999, theta_2 = 2.71 * .998 rise, so all are taken.
    """
    losing = CostCurve(sample_batch_tokens=(1, 2, 3), sample_steps_per_second=(1.0, 0.5, 0.45), max_batch_tokens=3)
    cheap = CostCurve(sample_batch_tokens=(1, 2, 3), sample_steps_per_second=(1.0, 0.999, 0.998), max_batch_tokens=3)
    assert Scheduled(PrefixScheduler(losing, 2)).lengths(np.array([logit(0.8, 0.9)], np.float32)).tolist() == [0]
    assert Scheduled(PrefixScheduler(cheap, 2)).lengths(np.array([logit(0.9, 0.9)], np.float32)).tolist() == [2]


@pytest.mark.parametrize("text", ["none", "fixed", "fixed(4)", "threshold(0.5)", "scheduled", "scheduled-delayed"])
def test_a_policy_is_known_by_the_name_that_reports_write(text: str):
    curve = CostCurve(sample_batch_tokens=(1, 2), sample_steps_per_second=(1.0, 0.5), max_batch_tokens=8)
    assert parse_policy(text, scheduler=PrefixScheduler(curve, 3)).name == text


@pytest.mark.parametrize(
    "text",
    ["", "fixed(0)", "fixed(1.5)", "threshold", "threshold(2)", "threshold(.)", "none(1)", "scheduled(1)", "best",
     "scheduled-", "-delayed", "scheduled-delayed(2)"],
)  # fmt: skip
def test_what_is_no_policy_is_refused(text: str):
    with pytest.raises(SettingsError, match="policy"):
        parse_policy(text)


def test_what_is_scheduled_needs_a_scheduler():
    for name in ("scheduled", "scheduled-delayed"):
        with pytest.raises(SettingsError, match=f"policy {name} needs a cost curve"):
            parse_policy(name)


def test_the_delayed_policy_knows_its_rows_by_request_and_forgets_with_the_batch():
    """A step of m tokens takes 4 + m ms and is sized by confidences of two steps ago, which move with their request.

    Request 7 is certain and 8 hopeless. Together: 2 / 6, 3 / 7, 4 / 8, 4 / 9 tokens per ms, so two drafts pay, and
    they are 7's in any row. 8 alone: 1 / 5, 1 / 6. One that nobody knows counts as certain: 1 / 5, 2 / 6, 3 / 7.
    """
    curve = CostCurve(
        sample_batch_tokens=tuple(range(1, 9)),
        sample_steps_per_second=tuple(1000 / (4 + tokens) for tokens in range(1, 9)),
        max_batch_tokens=8,
    )
    policy = parse_policy("scheduled-delayed", scheduler=PrefixScheduler(curve, 2))
    sure, lost = np.full((1, 2), 30, np.float32), np.full((1, 2), -30, np.float32)
    both = np.concatenate([sure, lost])
    for _ in range(2):
        policy.step(both, np.array([7, 8]))
    assert policy.step(both, np.array([7, 8])).tolist() == [2, 0]
    assert policy.step(both[::-1], np.array([8, 7])).tolist() == [0, 2]
    assert policy.step(lost, np.array([8])).tolist() == [0]
    assert policy.step(sure, np.array([9])).tolist() == [2]
    policy.begin()
    assert policy.step(lost, np.array([8])).tolist() == [2], "nothing is known of it any more"


@pytest.mark.parametrize("policy", ["threshold(0.5)", "scheduled", "scheduled-delayed"])
def test_a_policy_that_reads_confidences_refuses_a_drafter_without_a_head(policy: str):
    """Unknown confidences are NaN, which compares false: unrefused, a threshold would verify nothing, silently."""
    curve = CostCurve(sample_batch_tokens=(1, 2), sample_steps_per_second=(1.0, 0.5), max_batch_tokens=8)
    unknown = np.full((2, 3), np.nan, np.float32)
    chosen = parse_policy(policy, scheduler=PrefixScheduler(curve, 3))
    with pytest.raises(SettingsError, match="has no confidence head"):
        chosen.lengths(unknown)
    assert Fixed(2).lengths(unknown).tolist() == [2, 2] and NoDrafts().lengths(unknown).tolist() == [0, 0]
