"""How the drafter does on the dev split while it trains: what chooses the checkpoint.

`dev_anchor_tau` is 1 + the mean, over anchors spaced evenly over the dev responses, of the number of leading slots at
which the drafter's greedy token is the target's, with the text's own tokens as previous ones. It *overstates* the tau
of the decoding loop (by about 20 %): the loop lands more often where drafting is hard, because a rejection ends a
cycle there. Use it to compare checkpoints of one run, never as tau.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.features.sources import loaded
from dspark.training.anchors import response_mask, spaced_anchors
from dspark.training.batches import Batch
from dspark.training.confidence import CELLS, confidence_sums, fit_confidence
from dspark.training.losses import ROWS, confidence_target
from dspark.training.methods import method_of
from dspark.training.objective import Objective, mean_losses
from dspark.training.products import Multiplier
from dspark.training.sequences import TrainingSequence

DEV_ANCHORS = 32  # per sequence
DEV_BYTES = 256 << 20  # of batches that are kept from one evaluation to the next


@dataclass(frozen=True)
class DevBatch:
    """A batch of spaced anchors with the target's own greedy tokens."""

    batch: Batch
    target_columns: Tensor  # int64 [M], the target's argmax at the label's position as a draft column, -1: outside


class DevBatches:
    """The dev split as batches, the same at every evaluation.

    The target's greedy tokens are found once. The batches themselves are kept as far as `keep_bytes` goes; the others
    are made anew each time, so that a dev split of any size takes no more memory.

    Args:
        head: the target's whole LM head, [V, d].
        columns: see `make_batch`.
        size: sequences per batch.
    """

    def __init__(
        self,
        sequences: Sequence[TrainingSequence],
        objective: Objective,
        head: Tensor,
        columns: Tensor | None,
        *,
        size: int,
        max_length: int,
        device: torch.device,
        keep_bytes: int = DEV_BYTES,
    ) -> None:
        self._sequences, self._columns, self._size, self._max_length = sequences, columns, size, max_length
        self._config = objective.drafter.config
        self._kept: dict[int, Batch] = {}
        self._target_columns: list[Tensor] = []
        for start in range(0, len(sequences), size):
            batch = self._batch(start)
            best = greedy_tokens(batch.targets.target_hidden.to(device), head, low_precision=objective.low_precision)
            self._target_columns.append(best if columns is None else columns.to(device)[best])
            keep_bytes -= batch.nbytes
            if keep_bytes >= 0:
                self._kept[start] = batch

    def __len__(self) -> int:
        return len(self._target_columns)

    def __iter__(self) -> Iterator[DevBatch]:
        for number, target_columns in enumerate(self._target_columns):
            start = number * self._size
            yield DevBatch(self._kept.get(start) or self._batch(start), target_columns)

    def _batch(self, start: int) -> Batch:
        group = self._sequences[start : start + self._size]
        masks = [response_mask(min(len(row.token_ids), self._max_length), row.prompt_length) for row in group]
        anchors = [spaced_anchors(mask, DEV_ANCHORS) for mask in masks]
        batch = method_of(self._config).batch
        return batch(loaded(group), anchors, self._config, self._columns, self._max_length)


@torch.no_grad()
def greedy_tokens(hidden: Tensor, head: Tensor, *, low_precision: bool) -> Tensor:
    """The target's most probable token after hidden states [M, d], int64 [M]; a soft cap changes no order."""
    multiply = Multiplier(low_precision, hidden.device)
    rows = multiply.wide(head)
    return torch.cat([multiply.logits(multiply.wide(part), rows).argmax(-1) for part in torch.split(hidden, ROWS)])


@torch.no_grad()
def dev_sums(objective: Objective, batches: Iterable[DevBatch], device: torch.device) -> Tensor:
    """What an evaluation adds up, float32 [8 + 4 gamma + 3 CELLS]; the caller sums over ranks for `dev_metrics`."""
    gamma = objective.drafter.config.gamma
    total = torch.zeros(8 + 4 * gamma + 3 * CELLS, device=device)
    for dev in batches:
        batch = dev.batch.to(device)
        _, sums, slots, logits = objective(batch, objective.denominators(batch))
        if slots.best is None:
            raise RuntimeError("evaluation needs the greedy draft tokens")
        blocks = batch.anchors.numel()
        acceptance = confidence_target(slots.l1)
        matches = (slots.best == dev.target_columns).float()
        grid = torch.zeros(3, blocks * gamma, device=device)  # unsupervised slots accept nothing
        grid[0, batch.slot_rows] = matches
        grid[1, batch.slot_rows] = acceptance
        grid[2, batch.slot_rows] = 1.0
        match, accept, there = grid.view(3, blocks, gamma)
        total[:5] += sums.stacked()
        total[5] += match.cumprod(-1).sum()
        total[6] += accept.cumprod(-1).sum()
        total[7] += there[:, 0].sum()
        error = torch.zeros(gamma, device=device)
        if logits is not None:
            error.index_add_(0, batch.targets.slots, (torch.sigmoid(logits) - acceptance).abs())
            total[8 + 4 * gamma :] += confidence_sums(logits, acceptance)
        total[8 : 8 + 4 * gamma] += torch.cat([there.sum(0), match.sum(0), accept.sum(0), error])
    return total


def dev_metrics(total: Tensor, gamma: int, *, confidence: bool = True) -> dict[str, float | list[float]]:
    """Metrics from summed `dev_sums`.

    Args:
        confidence: whether there is a confidence head; nothing is said of one that is not there.
    Returns:
        `dev_anchor_tau` (greedy) and `dev_anchor_tau_sampled` (analytic, temperature 1), both with the bonus token; the
        losses; per position j, given that the text's tokens precede it: `greedy_match`, `acceptance` (1 - L1 / 2)
        and `confidence_error` (mean absolute); and `confidence_fit`, the scale and shift of the confidence head's
        logits that this split asks for, every slot alike (the losses weigh early slots more).
    Raises:
        StageError: the confidence head's logits were not finite.
    """
    anchors = max(float(total[7]), 1.0)
    there, match, accept, error = total[8 : 8 + 4 * gamma].cpu().double().view(4, gamma).clone()
    fit = fit_confidence(total[8 + 4 * gamma :])
    there = there.clamp(min=1)
    found = {
        "dev_anchor_tau": 1 + float(total[5]) / anchors,
        "dev_anchor_tau_sampled": 1 + float(total[6]) / anchors,
        **{f"dev_{name}": value for name, value in mean_losses(total[:5]).items()},
        "dev_greedy_match": (match / there).tolist(),
        "dev_acceptance": (accept / there).tolist(),
        "dev_confidence_error": (error / there).tolist(),
        "dev_confidence_fit": [fit.scale, fit.shift],
    }
    return found if confidence else {key: value for key, value in found.items() if "confidence" not in key}
