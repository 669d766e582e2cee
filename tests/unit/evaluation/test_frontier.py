from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # load_rounds.py

from load_rounds import comparison

from dspark.evaluation.frontier import Curves, Gain, speed_at_matched_throughput, throughput_at_sla

SPEEDS, THROUGHPUTS = np.array([10.0, 8.0, 5.0]), np.array([10.0, 16.0, 20.0])


@pytest.mark.parametrize(
    ("sla", "throughput"),
    [
        (12, np.nan),  # nobody is served that fast
        (10, 10),
        (9, 13),  # half-way between 10 and 8, so half-way between 10 and 16
        (6.5, 18),
        (4, 20),  # all loads are faster: the largest one
    ],
)
def test_throughput_at_a_promised_speed_is_interpolated_between_loads(sla: float, throughput: float):
    np.testing.assert_allclose(throughput_at_sla(SPEEDS, THROUGHPUTS, np.float64(sla)), throughput)


@pytest.mark.parametrize(("throughput", "speed"), [(5, 10), (13, 9), (18, 6.5), (20, 5), (21, np.nan)])
def test_speed_at_a_throughput_is_that_of_the_smallest_load_that_has_it(throughput: float, speed: float):
    np.testing.assert_allclose(speed_at_matched_throughput(SPEEDS, THROUGHPUTS, np.float64(throughput)), speed)


def test_a_load_that_is_worse_on_both_axes_is_passed_over():
    """At the third load throughput falls again. Two of the loads have 14: the faster one counts."""
    speeds, throughputs = np.array([10.0, 8.0, 5.0]), np.array([10.0, 18.0, 12.0])
    np.testing.assert_allclose(speed_at_matched_throughput(speeds, throughputs, np.float64(14)), 9)
    np.testing.assert_allclose(throughput_at_sla(speeds, throughputs, np.float64(4)), 18)


def test_curves_of_many_resamples_at_once():
    both = np.stack([SPEEDS, 2 * SPEEDS]), np.stack([THROUGHPUTS, 2 * THROUGHPUTS])
    np.testing.assert_allclose(throughput_at_sla(*both, np.array([6.5, 13.0])), [18, 36])


@pytest.fixture
def curves() -> Curves:
    """Plain decoding at one and two requests, and an arm that is twice as fast at both; four equal rounds."""
    return Curves(
        [
            comparison(1, {"none": [(10, 10)] * 4, "scheduled": [(20, 20)] * 4}),
            comparison(2, {"none": [(8, 16)] * 4, "scheduled": [(16, 32)] * 4}),
        ]
    )


def found(curves: Curves, form: str, concurrency: int | None, slas: tuple[float, ...] = ()) -> Gain:
    gains = curves.gains("scheduled", "none", slas)
    (one,) = [gain for gain in gains if (gain.form, gain.concurrency) == (form, concurrency)]
    return one


def test_the_papers_forms_are_not_ratios_at_one_number_of_requests(curves: Curves):
    """Where plain decoding serves two users, 8 tokens/s each and 16 in all, the arm serves two with 16 each and 32 in
    all and would still keep the promise with more; and one user gets 20 tokens/s out of 20 where 16 are needed."""
    sla = found(curves, "throughput_at_sla", 2)
    assert (sla.level, sla.value, sla.at_least) == (pytest.approx(8), pytest.approx(32), True)
    assert sla.ratio is not None and sla.ratio.value == pytest.approx(2) and sla.ratio.n == 4
    matched = found(curves, "speed_at_matched_throughput", 2)
    assert (matched.level, matched.value, matched.at_least) == (pytest.approx(16), pytest.approx(20), False)
    assert matched.ratio is not None and matched.ratio.value == pytest.approx(2.5)


def test_a_speed_that_somebody_promised(curves: Curves):
    """At 9 tokens/s: 13 of plain decoding, between its loads; 32 of the arm."""
    promised = found(curves, "throughput_at_sla", None, (9.0,))
    assert promised.level == 9 and promised.ratio is not None and promised.at_least
    assert promised.ratio.value == pytest.approx(32 / 13)
    assert found(curves, "throughput_at_sla", None, (18.0,)).reason == "none reaches 18 tokens/s of one user at no load"


def test_two_arms_that_were_both_cut_off_are_not_compared(curves: Curves):
    """At the largest load plain decoding gives 8 tokens/s and the arm 16: at 4 both would serve more users than two. At
    12 plain decoding serves none, however far the arm would get."""
    both = found(curves, "throughput_at_sla", None, (4.0,))
    assert (both.value, both.ratio, both.at_least) == (pytest.approx(32), None, False)
    assert both.reason == "none is still faster than that at the largest load"
    one = found(curves, "throughput_at_sla", None, (12.0,))
    assert (one.ratio, one.at_least) == (None, False)
    exact = found(curves, "throughput_at_sla", None, (8.0,))
    assert exact.ratio is not None and exact.ratio.value == pytest.approx(2) and exact.at_least


def test_what_is_out_of_reach_has_a_reason():
    slow = Curves([comparison(1, {"none": [(10, 10)] * 4, "scheduled": [(5, 5)] * 4})])
    one = found(slow, "throughput_at_sla", 1)
    assert (one.value, one.ratio) == (None, None)
    assert one.reason == "scheduled reaches 10 tokens/s of one user at no load"


def test_rounds_that_differ_give_an_interval_and_are_drawn_together():
    """Both arms are twice as fast in every other round, as on a machine that is busy: the ratio is 1.5 all the same."""
    pace = [1.0, 2.0, 1.0, 2.0]
    drifting = Curves(
        [comparison(1, {"none": [(p, p) for p in pace], "scheduled": [(1.5 * p, 1.5 * p) for p in pace]})]
    )
    one = found(drifting, "speed_at_matched_throughput", 1)
    assert one.ratio is not None and one.ratio.ci95 == pytest.approx((1.5, 1.5))


def test_rounds_in_which_the_arm_misses_the_level_count_against_it():
    """Two of four rounds have 9 tokens/s and two 11.5, 10.1 together where 10 are needed. Three or four of the slow
    ones are drawn in 5 of 16 cases, and in these the arm has nothing to show."""
    unsteady = Curves(
        [comparison(1, {"none": [(10, 10)] * 4, "scheduled": [(10, 9), (10, 11.5), (10, 9), (10, 11.5)]})]
    )
    one = found(unsteady, "speed_at_matched_throughput", 1)
    assert one.ratio is not None and one.ratio.value == pytest.approx(1)
    assert one.ratio.ci95 == (0, pytest.approx(1))
