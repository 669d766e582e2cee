from __future__ import annotations

import math

import numpy as np
import pytest

from dspark.errors import CalibrationError
from dspark.scheduling import confidences, prefix_survival


def logit(p):
    return math.log(p / (1 - p))


def test_survival_is_the_running_product_of_calibrated_confidences():
    """SGLang's golden vector: confidences .9 .8 .5 and .6 .5 .4; products taken by hand."""
    logits = [[logit(0.9), logit(0.8), logit(0.5)], [logit(0.6), logit(0.5), logit(0.4)]]
    expected = [[0.9, 0.72, 0.36], [0.6, 0.3, 0.12]]
    np.testing.assert_allclose(prefix_survival(logits, [1, 1, 1]), expected, rtol=1e-14)


def test_a_temperature_divides_the_logit_of_its_own_position_only():
    """sigmoid(2z / 2) = sigmoid(z): doubled logits with T = 2 at position 2 give back the undoubled ones."""
    z = np.array([[0.3, -1.1, 2.0]])
    np.testing.assert_allclose(prefix_survival(z * [1, 2, 1], [1, 2, 1]), prefix_survival(z, [1, 1, 1]), rtol=1e-14)


def test_extreme_logits_give_certainties_without_a_warning(recwarn):
    assert confidences([-1e6, 1e6, -math.inf, math.inf]).tolist() == [0, 1, 0, 1]
    assert not recwarn.list


def test_small_confidences_keep_their_relative_precision():
    assert confidences(-30.0) == pytest.approx(math.exp(-30) / (1 + math.exp(-30)), rel=1e-14)


def test_no_requests_give_no_rows():
    assert prefix_survival(np.zeros((0, 3)), [1, 1, 1]).shape == (0, 3)


@pytest.mark.parametrize(
    ("logits", "temperatures", "says"),
    [
        ([[0.0, 0.0]], [1.0], r"shape \(1, 2\), 1 temperatures need"),
        ([0.0, 0.0], [1.0, 1.0], "shape"),
        ([[0.0, 0.0]], [1.0, 0.0], "position 2 is 0"),
        ([[0.0, 0.0]], [-1.0, 1.0], "position 1 is -1"),
        ([[0.0, 0.0]], [1.0, math.inf], "position 2 is inf"),
        ([[0.0, 0.0]], [1.0, math.nan], "position 2 is nan"),
        ([[0.0]], [[1.0]], "one number per draft position"),
        ([[]], [], "one number per draft position"),
        ([[0.0, 0.0], [0.0, math.nan]], [1.0, 1.0], "request 1 at position 2 is NaN"),
    ],
)
def test_logits_and_temperatures_that_cannot_be_used_are_refused(logits, temperatures, says):
    with pytest.raises(CalibrationError, match=says):
        prefix_survival(logits, temperatures)
