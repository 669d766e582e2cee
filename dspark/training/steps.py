"""What the steps of a run compute: this process's sequences with their anchors, whose features are read ahead."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from dspark.config.models import TrainingSettings
from dspark.drafters.config import DrafterConfig
from dspark.errors import SettingsError
from dspark.features.ahead import ReadAhead
from dspark.training.anchors import Positions, draw_anchors, response_mask
from dspark.training.batches import Batch
from dspark.training.methods import method_of
from dspark.training.processes import Processes
from dspark.training.schedule import Schedule
from dspark.training.sequences import TrainingSequence


class TrainingSteps:
    """The train split as one process sees it, step by step.

    Which sequences a step has, and which anchors, is a function of (seed, step). The processes share its sequences, and
    each reads the features of its own alone.

    Attributes:
        schedule: of all processes.

    Args:
        sequences: with at least one anchor each.
        columns: see `make_batch`.
        read_bytes: of memory, for the features of the step at hand and of coming ones.
    Raises:
        SettingsError: a step does not have a sequence for every part of every process.
        DataError: too few sequences for the mixture.
    """

    def __init__(
        self,
        sequences: Sequence[TrainingSequence],
        config: DrafterConfig,
        columns: Tensor | None,
        settings: TrainingSettings,
        processes: Processes,
        read_bytes: int,
    ) -> None:
        self._sequences, self._config, self._columns = sequences, config, columns
        self._settings, self._processes = settings, processes
        self.schedule = Schedule(sequences, settings)
        if self.schedule.batch_size < processes.count * settings.accumulation:
            raise SettingsError(
                f"training.sequences_per_step: {self.schedule.batch_size} sequences a step cannot be shared by "
                f"{processes.count} processes with training.accumulation {settings.accumulation}"
            )
        self._ahead = ReadAhead(self._rows, settings.steps, read_bytes)

    def batches(self, step: int) -> list[Batch]:
        """A step (0-based) as far as this process computes it, in parts that are computed one after the other.

        Raises:
            SettingsError: its features take more memory than may be read.
            IntegrityError, DataError: as reading and computing them.
        """
        indices = self._indices(step)
        rows = self._ahead.take(step)
        anchors = [self._anchors(step, index) for index in indices]
        parts = np.array_split(np.arange(len(rows)), self._settings.accumulation)
        return [self._batch([rows[index] for index in part], [anchors[index] for index in part]) for part in parts]

    def close(self) -> None:
        """Stop reading."""
        self._ahead.close()

    def _indices(self, step: int) -> list[int]:
        return [int(index) for index in self.schedule.sequences_of(step)[self._processes.share]]

    def _rows(self, step: int) -> list[TrainingSequence]:
        """What to read for a step; the thread that reads ahead asks, too."""
        return [self._sequences[index] for index in self._indices(step)]

    def _batch(self, rows: Sequence[TrainingSequence], anchors: Sequence[Positions]) -> Batch:
        batch = method_of(self._config).batch
        return batch(rows, anchors, self._config, self._columns, self._settings.max_length)

    def _anchors(self, step: int, index: int) -> Positions:
        mask = response_mask(int(self.schedule.lengths[index]), self._sequences[index].prompt_length)
        return draw_anchors(mask, self._settings.anchors_per_sequence, (self._settings.seed, step, index))
