"""Arrivals of an open-loop load: the law they follow, worked out by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from pydantic import ValidationError

from dspark.config.models import LiveLoadSettings
from dspark.errors import DataError, SettingsError
from dspark.evaluation.trace import Rates, duration, make_trace

DOMAINS = ("code", "chat", "code", "math", "chat", "code")
RATES = Rates(0.5, 8.0)


def test_the_rate_doubles_in_equal_times_up_and_down():
    """From 0.5 to 8 in four doublings, one per eighth of the trace, and back."""
    expected = [0.5, 1, 2, 4, 8, 4, 2, 1, 0.5]
    np.testing.assert_allclose(RATES.at(np.linspace(0, 1, 9)), expected)
    grid = np.linspace(0, 1, 200_001)
    assert RATES.mean == pytest.approx(float(np.mean(RATES.at(grid))), rel=1e-4)
    assert Rates(3.0, 3.0).mean == 3.0


def test_a_trace_is_its_arguments_and_nothing_else():
    settings = LiveLoadSettings(seconds=30)
    assert make_trace(settings, RATES, DOMAINS, 5) == make_trace(settings, RATES, DOMAINS, 5)
    assert make_trace(settings, RATES, DOMAINS, 5) != make_trace(settings, RATES, DOMAINS, 6)


def test_arrivals_are_a_poisson_process_of_that_rate():
    """400 traces of 40 s: counts have the mean 40 x mean rate and, as Poisson counts do, the same variance.

    The sample variance of 400 Poisson counts is within 25 % of it, four of its standard deviations. Arrivals fall into
    eighths of the trace in proportion to the rate's integral over them, (after - before) / ln 2 of a doubling each.
    """
    traces = [make_trace(LiveLoadSettings(seconds=40), RATES, DOMAINS, seed) for seed in range(400)]
    counts = np.array([len(one.arrivals) for one in traces])
    mean = 40 * RATES.mean
    assert counts.mean() == pytest.approx(mean, abs=4 * (mean / 400) ** 0.5)
    assert counts.var() == pytest.approx(mean, rel=0.25)
    moments = np.array([arrival.seconds for one in traces for arrival in one.arrivals])
    assert all(list(one.arrivals) == sorted(one.arrivals, key=lambda arrival: arrival.seconds) for one in traces)
    expected = np.array([0.5, 1, 2, 4, 4, 2, 1, 0.5]) / 15 * len(moments)
    found = np.histogram(moments, np.linspace(0, 40, 9))[0]
    assert ((found - expected) ** 2 / expected).sum() < 27, "chi-square, 7 degrees of freedom: 1 in 3000"


def test_so_many_requests_come_for_as_long_as_that_takes():
    settings = LiveLoadSettings(requests=90)
    one = make_trace(settings, RATES, DOMAINS, 1)
    assert len(one.arrivals) == 90 and one.seconds == duration(settings, RATES) == pytest.approx(90 / RATES.mean)
    assert one.arrivals[0].seconds >= 0 and one.arrivals[-1].seconds <= one.seconds


def test_domains_are_mixed_evenly_and_their_prompts_come_in_turn():
    """Three domains of 3, 2 and 1 prompts: each a third of 3000 arrivals, 8 standard deviations of 26 aside."""
    arrivals = make_trace(LiveLoadSettings(requests=3000), RATES, DOMAINS, 0).arrivals
    names = np.array([DOMAINS[one.prompt] for one in arrivals])
    for name in ("code", "chat", "math"):
        assert abs((names == name).sum() - 1000) < 210
    assert len(set(itertools.pairwise(names))) == 9, "every domain follows every other one"
    code = [one.prompt for one in arrivals if DOMAINS[one.prompt] == "code"]
    assert all(set(code[start : start + 3]) == {0, 2, 5} for start in range(0, len(code) - 3, 3))
    only = make_trace(LiveLoadSettings(requests=20, domains=("math",)), RATES, DOMAINS, 0).arrivals
    assert {one.prompt for one in only} == {3}


def test_loads_that_cannot_be_are_refused():
    with pytest.raises(DataError, match="no prompt of domain law"):
        make_trace(LiveLoadSettings(requests=3, domains=("law", "code")), RATES, DOMAINS, 0)
    with pytest.raises(DataError, match="no prompt of domain any"):
        make_trace(LiveLoadSettings(requests=3), RATES, (), 0)
    for rates in ((0.0, 1.0), (2.0, 1.0)):
        with pytest.raises(SettingsError, match="must be > 0 and must not fall"):
            Rates(*rates)
    with pytest.raises(ValidationError, match="name one"):
        LiveLoadSettings(seconds=10, requests=10)
    with pytest.raises(ValidationError, match="the lowest rate comes first"):
        LiveLoadSettings(requests_per_second=(2.0, 1.0))
    assert LiveLoadSettings.model_validate(LiveLoadSettings(requests=4).model_dump()).requests == 4
