"""What training hands on: the drafter, its metrics, its curves."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from dspark.drafters.base import Drafter
from dspark.drafters.checkpoint import write_training_checkpoint
from dspark.io.atomic import write_text
from dspark.io.jsonfile import write_model

if TYPE_CHECKING:
    from dspark.targets.record import TargetRecord

COLUMNS = (
    "step",
    "loss",
    "cross_entropy",
    "l1",
    "confidence",
    "gradient_norm",
    "learning_rate",
    "dev_anchor_tau",
    "dev_anchor_tau_sampled",
    "dev_cross_entropy",
    "dev_l1",
    "dev_confidence",
    "seconds",
)
Row = dict[str, float | int | None]


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
    dev_confidence_error: list[float] | None = None  # likewise


class TrainMetrics(BaseModel):
    """`builds/<b>/train/metrics.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)

    schema_: Literal["dspark/train/1"] = Field(default="dspark/train/1", alias="schema")
    geometry: str
    trainable_parameters: int
    steps: int
    train_sequences: int
    train_tokens: int  # of those sequences, once
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


@dataclass(frozen=True)
class TrainingResult:
    """The end of a training run.

    Attributes:
        drafter: with the weights that did best on the dev split, float32, in eval mode.
        curves: one row per step, see `COLUMNS`.
        seconds: spent training, in all attempts.
        first: False in all processes of a run but the one that writes.
    """

    drafter: Drafter
    metrics: TrainMetrics
    curves: list[Row]
    seconds: float
    first: bool = True

    def write(self, out: Path, record: TargetRecord) -> None:
        """Write `drafter/`, `metrics.json` and `curves.csv` into the folder `out`; once, of a run of many processes."""
        if not self.first:
            return
        write_training_checkpoint(out / "drafter", self.drafter, record)
        write_model(out / "metrics.json", self.metrics)
        write_curves(out / "curves.csv", self.curves)


def write_curves(path: Path, rows: list[Row]) -> None:
    """Write `curves.csv`; where nothing was trained there are no rows."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())
