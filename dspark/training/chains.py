"""How EAGLE-3 is trained: training-time test, as DeepSpec does it (deepspec.md, section 4.1).

Every chain takes all its steps, fed with its own states and the text's tokens, and step j is trained towards the
target's whole distribution at p + j:

    loss = 1 / n  sum over sequences  1 / T  sum over chains and steps  decay^j CE(p_t, p_d)

with n sequences in a step and T tokens in a sequence: a sequence counts by the share of it that is response, not by its
length. Where fewer anchors are drawn than a sequence has, each stands for as many as were left out. Chains start and
end where blocks do: DeepSpec leaves out the first anchor of a response, which decoding starts from, and supervises what
follows its last token instead. `loss.decay` is that of all recipes, exp(-j / decay): DeepSpec's 0.8 a step is
-1 / log(0.8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dspark.config.models import LossSettings
from dspark.drafters.eagle3 import Eagle3Drafter
from dspark.drafters.kinds import require_eagle3
from dspark.training.anchors import Positions, anchor_candidates, response_mask
from dspark.training.batches import Batch, make_batch
from dspark.training.initialisation import soften
from dspark.training.losses import SlotLosses, distribution_losses
from dspark.training.objective import Objective, Sums
from dspark.training.sequences import TrainingSequence

if TYPE_CHECKING:
    from dspark.drafters.base import Drafter
    from dspark.drafters.config import DrafterConfig
    from dspark.training.warm_start import Initial


@dataclass(frozen=True)
class ChainBatch(Batch):
    """Blocks with what chains read besides.

    Attributes:
        token_ids: of the sequences as far as they are read, padded with 0, int64 [B, L]; L > S and L >= the last
            position of any chain + 1.
        shares: what a supervised slot of a sequence weighs, float32 [B]: 1 / T, times how many anchors each drawn one
            stands for.
    """

    token_ids: Tensor
    shares: Tensor


def make_chain_batch(
    sequences: Sequence[TrainingSequence],
    anchors: Sequence[Positions],
    gamma: int,
    columns: Tensor | None,
    max_length: int | None = None,
) -> ChainBatch:
    """The batch of chains with given anchors in given sequences; arguments as of `make_batch`."""
    batch = make_batch(sequences, anchors, gamma, columns, max_length)
    rows = [row.token_ids if max_length is None else row.token_ids[:max_length] for row in sequences]
    read = batch.visible.shape[2] + 1 + gamma
    token_ids = torch.zeros(len(rows), read, dtype=torch.int64)
    shares = torch.zeros(len(rows))
    for index, (sequence, tokens, chosen) in enumerate(zip(sequences, rows, anchors, strict=True)):
        part = tokens[:read]
        token_ids[index, : len(part)] = part
        if len(chosen):
            there = len(anchor_candidates(response_mask(len(tokens), sequence.prompt_length)))
            shares[index] = there / len(chosen) / len(tokens)
    blocks = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return ChainBatch(**blocks, token_ids=token_ids, shares=shares)


class ChainObjective(Objective):
    """Cross entropy (and L1, if the settings weigh it) of unrolled chains, sequence by sequence."""

    drafter: Eagle3Drafter

    def __init__(self, drafter: Eagle3Drafter, settings: LossSettings, *, low_precision: bool) -> None:
        super().__init__()
        self.drafter = drafter
        self.settings = settings
        self.low_precision = low_precision

    def denominators(self, batch: Batch) -> Tensor:
        """Sequences, twice, float32 [2]: both losses are means over these."""
        return torch.full((2,), float(len(batch.anchors)), device=batch.anchors.device)

    def forward(self, batch: Batch, denominators: Tensor) -> tuple[Tensor, Sums, SlotLosses, Tensor | None]:
        """See `Objective`."""
        chains = _chain_batch(batch)
        hidden = self.states(chains)
        slots_per_sequence = chains.anchors.shape[1] * self.drafter.config.gamma
        weights = chains.targets.weights(self.settings.decay) * chains.shares[chains.slot_rows // slots_per_sequence]
        count = denominators[0].clamp(min=1)
        none = hidden.new_zeros(len(hidden), 0)
        objective, slots = distribution_losses(
            hidden,
            none,  # no Markov bias
            self.drafter.head.new_zeros(len(self.drafter.head), 0),
            self.drafter.head,
            chains.targets,
            cross_entropy_weights=weights * (self.settings.cross_entropy / count),
            l1_weights=weights * (self.settings.l1 / count),
            low_precision=self.low_precision,
            soft_labels=self.settings.labels == "soft",
            cap=self.drafter.config.logit_cap,
        )
        sequences = denominators.new_tensor(float(len(chains.anchors)))
        sums = Sums(
            weight=sequences,
            labelled_weight=sequences,
            cross_entropy=(weights * slots.cross_entropy).sum(),
            l1=(weights * slots.l1).sum(),
            confidence=torch.zeros_like(sequences),
        )
        return objective, sums, slots, None

    def states(self, batch: ChainBatch) -> Tensor:
        """h of the supervised slots, [M, d]."""
        drafter = self.drafter
        rows, chains, length = batch.visible.shape
        device = batch.features.device
        dtype = torch.bfloat16 if self.low_precision else torch.float32
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.low_precision):
            flat = drafter.project(batch.features.to(dtype))
            slots = batch.context_slots
            projected = flat.new_zeros(rows * length, flat.shape[-1]).index_copy(0, slots, flat)
            read = drafter.pairs(flat, batch.token_ids[:, 1 : length + 1].reshape(-1)[slots])
            context = read.new_zeros(rows * length, read.shape[-1]).index_copy(0, slots, read)
            # A padded chain has anchor 0: it starts at some position, sees none and is supervised nowhere.
            starts = (batch.anchors - 1).clamp(min=0) + length * torch.arange(rows, device=device).unsqueeze(1)
            start = projected.index_select(0, starts.flatten()).view(rows, chains, -1)
            walk = drafter.chains(context.view(rows, length, -1), start, batch.anchors)
            hidden = []
            for step in range(drafter.config.gamma):
                hidden.append(drafter.step(walk, batch.token_ids.gather(1, batch.anchors + step)))
        return torch.stack(hidden, 2).flatten(0, 2).index_select(0, batch.slot_rows)


class ChainMethod:
    """Of kind `eagle3`: chains that are drafted token by token."""

    def initialise(
        self, drafter: Drafter, sequences: Sequence[TrainingSequence], columns: Tensor | None, *, seed: int
    ) -> None:
        """Small logits; everything else starts at random."""
        soften(require_eagle3(drafter, "this training").norm.weight, drafter.head)

    def require_startable(self, config: DrafterConfig, initial: Initial) -> None:
        """The same architecture."""
        config.require_same(initial.drafter.config, initial.where)

    def warm_start(
        self, drafter: Drafter, initial: Initial, sequences: Sequence[TrainingSequence], columns: Tensor | None
    ) -> None:
        """Everything as it is."""
        drafter.load_state_dict(initial.drafter.state_dict())

    def objective(self, drafter: Drafter, settings: LossSettings, *, low_precision: bool) -> Objective:
        """Cross entropy of every step."""
        return ChainObjective(require_eagle3(drafter, "this training"), settings, low_precision=low_precision)

    def batch(
        self,
        sequences: Sequence[TrainingSequence],
        anchors: Sequence[Positions],
        config: DrafterConfig,
        columns: Tensor | None,
        max_length: int,
    ) -> Batch:
        """Packed chains."""
        return make_chain_batch(sequences, anchors, config.gamma, columns, max_length)


def _chain_batch(batch: Batch) -> ChainBatch:
    if not isinstance(batch, ChainBatch):
        raise TypeError(f"chains are trained on ChainBatch, this is {type(batch).__name__}")
    return batch
