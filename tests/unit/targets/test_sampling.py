from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark.config.models import Sampling
from dspark.targets import sampling as module
from dspark.targets.sampling import draw, log_normaliser


def law(logits, sampling):
    """The distribution that `draw` must follow, written out with a full sort in float64."""
    scaled = np.asarray(logits, dtype=np.float64) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")
    kept = order[: sampling.top_k or None]
    probs = np.exp(scaled[kept] - scaled[kept].max())
    probs /= probs.sum()
    kept = kept[np.cumsum(probs) - probs < sampling.top_p]
    result = np.zeros(len(scaled))
    result[kept] = np.exp(scaled[kept] - scaled.max())
    return result / result.sum()


def drawn_law(logits, sampling, points=20_000):
    """Shares of tokens over evenly spaced uniform numbers: the law itself, to 1/points per boundary."""
    uniforms = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    tokens = draw(torch.tensor(logits, dtype=torch.float32).expand(points, -1), sampling, uniforms)
    return np.bincount(tokens.numpy(), minlength=len(logits)) / points


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.3),
        Sampling(temperature=2.0, top_k=5),
        Sampling(top_p=0.6),
        Sampling(temperature=0.7, top_k=20, top_p=0.8),
        Sampling(top_k=1),
        Sampling(top_k=10_000),
        Sampling(temperature=5.0, top_p=0.99),  # a nucleus wider than the guess
    ],
)
def test_draws_follow_temperature_then_top_k_then_top_p(sampling):
    logits = np.random.default_rng(0).normal(size=600) * 3
    difference = np.abs(drawn_law(logits, sampling) - law(logits, sampling))
    # Each token's share is off by at most a point at either end of its interval.
    assert difference.max() <= 2.1 / 20_000


def test_rows_with_narrow_and_wide_nuclei_are_told_apart():
    """The wide row is sorted in full, the narrow one is not; both keep to their own law and uniform number."""
    generator = np.random.default_rng(1)
    narrow, wide = generator.normal(size=300) * 8, generator.normal(size=300) * 0.1
    sampling = Sampling(top_p=0.9)
    uniforms = torch.tensor([0.999, 0.999, 0.0, 0.0], dtype=torch.float64)
    logits = torch.tensor(np.stack([narrow, wide, narrow, wide]), dtype=torch.float32)
    tokens = draw(logits, sampling, uniforms).tolist()
    ranks = [int((row > row[token]).sum()) for row, token in zip(logits, tokens, strict=True)]
    assert ranks[2:] == [0, 0]
    assert ranks[0] == np.count_nonzero(law(narrow, sampling)) - 1
    assert ranks[1] >= np.count_nonzero(law(wide, sampling)) - 2  # one step from the end: u is 0.999


def test_temperature_zero_takes_the_most_likely_token_whatever_the_number():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, -1.0, 4.9]])
    for u in (0.0, 0.999999):
        assert draw(logits, Sampling(temperature=0), torch.full((2,), u, dtype=torch.float64)).tolist() == [1, 0]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=3), Sampling(top_p=0.9999)])
@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_a_token_without_probability_is_never_drawn(sampling, u):
    """Tokens 1 and 2 share all mass; their neighbours on both sides have none to speak of."""
    logits = torch.tensor([[-1e4, 0.0, 0.0, -1e4, -1e4]])
    assert draw(logits, sampling, torch.tensor([u], dtype=torch.float64)).item() in (1, 2)


def test_low_precision_logits_are_drawn_from_in_float32():
    logits = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.bfloat16).expand(9_000, -1)
    uniforms = (torch.arange(9_000, dtype=torch.float64) + 0.5) / 9_000
    shares = np.bincount(draw(logits, Sampling(), uniforms).numpy(), minlength=3) / 9_000
    # softmax(2, 1, 0), by hand
    np.testing.assert_allclose(shares, [0.66524, 0.24473, 0.09003], atol=2e-4)


def test_drawing_leaves_the_logits_alone():
    logits = torch.randn(2, 30)
    before = logits.clone()
    draw(logits, Sampling(temperature=0.5, top_p=0.9), torch.rand(2, dtype=torch.float64))
    log_normaliser(logits)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_the_normaliser_is_logsumexp(dtype, scale):
    logits = (torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)
    expected = logits.double().logsumexp(-1)
    torch.testing.assert_close(log_normaliser(logits).double(), expected, rtol=1e-6, atol=1e-5)


def test_the_guess_is_smaller_than_the_vocabularies_of_these_tests():
    """Else the path that sorts in full would go untested."""
    assert module._NUCLEUS_GUESS < 300
