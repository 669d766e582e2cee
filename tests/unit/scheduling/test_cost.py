from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.errors import CostCurveError
from dspark.scheduling import CostCurve, DraftedCost, PrefixScheduler, isotonic


def curve(tokens, rates, most=None):
    return CostCurve(
        sample_batch_tokens=tokens,
        sample_steps_per_second=rates,
        max_batch_tokens=tokens[-1] if most is None else most,
    )


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("flat", "flat, 100 steps per second"),
        ("one-point", r"1 probe\(s\)"),
        ("not-increasing", "probe 2 is 8 after 8"),
        ("negative", "-5 steps per second at 8 tokens"),
        ("non-monotone", "rise from 80 at 8 tokens to 95 at 16 tokens"),
    ],
)
def test_a_curve_that_would_mislead_the_scheduler_is_refused_with_its_reason(cost_case, case, says):
    with pytest.raises(CostCurveError, match=says):
        cost_case(case)


def test_a_refused_rise_names_the_repair(cost_case):
    with pytest.raises(CostCurveError) as caught:
        cost_case("non-monotone")
    assert "isotonic" in caught.value.hint


@pytest.mark.parametrize("case", ["jagged-but-real", "counterexample"])
def test_real_curves_with_steps_are_accepted(cost_case, case):
    assert cost_case(case).max_batch_tokens in (64, 3)


@pytest.mark.parametrize(
    ("tokens", "rates", "most", "says"),
    [
        ([1.0, 2], [2, 1], 2, "whole number, got 1.0"),
        (["1", 2], [2, 1], 2, "whole number, got '1'"),
        ([True, 2], [2, 1], 2, "not a truth value"),
        ([0, 2], [2, 1], 2, "must be > 0, the first is 0"),
        ([-1, 2], [2, 1], 2, "must be > 0, the first is -1"),
        ([1, 2], [2, 0], 2, "0 steps per second at 2 tokens"),
        ([1, 2], [float("inf"), 1], 2, "finite"),
        ([1, 2], [2, float("nan")], 2, "finite"),
        ([1, 2], [2], 2, "2 token counts but 1 rates"),
        ([], [], 2, r"0 probe\(s\)"),
        ([1, 8], [2, 1], 7, "max_batch_tokens 7 is below the last probe 8"),
        ([1, 8], [2, 1], 8.5, "max_batch_tokens: .*whole number"),
    ],
)
def test_malformed_curves_are_refused(tokens, rates, most, says):
    with pytest.raises(CostCurveError, match=says):
        CostCurve(sample_batch_tokens=tokens, sample_steps_per_second=rates, max_batch_tokens=most)


def test_a_missing_or_unknown_key_is_a_cost_curve_error():
    with pytest.raises(CostCurveError, match="max_batch_tokens: Field required"):
        CostCurve.model_validate({"sample_batch_tokens": [1, 2], "sample_steps_per_second": [2, 1]})
    with pytest.raises(CostCurveError, match="bias_seconds"):
        CostCurve.model_validate(
            {
                "sample_batch_tokens": [1, 2],
                "sample_steps_per_second": [2, 1],
                "max_batch_tokens": 2,
                "bias_seconds": 0.1,
            }
        )


def test_numpy_integers_are_whole_numbers():
    assert curve(list(np.array([1, 4])), [2.0, 1.0], np.int64(4)).sample_batch_tokens == (1, 4)


def test_lookup_is_the_staircase_of_the_last_probe_reached():
    """SGLang's rule: floor to the last probe, first value below all probes, last value above all."""
    staircase = curve([2, 4, 8], [100, 90, 50], 20)
    assert staircase.steps_per_second([1, 2, 3, 4, 7, 8, 9, 1000]).tolist() == [100, 100, 100, 90, 90, 50, 50, 50]
    assert staircase.step_seconds(8) == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("lookup", "expected"),
    [
        ("floor", [100, 100, 100, 90, 90, 50, 50]),
        ("ceiling", [100, 100, 90, 90, 50, 50, 50]),
        # Seconds on the straight line: half-way 1/100 and 1/90, then a quarter and three quarters of 1/90 and 1/50.
        ("linear", [100, 100, 1 / (0.5 / 100 + 0.5 / 90), 90, 1 / (0.25 / 90 + 0.75 / 50), 50, 50]),
    ],
)
def test_between_probes_engines_differ(lookup: str, expected: list[float]):
    between = curve([2, 4, 8], [100, 90, 50], 20).model_copy(update={"lookup": lookup})
    np.testing.assert_allclose(between.steps_per_second([1, 2, 3, 4, 7, 8, 15]), expected, rtol=1e-14)
    np.testing.assert_array_equal(between.rate(3, [4, 7]), between.steps_per_second([4, 7]))


def test_schedulers_go_by_the_lookup():
    """R = 1, every draft certain. Sizes 1, 4 and 8 captured at 100, 80 and 30 steps/s.

    Padded to them 1 token makes 100 tokens/s, 2 make 160, .. 4 make 320, and 5 are 150: three drafts. On the staircase
    of the last probe 4 make 320 as well, but 3 make 300 and the fourth one is still paid at 80: 5 to 7 make 400 to 560.
    """
    captured = curve([1, 4, 8], [100, 80, 30])
    budgets = {
        lookup: PrefixScheduler(captured.model_copy(update={"lookup": lookup}), 7).plan(np.ones((1, 7))).budget
        for lookup in ("floor", "ceiling")
    }
    assert budgets == {"floor": 6, "ceiling": 3}


def test_a_lookup_is_written_where_it_is_not_the_staircase_and_read_again():
    staircase = curve([2, 4], [100, 90])
    assert "lookup" not in staircase.model_dump() and "lookup" not in staircase.model_dump_json()
    linear = staircase.model_copy(update={"lookup": "linear"})
    assert CostCurve.model_validate_json(linear.model_dump_json()) == linear != staircase
    with pytest.raises(CostCurveError, match=r"lookup: .*'floor', 'linear' or 'ceiling'"):
        CostCurve(sample_batch_tokens=[1, 2], sample_steps_per_second=[2, 1], max_batch_tokens=2, lookup="nearest")


def test_drafting_adds_its_seconds_by_requests():
    """20 ms of verification and 5 ms of drafting at 2 requests, 8 ms half-way to the 11 of 4: 25 and 28 ms."""
    cost = DraftedCost(curve([1, 100], [50, 49], 128), (2, 4), (0.005, 0.011))
    np.testing.assert_allclose(1 / cost.rate(2, [2, 7]), [0.025, 0.025])
    np.testing.assert_allclose(1 / cost.rate(3, 3), 0.028)
    np.testing.assert_allclose([1 / cost.rate(requests, 7) for requests in (1, 9)], [0.025, 0.031])
    assert cost.max_batch_tokens == 128


def test_beside_costly_drafting_more_tokens_pay():
    """R = 1, survival .3: verifying it takes 15 ms instead of 10. 1 / 10 > 1.3 / 15, but 1 / 20 < 1.3 / 25."""
    verification = curve([1, 2], [100, 1 / 0.015])
    assert PrefixScheduler(verification, 1).lengths([[0.3]]).tolist() == [0]
    assert PrefixScheduler(DraftedCost(verification, (1,), (0.01,)), 1).lengths([[0.3]]).tolist() == [1]


@pytest.mark.parametrize(
    ("requests", "seconds", "says"),
    [
        ((), (), "0 numbers of requests but 0 times"),
        ((1, 2), (0.1,), "2 numbers of requests but 1 times"),
        ((2, 2), (0.1, 0.2), "strictly increase"),
        ((1,), (-0.1,), "-0.1 seconds at 1 requests"),
        ((1,), (float("nan"),), "nan seconds at 1 requests"),
        ((1,), (float("inf"),), "inf seconds at 1 requests"),
    ],
)
def test_drafting_that_cannot_be_is_refused(requests, seconds, says):
    with pytest.raises(CostCurveError, match=says):
        DraftedCost(curve([1, 2], [2, 1]), requests, seconds)


def test_isotonic_leaves_a_falling_curve_as_it_is():
    repair = isotonic([1, 2, 3], [3.1, 2.2, 2.2])
    assert repair.steps_per_second == (3.1, 2.2, 2.2)
    assert repair.changes == ()
    assert repair.largest_change == 0


def test_isotonic_gives_contradicting_probes_their_mean_step_time_and_says_so():
    """1/80 s at 8 tokens and 1/95 s at 16 contradict; the mean of both step times is 2 * 80 * 95 / (80 + 95)."""
    repair = isotonic([1, 8, 16, 64], [100, 80, 95, 40])
    pooled = 2 * 80 * 95 / (80 + 95)
    np.testing.assert_allclose(repair.steps_per_second, [100, pooled, pooled, 40], rtol=1e-14)
    assert [change.tokens for change in repair.changes] == [8, 16]
    assert repair.largest_change == pytest.approx(pooled / 80 - 1)
    assert str(repair.changes[0]) == f"8 tokens: 80 -> {pooled:g} steps/s (+8.6%)"
    curve([1, 8, 16, 64], repair.steps_per_second)


def test_isotonic_weighs_probes():
    """Step times 1/2 (weight 3) and 1/4 (weight 1): mean (1.5 + 0.25) / 4 = 0.4375."""
    assert isotonic([1, 2], [2, 4], [3, 1]).steps_per_second == pytest.approx((1 / 0.4375, 1 / 0.4375))


def test_isotonic_does_not_hide_a_flat_curve():
    repair = isotonic([1, 2], [50, 60])
    with pytest.raises(CostCurveError, match="flat"):
        curve([1, 2], repair.steps_per_second)


@pytest.mark.parametrize(
    ("tokens", "rates", "weights", "says"),
    [
        ([1, 2], [1.0], None, "2 token counts, 1 rates"),
        ([1, 2], [1.0, 2.0], [1.0], "1 weights"),
        ([2, 2], [1.0, 2.0], None, "strictly increase"),
        ([1, 2], [1.0, 0.0], None, "0 steps per second"),
        ([1, 2], [1.0, 2.0], [1.0, 0.0], "weights must be > 0"),
    ],
)
def test_isotonic_refuses_what_is_not_a_measured_curve(tokens, rates, weights, says):
    with pytest.raises(CostCurveError, match=says):
        isotonic(tokens, rates, weights)


@given(st.lists(st.floats(0.5, 500), min_size=1, max_size=9))
def test_isotonic_is_the_closest_falling_curve(rates):
    """Against the closed form max-min of means of step times (Barlow et al.), computed over all pairs of ends."""
    seconds = [1 / rate for rate in rates]
    size = len(rates)
    expected = [
        max(min(np.mean(seconds[i : j + 1]) for j in range(k, size)) for i in range(k + 1)) for k in range(size)
    ]
    repaired = isotonic(list(range(1, size + 1)), rates).steps_per_second
    np.testing.assert_allclose([1 / rate for rate in repaired], expected, rtol=1e-9)
    assert all(after <= before for before, after in itertools.pairwise(repaired))
