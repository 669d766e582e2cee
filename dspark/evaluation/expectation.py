"""What the calibrated confidences expect of the drafts, beside what became of them. numpy only.

A scheduler spends time on what confidences promise: 1 + sum over positions of the survival (DSpark, Algorithm 1). If
the sum is off, it verifies too much or too little, however well single confidences are ordered.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dspark.decoding.records import Decoded
from dspark.evaluation.results import Expectation
from dspark.measured import Measured, ratio_of_sums
from dspark.scheduling.survival import prefix_survival

Floats = NDArray[np.float64]


def expectation(
    decoded: Sequence[Decoded], temperatures: Sequence[float] | None = None, *, seed: int = 0
) -> Expectation | None:
    """Expected and measured tau over the cycles whose whole block has a known outcome (`Cycles.known`).

    Which ones these are depends on what was drafted and on the limit, not on what was accepted.

    Args:
        decoded: of one sampling, whole blocks verified, with confidences.
        temperatures: of the confidence head, [gamma]; None: not calibrated.
        seed: of the bootstrap over prompts.
    Returns:
        None if no block's outcome is known as a whole.
    """
    promised, got, cycles = [], [], []
    for one in decoded:
        whole = one.cycles.known == one.cycles.gamma
        logits = one.cycles.confidence_logits[whole]
        scales = np.ones(one.cycles.gamma) if temperatures is None else np.asarray(temperatures, np.float64)
        promised.append(float(prefix_survival(logits, scales).sum()) if len(logits) else 0.0)
        got.append(float(one.cycles.accepted[whole].sum()))
        cycles.append(float(whole.sum()))
    count: Floats = np.array(cycles)
    expected, measured = count + np.array(promised), count + np.array(got)
    parts = [ratio_of_sums(*pair, seed=seed) for pair in ((expected, count), (measured, count), (expected, measured))]
    if any(part is None for part in parts):
        return None
    tau, found, ratio = (part for part in parts if part is not None)
    low, high = ratio.ci95
    return Expectation(
        calibrated=temperatures is not None,
        tau=tau,
        measured=found,
        error=Measured(value=ratio.value - 1, n=ratio.n, ci95=(low - 1, high - 1)),
    )
