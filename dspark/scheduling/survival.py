"""From the confidence head's logits to the probability that a draft prefix survives verification."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark.errors import CalibrationError

Floats = NDArray[np.float64]


def confidences(logits: ArrayLike, temperature: float | Floats = 1.0) -> Floats:
    """c = sigmoid(z / T), elementwise and without overflow.

    Args:
        logits: raw confidence logits z, any shape; infinities are certainties.
        temperature: T > 0, a number or an array that broadcasts.
    """
    # exp may overflow to infinity, and 1 / (1 + inf) is the right answer, 0.
    with np.errstate(over="ignore"):
        result: Floats = 1.0 / (1.0 + np.exp(-np.asarray(logits, dtype=np.float64) / temperature))
    return result


def prefix_survival(logits: ArrayLike, temperatures: ArrayLike) -> Floats:
    """Probability that each draft prefix survives verification.

    a[r, j] = prod_{i<=j} sigmoid(z[r, i] / T[i])      (DSpark, section 3.2.2)

    Args:
        logits: raw confidence logits z, [requests, gamma].
        temperatures: T > 0, [gamma].
    Returns:
        [requests, gamma], non-increasing along the last axis.
    Raises:
        CalibrationError: if a temperature is not a positive finite number, if the temperatures are not one per draft
            position, or if a logit is NaN.
    """
    scales = check_temperatures(temperatures)
    values = np.asarray(logits, dtype=np.float64)
    if values.ndim != 2 or values.shape[1] != scales.size:
        raise CalibrationError(
            f"confidence logits have shape {values.shape}, {scales.size} temperatures need [requests, {scales.size}]"
        )
    if np.isnan(values).any():
        row, position = np.argwhere(np.isnan(values))[0]
        raise CalibrationError(f"confidence logit of request {row} at position {position + 1} is NaN")
    return np.cumprod(confidences(values, scales), axis=1, dtype=np.float64)


def check_temperatures(temperatures: ArrayLike, gamma: int | None = None) -> Floats:
    """The temperatures as an array [gamma].

    Raises:
        CalibrationError: if they are empty, not one per draft position (where `gamma` is given), or not all positive
            and finite; names the position, counted from 1.
    """
    scales: Floats = np.asarray(temperatures, dtype=np.float64)
    if scales.ndim != 1 or scales.size == 0:
        raise CalibrationError(f"temperatures must be one number per draft position, got shape {scales.shape}")
    if gamma is not None and scales.size != gamma:
        raise CalibrationError(f"{scales.size} temperatures for {gamma} draft positions")
    wrong = np.flatnonzero(~(np.isfinite(scales) & (scales > 0)))
    if wrong.size:
        raise CalibrationError(f"temperature of position {wrong[0] + 1} is {scales[wrong[0]]:g}, it must be > 0")
    return scales
