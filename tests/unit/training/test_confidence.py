from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.drafters.heads import ConfidenceHead
from dspark.errors import StageError
from dspark.training.confidence import CELLS, ConfidenceFit, confidence_sums, fit_confidence


def stated(scale, shift, n=200_000, seed=0):
    """Logits of a head and acceptances whose log-odds are scale * z + shift."""
    z = torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 2 + 1
    return z, torch.sigmoid(scale * z + shift)


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (0.7, -0.8), (1.4, 0.5), (0.3, -2.0)])
def test_the_log_odds_of_acceptance_are_found(scale, shift):
    fit = fit_confidence(confidence_sums(*stated(scale, shift)))
    assert (fit.scale, fit.shift) == pytest.approx((scale, shift), abs=5e-3)


def test_it_is_the_minimum_of_the_entropy_of_single_slots():
    """Against a search over single slots, without cells and without Newton."""
    z, acceptance = stated(0.6, -0.9, n=3000, seed=1)
    acceptance = (torch.rand(3000, generator=torch.Generator().manual_seed(2)) < acceptance).float()
    fit = fit_confidence(confidence_sums(z, acceptance))

    def loss(scale, shift):
        logits = (scale * z + shift).double()
        entropy = torch.nn.functional.binary_cross_entropy_with_logits(logits, acceptance.double(), reduction="sum")
        return float(entropy) + ((scale - 1) ** 2 + shift**2) / 2

    least = loss(fit.scale, fit.shift)
    around = [loss(fit.scale + a, fit.shift + b) for a in np.linspace(-0.1, 0.1, 9) for b in np.linspace(-0.1, 0.1, 9)]
    assert least <= min(around) + 1e-3


def test_sums_of_parts_add_up():
    z, acceptance = stated(0.7, -0.8, n=1000)
    parts = confidence_sums(z[:300], acceptance[:300]) + confidence_sums(z[300:], acceptance[300:])
    assert torch.allclose(parts, confidence_sums(z, acceptance), atol=1e-4)


def test_nothing_seen_changes_nothing():
    assert fit_confidence(torch.zeros(3 * CELLS)) == ConfidenceFit(1.0, 0.0)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("which", "name"), [(0, "its logits"), (1, "the acceptances")])
def test_one_value_that_is_not_finite_stops_the_stage_by_name(which, name, broken):
    """Among 1000 slots, and however many sums are added to those it is in."""
    slots = stated(0.7, -0.8, n=1000)
    slots[which][417] = broken
    sums = confidence_sums(*slots) + confidence_sums(*stated(0.7, -0.8, n=1000, seed=3))
    with pytest.raises(StageError, match=f"confidence head: {name}.* on the dev split are not finite") as caught:
        fit_confidence(sums)
    assert "training.learning_rate" in caught.value.hint


@pytest.mark.parametrize("accepted", [0.0, 1.0])
def test_one_outcome_alone_is_survived(accepted):
    """All or nothing accepted has no finite best fit; the prior keeps it finite, on the right side."""
    z = torch.linspace(-3, 3, 500)
    fit = fit_confidence(confidence_sums(z, torch.full((500,), accepted)))
    mean = torch.sigmoid(fit.scale * z + fit.shift).mean()
    assert np.isfinite([fit.scale, fit.shift]).all() and abs(float(mean) - accepted) < 0.05


def test_the_order_of_confidences_is_kept():
    """A head that is wrong way round would ask for a negative scale."""
    fit = fit_confidence(confidence_sums(*stated(-1.0, -0.5)))
    assert fit.scale == pytest.approx(0.05) and fit.shift < 0


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(-60, 60), st.floats(0, 1)), min_size=1, max_size=40))
def test_the_mean_confidence_becomes_the_mean_acceptance_as_far_as_the_prior_lets_it(slots):
    z, acceptance = (torch.tensor(values, dtype=torch.float32) for values in zip(*slots, strict=True))
    fit = fit_confidence(confidence_sums(z, acceptance))
    assert fit.scale >= 0.05 - 1e-9 and np.isfinite(fit.shift)
    gap = float((torch.sigmoid(fit.scale * z.clamp(-30, 30) + fit.shift) - acceptance).sum())
    assert gap == pytest.approx(-fit.shift, abs=2e-2 * len(slots) + 1e-3)  # the slope of the loss in the shift is 0


def test_folding_states_what_the_fit_says(config):
    head = ConfidenceHead(config)
    hidden, embedded = torch.randn(5, config.hidden_size), torch.randn(5, config.markov_rank)
    before = head(hidden, embedded).detach()
    ConfidenceFit(0.6, -0.7).fold(head)
    assert torch.allclose(head(hidden, embedded), 0.6 * before - 0.7, atol=1e-6)
