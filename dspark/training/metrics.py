"""What training says of itself, as typed JSON. Nothing heavy is imported: studies read it too."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from dspark.errors import DataError


class DevMetrics(BaseModel):
    """The dev split at one step; lists are per draft position."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    step: int
    dev_anchor_tau: float  # overstates the decoding loop's tau; see `development`
    dev_anchor_tau_sampled: float
    dev_cross_entropy: float
    dev_l1: float
    dev_confidence: float | None = None  # absent without a confidence head
    dev_greedy_match: list[float]
    dev_acceptance: list[float]
    dev_confidence_error: list[float] | None = None  # likewise, before the fit
    dev_confidence_fit: tuple[float, float] | None = None  # scale and shift of its logits; see `confidence`


class TrainMetrics(BaseModel):
    """`builds/<b>/train/metrics.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)

    schema_: Literal["dspark/train/1"] = Field(default="dspark/train/1", alias="schema")
    geometry: str
    trainable_parameters: int
    steps: int
    train_sequences: int
    train_tokens: int  # of those sequences, once
    seen_tokens: int  # of the sequences of all steps, as often as they came
    skipped_sequences: int  # responses too short for an anchor
    dev_sequences: int
    draft_vocab_size: int
    draft_vocab_coverage: float  # share of dev response tokens that the drafter may propose
    precision: Literal["float32", "bfloat16"]
    includes_bonus: bool = True
    drawn_sequences: dict[str, int] = {}  # of each domain, in all steps; of a mixture only
    initial: DevMetrics | None = None  # of the drafter that training started from
    best: DevMetrics  # of the weights handed on
    final: DevMetrics


def training_seconds(curves: Path) -> float:
    """How long training took, in all attempts: the clock in the last row of `curves.csv`; 0 where nothing was trained.

    Raises:
        DataError: missing, or not such a file.
    """
    try:
        with curves.open(encoding="utf-8", newline="") as handle:
            rows = list(csv.DictReader(handle))
        return float(rows[-1]["seconds"]) if rows else 0.0
    except (OSError, KeyError, TypeError, ValueError) as reason:
        raise DataError(f"{curves}: no curves of a training run: {reason}", "make it again with `dspark run`") from None
