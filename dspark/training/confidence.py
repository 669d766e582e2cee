"""Scale and shift of the confidence head, fitted on texts that the drafter was not trained on.

The head learns from the acceptance of drafts on training texts. Where a corpus is seen more than once the drafter knows
them better than any others, so the head states too much everywhere, by about the same at every position. Sequential
temperature scaling cannot mend that: sigmoid(z / T) stays on its side of one half. The last two numbers of the head,
z' = scale * z + shift, are therefore fitted once more, on the dev split, by binary cross entropy with the analytic
acceptance 1 - L1 / 2 as label (Platt scaling), and folded into its weights: engines read a head as before. Every slot
counts alike, where training weighs early slots more: what is promised of a block is a sum over all of them. The split
that temperatures are fitted on has no part in it. A departure from DSpark, which trains on a corpus too large to be
known by heart; no draft and no text changes by it.

Sums over cells of equal logits stand for the slots, so that they add up over batches and processes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.drafters.heads import ConfidenceHead
from dspark.errors import StageError

CELLS = 2048  # of logits
_REACH = 30.0  # logits beyond it are in the outermost cells
_PRIOR = 1.0  # slots' worth of belief that nothing is to be changed: few slots change little
_LEAST_SCALE = 0.05  # the order of confidences is kept
_STEPS = 50


@dataclass(frozen=True)
class ConfidenceFit:
    """z' = scale * z + shift."""

    scale: float = 1.0
    shift: float = 0.0

    @torch.no_grad()
    def fold(self, head: ConfidenceHead) -> None:
        """Let a head state z' where it stated z."""
        head.proj.weight.mul_(self.scale)
        head.proj.bias.mul_(self.scale).add_(self.shift)


def confidence_sums(logits: Tensor, acceptance: Tensor) -> Tensor:
    """Number of slots, sum of logits and sum of acceptances per cell, float32 [3 * CELLS].

    What is not finite stays so in the sums, for `fit_confidence` to refuse.

    Args:
        logits: of the confidence head, [M].
        acceptance: 1 - L1 / 2 of the same slots, [M].
    """
    logits = logits.float()
    z = logits.clamp(-_REACH, _REACH)
    # NaN is in no cell, and as an integer it would index outside of the sums.
    cells = ((z.nan_to_num() + _REACH) * (CELLS / (2 * _REACH))).long().clamp(max=CELLS - 1)
    sums = torch.zeros(3, CELLS, device=z.device)
    seen = torch.where(logits.isfinite(), z, logits)
    for row, values in enumerate((torch.ones_like(z), seen, acceptance.float())):
        sums[row].index_add_(0, cells, values)
    return sums.flatten()


def fit_confidence(sums: Tensor) -> ConfidenceFit:
    """The scale and shift with the least binary cross entropy, all slots alike, by Newton's method; none: no change.

    Args:
        sums: of `confidence_sums`, added up.
    Raises:
        StageError: logits or acceptances were not finite.
    """
    count, total, accepted = sums.double().cpu().view(3, CELLS)
    for values, name in ((total, "its logits"), (accepted, "the acceptances that it is to state")):
        if not bool(values.isfinite().all()):
            raise StageError(
                f"confidence head: {name} on the dev split are not finite",
                "lower training.learning_rate, or set training.precision to float32",
            )
    there = count > 0
    if not bool(there.any()):
        return ConfidenceFit()
    count, accepted = count[there], accepted[there]
    z = total[there] / count
    fit = _newton(z, count, accepted, torch.tensor([1.0, 0.0], dtype=torch.float64), free=(True, True))
    if fit[0] < _LEAST_SCALE:
        start = torch.tensor([_LEAST_SCALE, float(fit[1])], dtype=torch.float64)
        fit = _newton(z, count, accepted, start, free=(False, True))
    return ConfidenceFit(float(fit[0]), float(fit[1]))


def _newton(z: Tensor, count: Tensor, accepted: Tensor, fit: Tensor, free: tuple[bool, bool]) -> Tensor:
    """Minimise a convex loss; a step that would raise it is halved until it does not."""
    prior, moves = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor(free, dtype=torch.float64)
    features = torch.stack([z, torch.ones_like(z)])  # [2, cells]

    def loss(value: Tensor) -> float:
        stated = value @ features
        entropy = count * torch.nn.functional.softplus(stated) - accepted * stated
        return float(entropy.sum() + _PRIOR / 2 * ((value - prior) ** 2).sum())

    lowest = loss(fit)
    for _ in range(_STEPS):
        stated = torch.sigmoid(fit @ features)
        slope = (features @ (count * stated - accepted) + _PRIOR * (fit - prior)) * moves
        bend = (features * (count * stated * (1 - stated))) @ features.T
        bend = bend * torch.outer(moves, moves) + torch.diag(torch.where(moves > 0, _PRIOR, 1.0))
        step = torch.linalg.solve(bend, slope)
        while loss(fit - step) > lowest and float(step.abs().max()) > 1e-9:
            step = step / 2
        fit = fit - step
        change, lowest = lowest - loss(fit), loss(fit)
        if abs(change) <= 1e-12 * max(abs(lowest), 1.0):
            break
    return fit
