"""tau offline against tau in an engine, on the same prompts."""

from __future__ import annotations

from typing import Any

from dspark.errors import SettingsError
from dspark.evaluation.entry import Agreement
from dspark.evaluation.paired import Counts, relative_difference
from dspark.measured import ratio_of_sums


def compare_taus(offline: Counts, engine: Counts, *, tolerance: float, seed: int = 0) -> Agreement:
    """`agrees` within the tolerance; beyond it `disagrees` if the whole interval is, else `inconclusive`.

    Args:
        offline, engine: tokens committed in cycles, and cycles, per prompt [n] each, in the same order.
        tolerance: of the relative difference of the pooled taus.
    Raises:
        SettingsError: one side has no cycle.
    """
    difference = relative_difference(engine, offline, seed=seed)
    taus: list[Any] = [ratio_of_sums(*side, seed=seed) for side in (offline, engine)]
    if difference is None or None in taus:
        raise SettingsError("evaluation or engine recorded no cycle on their common prompts")
    low, high = difference.ci95
    within = abs(difference.value) <= tolerance
    return Agreement(
        result="agrees" if within else "disagrees" if low > tolerance or high < -tolerance else "inconclusive",
        tolerance=tolerance,
        prompts=len(offline[0]),
        offline_tau=taus[0],
        engine_tau=taus[1],
        relative_difference=difference,
    )
