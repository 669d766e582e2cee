from __future__ import annotations

import itertools

import numpy as np
import pytest
from algorithm1 import (
    block_gain,
    cost_before_admission,
    early_stop,
    not_strict,
    one_request_after_another,
    retrospective,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.errors import CalibrationError, DataError, SettingsError
from dspark.scheduling import CostCurve, PrefixScheduler, prefix_survival

APPENDIX_A = ([1, 2, 3], [1.0, 0.5, 0.45])


def make(probes, rates, gamma, most=None, **settings):
    curve = CostCurve(
        sample_batch_tokens=probes, sample_steps_per_second=rates, max_batch_tokens=most or max(probes[-1], 10_000)
    )
    return PrefixScheduler(curve, gamma, **settings)


def random_instance(generator, most_requests=6, most_gamma=7):
    """A step with ties, certainties and impossible tokens, and a curve with jags and plateaus."""
    requests, gamma = generator.integers(1, most_requests + 1), generator.integers(1, most_gamma + 1)
    confidence = generator.choice([0.0, 0.5, 0.8, 0.9, 1.0, -1.0], (requests, gamma))
    confidence = np.where(confidence < 0, generator.random((requests, gamma)) ** 0.3, confidence)
    probes = np.sort(generator.choice(np.arange(1, 60), generator.integers(2, 9), replace=False))
    falls = generator.choice([1.0, 0.999, 0.95, 0.8, 0.5], probes.size)
    falls[1] = 0.9
    return np.cumprod(confidence, axis=1), probes.tolist(), (100 * np.cumprod(falls)).tolist()


def jagged_instance(generator):
    """Few requests and every batch size probed, with steps that a look at the whole curve would jump."""
    requests, gamma = generator.integers(1, 3), generator.integers(2, 5)
    survival = np.cumprod(generator.choice([0.3, 0.8, 0.9, 1.0], (requests, gamma)), axis=1)
    probes = range(1, requests * (gamma + 1) + 1)
    falls = generator.choice([1.0, 0.98, 0.9, 0.6], len(probes))
    falls[1] = 0.9
    return survival, list(probes), (100 * np.cumprod(falls)).tolist()


def first_token_law(lengths_of):
    """Law of the first emitted token in appendix A's example, by enumeration over the drafted x_1.

    p_t = (.7, .3), p_d = (.5, .5), a_1 = .8, c_2 = .9 if x_1 = 0 else 0. A verified x_1 is accepted with probability
    min(1, p_t / p_d), else redrawn from the residual; without verification the token is drawn from p_t.
    """
    target, draft = np.array([0.7, 0.3]), np.array([0.5, 0.5])
    residual = np.maximum(target - draft, 0) / np.maximum(target - draft, 0).sum()
    law = np.zeros(2)
    for token in (0, 1):
        survival = [[0.8, 0.8 * (0.9 if token == 0 else 0.0)]]
        if lengths_of(survival)[0] == 0:
            law += draft[token] * target
        else:
            accept = min(1.0, target[token] / draft[token])
            law += draft[token] * (1 - accept) * residual
            law[token] += draft[token] * accept
    return law


def test_early_stop_does_not_look_past_a_losing_first_token(cost_case):
    """Appendix A: SPS = 1, .5, .45 and a_1 = .8 give theta_1 = .9 < 1, so nothing is admitted whatever c_2 is."""
    scheduler = PrefixScheduler(cost_case("counterexample"), 2)
    for c2 in (0.0, 0.5, 0.9, 1.0):
        assert scheduler.lengths([[0.8, 0.8 * c2]]).tolist() == [0]


def test_the_first_token_has_the_targets_law_and_the_retrospective_mutant_is_caught(cost_case):
    ours = PrefixScheduler(cost_case("counterexample"), 2).lengths
    np.testing.assert_allclose(first_token_law(ours), [0.7, 0.3], atol=1e-15)
    wrong = first_token_law(lambda survival: retrospective(survival, *APPENDIX_A))
    np.testing.assert_allclose(wrong, [0.85, 0.15], atol=1e-15)  # the paper's figures for the wrong rule


def test_lengths_equal_a_literal_algorithm_1_on_many_random_steps():
    generator = np.random.default_rng(1)
    budgets = []
    for _ in range(1500):
        survival, probes, rates = random_instance(generator)
        expected = early_stop(survival.tolist(), probes, rates)
        assert make(probes, rates, survival.shape[1]).lengths(survival).tolist() == expected
        budgets.append(sum(expected))
    assert len(set(budgets)) > 15  # the instances are not all trivial


def test_lengths_with_caps_budgets_and_gain_equal_the_literal_walk():
    generator = np.random.default_rng(2)
    for _ in range(1000):
        survival, probes, rates = random_instance(generator)
        requests, gamma = survival.shape
        caps = generator.integers(0, gamma + 2, requests)
        least = int(generator.integers(0, 4))
        limit = int(generator.integers(least, least + 12))
        gain = float(generator.choice([0.0, 0.01, 0.2]))
        most = max(probes[-1], requests + int(generator.integers(0, 20)))
        expected = early_stop(
            survival.tolist(), probes, rates, caps=caps, limit=min(limit, most - requests), least=least, gain=gain
        )
        scheduler = make(probes, rates, gamma, most, min_budget=least, max_budget=limit, min_predicted_gain=gain)
        assert scheduler.lengths(survival, caps).tolist() == expected


@pytest.mark.parametrize("mutant", [retrospective, not_strict, cost_before_admission, one_request_after_another])
def test_rules_that_are_not_algorithm_1_differ_from_it(mutant):
    generator = np.random.default_rng(3)
    different = 0
    for _ in range(500):
        survival, probes, rates = random_instance(generator)
        expected = make(probes, rates, survival.shape[1]).lengths(survival).tolist()
        different += mutant(survival.tolist(), probes, rates) != expected
    assert different > 10


def later_confidences_matter(lengths_of, generator, survival):
    """True if admission of some token k changes when confidences behind position k of its request change."""
    before = lengths_of(survival)
    for r in range(survival.shape[0]):
        for k in range(survival.shape[1] - 1):
            changed = survival.copy()
            changed[r, k + 1 :] = changed[r, k] * np.cumprod(generator.choice([0, 0.7, 1], survival.shape[1] - k - 1))
            if (before[r] > k) != (lengths_of(changed)[r] > k):
                return True
    return False


def test_no_admission_depends_on_confidences_behind_it():
    generator = np.random.default_rng(4)
    for index in range(400):
        survival, probes, rates = jagged_instance(generator) if index % 2 else random_instance(generator, 4, 4)
        options = {
            "min_budget": int(generator.integers(0, 3)),
            "max_budget": int(generator.integers(3, 20)),
            "min_predicted_gain": float(generator.choice([0, 0.05])),
        }
        scheduler = make(probes, rates, survival.shape[1], **options)
        assert not later_confidences_matter(scheduler.lengths, generator, survival)


@pytest.mark.parametrize("mutant", [retrospective, block_gain])
def test_the_causality_check_catches_rules_that_look_ahead(mutant):
    generator = np.random.default_rng(5)

    def caught():
        survival, probes, rates = jagged_instance(generator)
        return later_confidences_matter(lambda a: mutant(a.tolist(), probes, rates), generator, survival)

    assert sum(caught() for _ in range(200)) > 10


probabilities = st.floats(0, 1)


@settings(max_examples=150)
@given(st.data())
def test_confidences_behind_the_first_refused_token_change_nothing(data):
    """Whatever stands behind position lengths + 1 of any request, all lengths stay what they are."""
    requests, gamma = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    rows = st.lists(st.lists(probabilities, min_size=gamma, max_size=gamma), min_size=requests, max_size=requests)
    confidence, other = np.array(data.draw(rows)), np.array(data.draw(rows))
    falls = data.draw(st.lists(st.sampled_from([1.0, 0.97, 0.8, 0.5]), min_size=3, max_size=8))
    rates = np.cumprod([100.0, 0.99, *falls])
    scheduler = make(list(range(1, rates.size + 1)), rates.tolist(), gamma)
    lengths = scheduler.lengths(np.cumprod(confidence, axis=1))
    assert ((lengths >= 0) & (lengths <= gamma)).all()
    behind = np.arange(gamma) > lengths[:, None]
    changed = np.cumprod(np.where(behind, other, confidence), axis=1)
    assert scheduler.lengths(changed).tolist() == lengths.tolist()


@settings(max_examples=100)
@given(st.data())
def test_admitted_tokens_are_the_likeliest_and_each_raises_the_prediction(data):
    """No refused token survives more probably than an admitted one, and theta rises with every admission."""
    requests, gamma = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    rows = st.lists(st.lists(probabilities, min_size=gamma, max_size=gamma), min_size=requests, max_size=requests)
    survival = np.cumprod(np.array(data.draw(rows)), axis=1)
    rates = np.array([100, 99, 90, 89, 70, 69, 40, 39, 38, 37.0])
    scheduler = make(list(range(1, 11)), rates.tolist(), gamma)
    plan = scheduler.plan(survival)
    admitted = np.arange(gamma) < plan.lengths[:, None]
    if admitted.any() and not admitted.all():
        assert survival[admitted].min() >= survival[~admitted].max()
    values = np.sort(survival[admitted])[::-1]
    thetas = [(requests + values[:b].sum()) * rates[min(requests + b, 10) - 1] for b in range(values.size + 1)]
    assert all(later > earlier for earlier, later in itertools.pairwise(thetas))
    assert plan.tokens_per_second == pytest.approx(thetas[-1])
    assert plan.tokens_per_second_without == pytest.approx(thetas[0])
    assert plan.budget == values.size


def test_early_stop_halts_at_the_first_jag_of_a_real_curve(cost_case):
    """Two requests, survivals ~ .99: B = 16 is reached at 99 steps/s; token 15 costs the jag to 80 and is refused,
    although the plateau behind the jag (up to 32 tokens at 80 and more) predicts more: 2 + 14 * .99 = 15.86 tokens at
    99 are 1570 tokens/s, 31.7 tokens at 79 would be 2504."""
    scheduler = PrefixScheduler(cost_case("jagged-but-real"), 15)
    lengths = scheduler.lengths(np.full((2, 15), 0.99))
    assert lengths.sum() == 14
    assert scheduler.plan(np.full((2, 15), 0.99)).tokens_per_second == pytest.approx((2 + 14 * 0.99) * 99)


def test_equal_survival_goes_by_position_then_request():
    """Room for three of four certain tokens: both first positions, then request 0's second."""
    scheduler = make([1, 2], [100, 99], 2, max_budget=3)
    assert scheduler.lengths([[1.0, 1.0], [1.0, 1.0]]).tolist() == [2, 1]


def test_a_step_never_exceeds_the_engines_largest_batch():
    """Behind the last probe the staircase is level and every token looks free; the engine's limit is what holds."""
    scheduler = make([1, 2, 8], [100, 99, 98], 7, most=8)
    assert scheduler.lengths(np.full((3, 7), 0.9)).sum() == 5
    assert scheduler.lengths(np.full((9, 7), 0.9)).sum() == 0


def test_min_budget_admits_against_the_curve_but_only_its_count(cost_case):
    scheduler = PrefixScheduler(cost_case("counterexample"), 2, min_budget=1)
    assert scheduler.lengths([[0.8, 0.0]]).tolist() == [1]
    # From theta_1 = .9 the second token (1.8 + .72) * .45 = 1.134 pays again.
    assert scheduler.lengths([[0.8, 0.72]]).tolist() == [2]


def test_min_budget_yields_to_caps_and_the_largest_batch(cost_case):
    scheduler = PrefixScheduler(cost_case("counterexample"), 2, min_budget=5)
    assert scheduler.lengths([[0.8, 0.7]]).tolist() == [2]
    assert scheduler.lengths([[0.8, 0.7]], caps=[1]).tolist() == [1]


def test_min_predicted_gain_is_asked_per_request():
    """R = 2 on a level stretch: survival .1 lifts tau from 2 to 2.1, by 5 %; the hurdle is g / 2."""
    for gain, expected in ((0.099, 1), (0.101, 0)):
        scheduler = make([1, 50], [100, 50], 1, min_predicted_gain=gain)
        assert scheduler.lengths([[0.1], [0.0]]).sum() == expected


def test_survival_that_rises_along_a_block_counts_as_its_running_minimum():
    """1.5 * 60 = 90 < 100: the first token does not pay, and a larger number behind it (1.9 * 60 = 114) must not."""
    scheduler = make([1, 2, 3], [100, 60, 59], 2)
    assert scheduler.lengths([[0.5, 0.9]]).tolist() == [0]
    assert scheduler.lengths([[0.9, 0.9]]).tolist() == [2]


def test_raw_logits_go_through_the_temperatures():
    scheduler = make([1, 2], [2, 1], 2, temperatures=[2.0, 0.5])
    logits = [[1.0, -0.2], [0.3, 4.0]]
    np.testing.assert_array_equal(scheduler.survival(logits), prefix_survival(logits, [2.0, 0.5]))


def test_a_step_without_requests_plans_nothing():
    plan = make([1, 2], [2, 1], 3).plan(np.zeros((0, 3)), caps=np.zeros(0))
    assert plan.lengths.tolist() == [] and plan.budget == 0 and plan.tokens_per_second == 0


@pytest.mark.parametrize(
    ("survival", "caps", "says"),
    [
        ([[0.5, 0.5]], None, r"expected \[requests, 3\]"),
        ([0.5, 0.5, 0.5], None, "shape"),
        ([[0.5, 0.5, -0.1]], None, "not probabilities"),
        ([[1.5, 0.5, 0.1]], None, "not probabilities"),
        ([[0.5, float("nan"), 0.1]], None, "not probabilities"),
        ([[0.5, 0.4, 0.1]], [1, 2], r"caps have shape \(2,\), expected \[1\]"),
    ],
)
def test_survival_that_is_not_a_block_of_probabilities_is_refused(survival, caps, says):
    with pytest.raises(DataError, match=says):
        make([1, 2], [2, 1], 3).lengths(survival, caps)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"gamma": 0}, SettingsError, "gamma"),
        ({"min_budget": -1}, SettingsError, "min -1"),
        ({"min_budget": 3, "max_budget": 2}, SettingsError, "min 3 and max 2"),
        ({"min_predicted_gain": -0.1}, SettingsError, "min_predicted_gain"),
        ({"min_predicted_gain": float("nan")}, SettingsError, "min_predicted_gain"),
        ({"temperatures": [1.0]}, CalibrationError, "1 temperatures for 2"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, error, says):
    with pytest.raises(error, match=says):
        make([1, 2], [2, 1], **{"gamma": 2, **options})
