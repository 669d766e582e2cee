"""Which sequences each step sees: a function of (seed, step), planned in epochs or in windows of a mixture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from dspark.config.models import TrainingSettings
from dspark.training.batches import epoch_order
from dspark.training.mixture import plan_mixture
from dspark.training.sequences import TrainingSequence


class Schedule:
    """The order of one run.

    Attributes:
        lengths: tokens per sequence, at most `settings.max_length`, [n].
        batch_size: sequences per step, in all processes.

    Raises:
        DataError: too few sequences of a domain for the mixture.
    """

    def __init__(self, sequences: Sequence[TrainingSequence], settings: TrainingSettings) -> None:
        self.lengths = np.array([min(len(row.token_ids), settings.max_length) for row in sequences])
        self.batch_size = min(settings.sequences_per_step, len(sequences))
        self._domains: list[str] = []
        self._steps = len(sequences) // self.batch_size
        plan = partial(epoch_order, self.lengths, self.batch_size, settings.seed)
        if settings.mixture is not None:
            self._domains = [row.domain for row in sequences]
            mixture = plan_mixture(self._domains, settings.mixture.new, settings.mixture.replay, self.batch_size)
            self._steps = mixture.steps
            plan = partial(mixture.window, self.lengths, settings.seed)
        self._plan = lru_cache(maxsize=2)(plan)

    def sequences_of(self, step: int) -> NDArray[np.int64]:
        """Indices of the sequences of a step (0-based)."""
        number, offset = divmod(step, self._steps)
        return self._plan(number)[offset]

    def seen_tokens(self, steps: int) -> int:
        """Tokens of the sequences of the first steps, as often as they come."""
        return sum(int(self.lengths[self.sequences_of(step)].sum()) for step in range(steps))

    def drawn(self, steps: int) -> dict[str, int]:
        """How many sequences of each domain the first steps see; empty without a mixture."""
        if not self._domains:
            return {}
        counts = Counter(self._domains[index] for step in range(steps) for index in self.sequences_of(step))
        return dict(sorted(counts.items()))
