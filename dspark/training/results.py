"""What training hands on: the drafter, its metrics, its curves."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.drafters.base import Drafter
from dspark.drafters.checkpoint import write_training_checkpoint
from dspark.io.atomic import write_text
from dspark.io.jsonfile import write_model
from dspark.training.metrics import TrainMetrics

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
