"""Stage `train` of a build whose drafter was imported: verified, converted and measured, not trained.

What stands in `metrics.json` is what was seen here: how the drafter does on the dev split. There are no steps, no train
losses and no rows in `curves.csv`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from dspark.config.models import Digest, TrainingSettings
from dspark.drafters.base import Drafter
from dspark.drafters.checkpoint import parameters, write_training_checkpoint
from dspark.drafters.origin import DrafterOrigin, read_origin
from dspark.drafters.released import read_released
from dspark.errors import IntegrityError
from dspark.io.digest import digest_file
from dspark.io.jsonfile import write_model
from dspark.io.progress import Progress
from dspark.processor import arithmetic
from dspark.training.development import DevBatches, dev_metrics, dev_sums
from dspark.training.methods import method_of
from dspark.training.metrics import DevMetrics
from dspark.training.processes import process_state
from dspark.training.results import write_curves
from dspark.training.sequences import TrainingSequence, usable_sequences
from dspark.training.vocabulary import coverage, draft_columns

if TYPE_CHECKING:
    from dspark.targets.record import TargetRecord


class ImportedMetrics(BaseModel):
    """`builds/<b>/train/metrics.json` of an imported drafter."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)

    schema_: Literal["dspark/train-imported/1"] = Field(default="dspark/train-imported/1", alias="schema")
    imported: Digest
    layout: str
    source: dict[str, Any]
    geometry: str
    parameters: int
    dev_sequences: int
    skipped_sequences: int  # dev responses too short for an anchor
    draft_vocab_size: int
    draft_vocab_coverage: float  # share of dev response tokens that the drafter may propose
    precision: Literal["float32", "bfloat16"]
    includes_bonus: bool = True
    dev: DevMetrics  # of the drafter as released, at step 0


@dataclass(frozen=True)
class ImportedDrafter:
    """An imported drafter, as the stages behind `train` get it.

    Attributes:
        first: False in all processes of a launch but the one that writes; each of them measures the same.
    """

    drafter: Drafter
    metrics: ImportedMetrics
    first: bool = True

    def write(self, out: Path, record: TargetRecord) -> None:
        """Write `drafter/`, `metrics.json` and a `curves.csv` without rows into the folder `out`; once."""
        if not self.first:
            return
        write_training_checkpoint(out / "drafter", self.drafter, record)
        write_model(out / "metrics.json", self.metrics)
        write_curves(out / "curves.csv", [])


def take_over(
    folder: Path,
    files: Mapping[str, str],
    embedding: Tensor,
    head: Tensor,
    record: TargetRecord,
    dev_sequences: Sequence[TrainingSequence],
    settings: TrainingSettings,
    progress: Progress | None = None,
) -> ImportedDrafter:
    """Read an imported drafter from the store and measure it on the dev split.

    Args:
        folder: of the store.
        files: sha256 of its files by name, as the build was resolved with them.
        embedding, head: the target's, [V, d].
        dev_sequences: with features.
        settings: `max_length`, `precision`, `sequences_per_step` and the decay of the losses are used.
    Raises:
        IntegrityError: a file is missing or another one since.
        DataError: as `read_released`, or no usable dev sequences.
    """
    progress = progress or Progress()
    origin = read_origin(folder)
    progress.start("verify", len(files) + 1, unit="files")
    for name, sha256 in files.items():
        if not (folder / name).is_file() or digest_file(folder / name) != sha256:
            raise IntegrityError(
                f"{folder / name}: missing, or not the file that was imported", f"remove {folder} and import it again"
            )
        progress.advance()
    drafter = read_released(folder, record, embedding, head)
    metrics = _measured(drafter, origin, head, dev_sequences, settings)
    progress.advance(dev_anchor_tau=metrics.dev.dev_anchor_tau)
    return ImportedDrafter(drafter.cpu(), metrics, process_state().is_main_process)


def _measured(
    drafter: Drafter,
    origin: DrafterOrigin,
    head: Tensor,
    dev_sequences: Sequence[TrainingSequence],
    settings: TrainingSettings,
) -> ImportedMetrics:
    config, device = drafter.config, process_state().device
    low_precision = arithmetic(settings.precision, device.type) == "bfloat16"
    sequences = usable_sequences(dev_sequences, settings.max_length, "dev")
    ids = drafter.draft_token_ids.cpu() if config.draft_vocab_size is not None else None
    columns = None if ids is None else draft_columns(ids, config.vocab_size)
    with torch.no_grad():
        objective = method_of(config).objective(drafter.to(device), settings.loss, low_precision=low_precision)
        batches = DevBatches(
            sequences,
            objective,
            head.detach().to(device),
            columns,
            size=settings.sequences_per_step,
            max_length=settings.max_length,
            device=device,
        )
        measured = dev_metrics(dev_sums(objective, batches, device), config.gamma, confidence=config.confidence)
    return ImportedMetrics(
        imported=origin.digest,
        layout=origin.layout,
        source=origin.source,
        geometry=config.geometry,
        parameters=sum(value.numel() for value in parameters(drafter).values()),
        dev_sequences=len(sequences),
        skipped_sequences=len(dev_sequences) - len(sequences),
        draft_vocab_size=config.proposed_vocab_size,
        draft_vocab_coverage=coverage(sequences, columns),
        precision="bfloat16" if low_precision else "float32",
        dev=DevMetrics.model_validate({"step": 0, **measured}),
    )
