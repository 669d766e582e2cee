"""The drafter with its losses as one module: what a step differentiates and what an evaluation reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dspark.config.models import LossSettings
from dspark.drafters.base import Drafter
from dspark.drafters.dspark import DSparkDrafter
from dspark.training.batches import Batch
from dspark.training.losses import SlotLosses, distribution_losses


@dataclass(frozen=True)
class Sums:
    """Weighted sums over supervised slots; add them over batches and ranks, then divide.

    Attributes:
        weight: sum of w.
        labelled_weight: sum of w over slots that have cross entropy.
        cross_entropy, l1, confidence: weighted sums of the losses.
    """

    weight: Tensor
    labelled_weight: Tensor
    cross_entropy: Tensor
    l1: Tensor
    confidence: Tensor

    def stacked(self) -> Tensor:
        """All five in one tensor, float32 [5], in the order above."""
        return torch.stack([self.weight, self.labelled_weight, self.cross_entropy, self.l1, self.confidence])


def mean_losses(sums: Tensor) -> dict[str, float]:
    """Losses from summed `Sums.stacked()`, each over its own denominator."""
    weight, labelled, cross_entropy, l1, confidence = (float(value) for value in sums)
    return {
        "cross_entropy": cross_entropy / labelled if labelled else 0.0,
        "l1": l1 / weight if weight else 0.0,
        "confidence": confidence / weight if weight else 0.0,
    }


class Objective(nn.Module, ABC):
    """A drafter with what its training minimises, on batches of its kind's method (`methods.py`).

    One module with one forward, so that DistributedDataParallel sees every parameter used.
    """

    drafter: Drafter
    settings: LossSettings
    low_precision: bool

    @abstractmethod
    def denominators(self, batch: Batch) -> Tensor:
        """Sum of w and sum of w over slots with cross entropy, float32 [2]; all-reduced by the caller."""

    @abstractmethod
    def forward(self, batch: Batch, denominators: Tensor) -> tuple[Tensor, Sums, SlotLosses, Tensor | None]:
        """The objective on a batch.

        Args:
            denominators: float32 [2], of all batches of this step together (all ranks).
        Returns:
            the objective (a scalar, of which the ranks' sum is the step's), weighted sums, losses per slot, and
            confidence logits per slot [M], None without a confidence head.
        """


class TrainingObjective(Objective):
    """0.1 CE + 0.9 L1 + 1.0 BCE (weights from the settings) on batches of blocks; no BCE without a confidence head."""

    drafter: DSparkDrafter

    def __init__(self, drafter: DSparkDrafter, settings: LossSettings, *, low_precision: bool) -> None:
        super().__init__()
        self.drafter = drafter
        self.settings = settings
        self.low_precision = low_precision
        self.soft_labels = settings.labels == "soft"

    def denominators(self, batch: Batch) -> Tensor:
        """Sum of w and sum of w over slots with cross entropy, float32 [2]; all-reduced by the caller."""
        weights = batch.targets.weights(self.settings.decay)
        return torch.stack([weights.sum(), self._labelled(batch, weights).sum()])

    def forward(self, batch: Batch, denominators: Tensor) -> tuple[Tensor, Sums, SlotLosses, Tensor | None]:
        """See `Objective`."""
        hidden, embedded, latent = self.states(batch)
        weights = batch.targets.weights(self.settings.decay)
        weight, labelled_weight = denominators.clamp(min=torch.finfo(torch.float32).tiny)
        head = self.drafter.confidence_head
        logits = None if head is None else head(hidden, embedded)
        objective, slots = distribution_losses(
            hidden,
            latent,
            self._markov_w2(),
            self.drafter.head,
            batch.targets,
            cross_entropy_weights=weights * (self.settings.cross_entropy / labelled_weight),
            l1_weights=weights * (self.settings.l1 / weight),
            low_precision=self.low_precision,
            soft_labels=self.soft_labels,
            cap=self.drafter.config.logit_cap,
            confidence_logits=logits,
            confidence_weights=weights * (self.settings.confidence / weight),
        )
        sums = Sums(
            weight=weights.sum(),
            labelled_weight=self._labelled(batch, weights).sum(),
            cross_entropy=(weights * slots.cross_entropy).sum(),
            l1=(weights * slots.l1).sum(),
            confidence=(weights * slots.confidence).sum(),
        )
        return objective, sums, slots, logits

    def _markov_w2(self) -> Tensor:
        """W2, [Vd, r]; r = 0 without a sequential head."""
        if self.drafter.config.markov_type == "none":
            return self.drafter.head.new_zeros(len(self.drafter.head), 0)
        return self.drafter.markov_head.markov_w2.weight

    def _labelled(self, batch: Batch, weights: Tensor) -> Tensor:
        """w of the slots that have cross entropy: all with soft labels, else those whose label can be drafted."""
        return weights if self.soft_labels else weights[batch.targets.labels >= 0]

    def states(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Of the supervised slots: h [M, d], rows of W1 [M, r], and what W2 turns into their bias [M, r].

        Without a sequential head r = 0.
        """
        drafter = self.drafter
        device = batch.features.device
        dtype = torch.bfloat16 if self.low_precision else torch.float32
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.low_precision):
            slots = torch.arange(drafter.config.gamma, device=device)
            # All sequences in one row: [1, ...].
            hidden = drafter.block_hidden(
                drafter.block_inputs(batch.anchor_ids).unsqueeze(0),
                drafter.project(batch.features.to(dtype)).unsqueeze(0),
                batch.positions.unsqueeze(0),
                (batch.anchors.unsqueeze(-1) + slots).unsqueeze(0),
                batch.packing,
            ).squeeze(0)
        states = hidden.flatten(0, 1).index_select(0, batch.slot_rows)
        embedded = drafter.markov_head.embed(batch.previous_ids)
        if drafter.config.markov_type != "rnn":
            return states, embedded, drafter.markov_head.latent(embedded, states, None)[0]
        return states, embedded, self._along_blocks(hidden, embedded, batch.slot_rows)

    def _along_blocks(self, hidden: Tensor, embedded: Tensor, slot_rows: Tensor) -> Tensor:
        """Latents of a head that remembers: slot by slot along every block, the text's own tokens as previous ones.

        The supervised slots of a block are its first ones, so what stands in the others reaches none of them.

        Args:
            hidden: h of all slots, [blocks, gamma, d].
            embedded: of the supervised slots, [M, r].
            slot_rows: where these stand among all, int64 [M].
        Returns:
            of the supervised slots, [M, r].
        """
        blocks, gamma, _ = hidden.shape
        rows = embedded.new_zeros(blocks * gamma, embedded.shape[-1]).index_copy(0, slot_rows, embedded)
        state, latents = None, []
        for before, states in zip(rows.view(blocks, gamma, -1).unbind(1), hidden.unbind(1), strict=True):
            latent, state = self.drafter.markov_head.latent(before, states, state)
            latents.append(latent)
        return torch.stack(latents, 1).flatten(0, 1).index_select(0, slot_rows)
