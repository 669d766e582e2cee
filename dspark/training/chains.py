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
from torch.nn import functional

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
    """Packed blocks with what chains read besides.

    Attributes:
        following_ids: the token after each position of the contexts, int64 [T].
        starts: where in the contexts each chain starts, at the position before its anchor, int64 [N].
        chain_ids: what each chain is fed with: its anchor and the text's tokens behind it, int64 [N, K]; 0 where the
            text has ended.
        shares: what each supervised slot of a chain weighs, float32 [N]: 1 / T of its sequence, times how many anchors
            each drawn one stands for.
    """

    following_ids: Tensor
    starts: Tensor
    chain_ids: Tensor
    shares: Tensor


def make_chain_batch(
    sequences: Sequence[TrainingSequence],
    anchors: Sequence[Positions],
    gamma: int,
    columns: Tensor | None,
    max_length: int | None = None,
) -> ChainBatch:
    """The batch of chains with given anchors in given sequences; arguments as of `make_batch`.

    Raises:
        ValueError: an anchor is the first token of its sequence, so that nothing stands before it to start from.
    """
    batch = make_batch(sequences, anchors, gamma, columns, max_length)
    following, starts, fed, shares = [], [], [], []
    before = 0  # positions of the contexts of earlier sequences
    for sequence, positions in zip(sequences, anchors, strict=True):
        if not len(positions):
            continue
        if positions[0] == 0:
            raise ValueError("a chain starts from the features before its anchor, and this one is the first token")
        chosen = torch.from_numpy(positions)
        tokens = sequence.token_ids if max_length is None else sequence.token_ids[:max_length]
        length = int(chosen[-1])
        following.append(tokens[1 : length + 1])
        starts.append(before + chosen - 1)
        fed.append(functional.pad(tokens, (0, gamma))[chosen.unsqueeze(1) + torch.arange(gamma)])
        there = len(anchor_candidates(response_mask(len(tokens), sequence.prompt_length)))
        shares.append(torch.full((len(chosen),), there / len(chosen) / len(tokens)))
        before += length
    blocks = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return ChainBatch(
        **blocks,
        following_ids=torch.cat(following),
        starts=torch.cat(starts),
        chain_ids=torch.cat(fed),
        shares=torch.cat(shares),
    )


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
        return torch.full((2,), float(len(batch.packing.blocks)), device=batch.anchors.device)

    def forward(self, batch: Batch, denominators: Tensor) -> tuple[Tensor, Sums, SlotLosses, Tensor | None]:
        """See `Objective`."""
        chains = _chain_batch(batch)
        hidden = self.states(chains)
        of_slots = chains.shares[chains.slot_rows // self.drafter.config.gamma]
        weights = chains.targets.weights(self.settings.decay) * of_slots
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
        sequences = denominators.new_tensor(float(len(chains.packing.blocks)))
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
        dtype = torch.bfloat16 if self.low_precision else torch.float32
        with torch.autocast(batch.features.device.type, dtype=torch.bfloat16, enabled=self.low_precision):
            projected = drafter.project(batch.features.to(dtype))
            # All sequences in one row: [1, ...].
            walk = drafter.packed_chains(
                drafter.pairs(projected, batch.following_ids).unsqueeze(0),
                batch.positions.unsqueeze(0),
                projected.index_select(0, batch.starts).unsqueeze(0),
                batch.anchors.unsqueeze(0),
                batch.packing,
            )
            hidden = [drafter.step(walk, fed.unsqueeze(0)) for fed in batch.chain_ids.unbind(1)]
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
