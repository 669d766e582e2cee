"""Leading parts of blocks, as counts per row. numpy only: reports count where no torch is installed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dspark.errors import SettingsError
from dspark.scheduling.survival import confidences

Counts = NDArray[np.int64]

# Attention takes rows apart and lays them together again in every layer; less padding than this is cheaper to compute.
_LEAST_PADDING = 0.25


def leading(passed: NDArray[np.bool_]) -> Counts:
    """How many leading entries of each row are true, [rows]."""
    counted: Counts = np.logical_and.accumulate(passed, axis=1).sum(axis=1, dtype=np.int64)
    return counted


def below_threshold(
    confidence_logits: NDArray[np.floating], value: float, temperatures: NDArray[np.float64] | None = None
) -> Counts:
    """Slots before the first one whose own confidence, sigmoid(logit / temperature), is below `value`; [rows].

    Args:
        confidence_logits: raw, [rows, gamma].
        value: the threshold, a probability.
        temperatures: [gamma]; None: 1.
    Raises:
        SettingsError: a confidence is NaN: the drafter has no confidence head.
    """
    if np.isnan(confidence_logits).any():
        raise SettingsError(
            f"policy threshold({value:g}) cuts blocks by confidence, and this drafter has no confidence head",
            "use policy fixed or fixed(k)",
        )
    return leading(confidences(confidence_logits, 1.0 if temperatures is None else temperatures) >= value)


def is_worth_packing(widths: Counts) -> bool:
    """Whether rows of so many tokens, [rows], are better laid one behind the other than padded to the longest."""
    padded = len(widths) * int(widths.max())
    return padded - int(widths.sum()) >= _LEAST_PADDING * padded
