"""How each kind of drafter is trained: where it starts, what a step computes, what is minimised.

The trainer knows sequences, anchors, optimizers and checkpoints; everything that depends on the network is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from dspark.config.models import DrafterKind, LossSettings
from dspark.drafters.base import Drafter
from dspark.drafters.config import DrafterConfig
from dspark.drafters.kinds import require_dspark
from dspark.training.anchors import Positions
from dspark.training.batches import Batch, make_batch
from dspark.training.chains import ChainMethod
from dspark.training.initialisation import initialise
from dspark.training.objective import Objective, TrainingObjective
from dspark.training.sequences import TrainingSequence
from dspark.training.warm_start import warm_start

if TYPE_CHECKING:
    from dspark.training.warm_start import Initial


class Method(Protocol):
    """How drafters of one kind are trained."""

    def initialise(
        self, drafter: Drafter, sequences: Sequence[TrainingSequence], columns: Tensor | None, *, seed: int
    ) -> None:
        """Prepare a new drafter, on the CPU, for training on `sequences`; columns as in `make_batch`."""
        ...

    def require_startable(self, config: DrafterConfig, initial: Initial) -> None:
        """Refuse weights that training cannot start from (SettingsError)."""
        ...

    def warm_start(
        self, drafter: Drafter, initial: Initial, sequences: Sequence[TrainingSequence], columns: Tensor | None
    ) -> None:
        """Give a new drafter, on the CPU, the weights of an earlier one."""
        ...

    def objective(self, drafter: Drafter, settings: LossSettings, *, low_precision: bool) -> Objective:
        """The drafter with its losses, as one module."""
        ...

    def batch(
        self,
        sequences: Sequence[TrainingSequence],
        anchors: Sequence[Positions],
        config: DrafterConfig,
        columns: Tensor | None,
        max_length: int,
    ) -> Batch:
        """What a step computes of drafts that start at these anchors, see `make_batch`."""
        ...


class BlockMethod:
    """Of kind `dspark`: isolated blocks that are drafted in one pass, with or without heads."""

    def initialise(
        self, drafter: Drafter, sequences: Sequence[TrainingSequence], columns: Tensor | None, *, seed: int
    ) -> None:
        """Small base logits and, with a sequential head, the responses' bigrams."""
        initialise(require_dspark(drafter, "this training"), sequences, columns, seed=seed)

    def require_startable(self, config: DrafterConfig, initial: Initial) -> None:
        """The same architecture, but for heads that the earlier drafter does not have."""
        config.require_startable(initial.drafter.config, initial.where)

    def warm_start(
        self, drafter: Drafter, initial: Initial, sequences: Sequence[TrainingSequence], columns: Tensor | None
    ) -> None:
        """Everything that both have; a sequential head that is new says nothing at first."""
        warm_start(require_dspark(drafter, "this training"), initial, sequences, columns)

    def objective(self, drafter: Drafter, settings: LossSettings, *, low_precision: bool) -> Objective:
        """Cross entropy, L1 and, with a confidence head, its BCE."""
        return TrainingObjective(require_dspark(drafter, "this training"), settings, low_precision=low_precision)

    def batch(
        self,
        sequences: Sequence[TrainingSequence],
        anchors: Sequence[Positions],
        config: DrafterConfig,
        columns: Tensor | None,
        max_length: int,
    ) -> Batch:
        """Packed blocks."""
        return make_batch(sequences, anchors, config.gamma, columns, max_length)


METHODS: Mapping[DrafterKind, Method] = {"dspark": BlockMethod(), "eagle3": ChainMethod()}


def method_of(config: DrafterConfig) -> Method:
    """How drafters of a config's kind are trained."""
    return METHODS[config.kind]
