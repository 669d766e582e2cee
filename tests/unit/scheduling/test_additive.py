from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.errors import CostCurveError
from dspark.scheduling import AdditiveCost, Cell, ModelErrors, fit_additive

GOLDEN = {
    "bias_seconds": 0.01,
    "requests": [1, 4],
    "alpha_seconds": [0.0, 0.003],
    "tokens": [2, 8],
    "theta_seconds": [0.0, 0.006],
}
SHAPES = [(requests, requests * (1 + drafts)) for requests in (1, 2, 4, 8) for drafts in (0, 1, 3, 7)]


def cells(seconds, shapes=SHAPES):
    return [Cell(requests, tokens, seconds(requests, tokens)) for requests, tokens in shapes]


def test_sglangs_own_example_gives_its_budget_and_its_prediction():
    """engine-formats.md, 1.3, executed against SGLang 0.5.23: two requests, survival from these confidences; budget 4,
    a step of 15 ms, 305.33 tokens/s."""
    cost = AdditiveCost(**GOLDEN)
    survival = np.cumprod([[0.9, 0.8, 0.5], [0.6, 0.5, 0.4]], axis=1)
    tau = 2 + np.concatenate(([0.0], np.cumsum(np.sort(survival.ravel())[::-1])))
    seconds = cost.seconds(2, 2 + np.arange(7))
    theta = tau / seconds
    assert int(theta.argmax()) == 4
    assert float(seconds[4]) == pytest.approx(0.015)
    assert float(theta[4]) == pytest.approx(305.33, abs=0.005)


def test_parts_are_interpolated_and_keep_their_ends():
    """By hand: at 2 requests alpha is a third of the way, 1 ms; at 5 tokens theta is half-way, 3 ms."""
    cost = AdditiveCost(**GOLDEN)
    assert cost.seconds(2, 5) == pytest.approx(0.010 + 0.001 + 0.003)
    np.testing.assert_allclose(cost.seconds([1, 4, 99, 1], [1, 8, 99, 2]), [0.010, 0.019, 0.019, 0.010])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"bias_seconds": 0.0}, "the bias is 0 seconds"),
        ({"bias_seconds": -0.01}, "the bias is -0.01 seconds"),
        ({"bias_seconds": float("inf")}, "bias_seconds: .*finite"),
        ({"theta_seconds": [0.006, 0.0]}, "8 tokens would cost less"),
        ({"theta_seconds": [0.006, 0.006]}, "flat, tokens cost nothing"),
        ({"tokens": [2], "theta_seconds": [0.006]}, "flat, tokens cost nothing"),
        ({"theta_seconds": [0.0, float("nan")]}, "theta_seconds.1: .*finite"),
        ({"theta_seconds": [-0.02, 0.006]}, "cheapest step would take -0.01 seconds"),
        ({"alpha_seconds": [0.0, -0.01]}, "cheapest step would take 0 seconds"),
        ({"tokens": [8, 2]}, "tokens must be > 0 and strictly increase"),
        ({"tokens": [0, 8]}, "tokens must be > 0"),
        ({"requests": [4, 4]}, "requests must be > 0 and strictly increase"),
        ({"requests": [1.0, 4]}, "whole number"),
        ({"requests": [1]}, "1 probes of requests but 2 values"),
        ({"requests": [], "alpha_seconds": []}, "0 probes of requests"),
        ({"max_batch_tokens": 8}, "max_batch_tokens: Extra inputs"),
    ],
)
def test_a_cost_that_would_mislead_is_refused_with_its_reason(changes, says):
    with pytest.raises(CostCurveError, match=says):
        AdditiveCost(**{**GOLDEN, **changes})


def test_a_sum_of_two_parts_is_found_exactly():
    """Steps of 10 ms + 2 ms a request + 0.7 ms a token: at the first shape, one of each, 12.7 ms."""
    measured = cells(lambda requests, tokens: 0.010 + 0.002 * requests + 0.0007 * tokens)
    cost = fit_additive(measured)
    assert cost.bias_seconds == pytest.approx(0.0127)
    assert (cost.requests, cost.tokens) == ((1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64))
    np.testing.assert_allclose(cost.alpha_seconds, [0, 0.002, 0.006, 0.014], atol=1e-12)
    np.testing.assert_allclose(cost.theta_seconds, 0.0007 * (np.array(cost.tokens) - 1), atol=1e-12)
    for cell in measured:
        assert float(cost.seconds(cell.requests, cell.tokens)) == pytest.approx(cell.seconds)


def test_token_counts_that_lie_close_together_share_probes():
    """Blocks of four at 1 and 2 requests: 1 2 3 5 and 2 4 6 10 tokens. From 1 on, the next at least half as much again
    is 2, then 3, then 5, then 10; 4 is too close to 3 and 6 to 5. What lies between is met all the same."""
    shapes = [(requests, requests * width) for requests in (1, 2) for width in (1, 2, 3, 5)]
    measured = cells(lambda requests, tokens: 0.010 + 0.005 * requests + 0.0002 * tokens, shapes)
    cost = fit_additive(measured)
    assert cost.tokens == (1, 2, 3, 5, 10)
    for cell in measured:
        assert float(cost.seconds(cell.requests, cell.tokens)) == pytest.approx(cell.seconds)


def test_the_last_token_count_is_always_a_probe():
    """8 lies half as much again above 5, but 9, the last one, lies close to 8 and takes its place."""
    shapes = [(1, 1), (1, 3), (1, 5), (1, 8), (3, 3), (3, 5), (3, 9)]
    assert fit_additive(cells(lambda requests, tokens: 0.01 + 0.001 * tokens, shapes)).tokens == (1, 3, 5, 9)


def test_contradicting_tokens_share_one_value():
    """With 1 and with 2 requests, 4 tokens measured faster than 2. They share one value, and the three numbers that are
    left are the best ones: none of their neighbours on a grid fits better."""
    shapes = [(1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (2, 8)]
    seconds = dict(zip(shapes, [0.012, 0.010, 0.020, 0.014, 0.012, 0.022], strict=True))
    cost = fit_additive([Cell(*shape, value) for shape, value in seconds.items()])
    assert cost.theta_seconds[0] == cost.theta_seconds[1] == 0 < cost.theta_seconds[2]

    def loss(bias, alpha, theta):
        return sum(((bias + alpha * (r - 1) + theta * (m == 8)) / seconds[r, m] - 1) ** 2 for r, m in shapes)

    found = loss(cost.bias_seconds, cost.alpha_seconds[1], cost.theta_seconds[2])
    steps = (-1e-5, 0.0, 1e-5)
    around = [
        loss(cost.bias_seconds + x, cost.alpha_seconds[1] + y, cost.theta_seconds[2] + z)
        for x, y, z in itertools.product(steps, repeat=3)
    ]
    assert found == min(around)


@settings(max_examples=60)
@given(st.lists(st.floats(0.3, 3.0), min_size=len(SHAPES), max_size=len(SHAPES)), st.integers(0, 2**32 - 1))
def test_no_cost_with_a_rising_theta_is_closer(noise, seed):
    """Noise of up to threefold; random ones with a theta that does not fall are never better than the fit."""
    measured = [
        Cell(requests, tokens, (0.01 + 0.001 * requests + 0.0005 * tokens) * factor)
        for (requests, tokens), factor in zip(SHAPES, noise, strict=True)
    ]
    try:
        cost = fit_additive(measured)
    except CostCurveError:
        return  # a bias below zero, or flat: refused, which is tested elsewhere
    assert all(after >= before for before, after in itertools.pairwise(cost.theta_seconds))
    rows = [cost.requests.index(cell.requests) for cell in measured]
    columns = [cost.tokens.index(cell.tokens) for cell in measured]
    goal = np.array([cell.seconds for cell in measured])

    def loss(alpha, theta):
        return float((((alpha[rows] + theta[columns]) / goal - 1) ** 2).sum())

    alpha, theta = cost.bias_seconds + np.array(cost.alpha_seconds), np.array(cost.theta_seconds)
    found = loss(alpha, theta)
    generator = np.random.default_rng(seed)
    for scale in np.repeat([1e-2, 1e-3, 1e-4, 1e-5], 25):
        other = np.maximum.accumulate(theta + generator.normal(0, scale, theta.size))
        assert loss(alpha + generator.normal(0, scale, alpha.size), other) >= found - 1e-9


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ([], "0 shapes of steps, at least 4"),
        ([(1, 1), (1, 2), (2, 2)], "3 shapes of steps, at least 4"),
        ([(1, 4), (2, 8), (4, 16), (8, 32)], "do not vary apart"),  # whole blocks only
        ([(2, 2), (2, 4), (2, 8), (2, 16)], "do not vary apart"),  # one number of requests
        ([(1, 2), (1, 4), (3, 6), (3, 12)], "do not vary apart"),  # no tokens in common
        ([(1, 1), (2, 2), (1, 1), (4, 4), (8, 8)], "do not vary apart"),
    ],
)
def test_a_design_that_cannot_tell_the_parts_apart_is_refused(shapes, says):
    with pytest.raises(CostCurveError, match=says):
        fit_additive(cells(lambda requests, tokens: 0.01 + 0.001 * tokens, shapes))


def test_steps_that_do_not_depend_on_tokens_are_refused():
    with pytest.raises(CostCurveError, match="flat"):
        fit_additive(cells(lambda requests, tokens: 0.01 + 0.001 * requests))


def test_steps_without_a_bias_are_refused():
    """Three shapes at two tokens say that one request more saves more than a step of one request takes."""
    measured = [Cell(1, 2, 0.001), Cell(1, 4, 0.5), Cell(2, 4, 0.001), Cell(2, 8, 0.6)]
    with pytest.raises(CostCurveError, match="cheapest step would take"):
        fit_additive(measured)


@pytest.mark.parametrize("seconds", [0.0, -0.1, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(seconds):
    measured = [*cells(lambda requests, tokens: 0.01 + 0.001 * tokens), Cell(3, 9, seconds)]
    with pytest.raises(CostCurveError, match="seconds at 3 requests and 9 tokens"):
        fit_additive(measured)


def test_errors_say_which_model_is_closer_and_equal_ones_prefer_the_simpler():
    errors = ModelErrors(cells=9, curve_relative_error=0.04, additive_relative_error=0.012)
    assert errors.additive_is_closer
    assert "9 measured shapes" in str(errors) and "4.0%" in str(errors) and "1.2%" in str(errors)
    assert not errors.model_copy(update={"additive_relative_error": 0.04}).additive_is_closer
