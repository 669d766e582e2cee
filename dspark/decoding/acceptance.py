"""The acceptance rule of speculative decoding (DSpark, section 2.1), which keeps the target's distribution exactly.

Draft token x, drawn from q, is accepted with probability min(1, p(x) / q(x)), left to right. The first rejection ends
the block and one token is drawn from normalise(max(p - q, 0)); if all are accepted, a bonus token is drawn from p.
The q that a token was drawn from and the q of the ratio are one tensor at one precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dspark.decoding.draws import Draws, Rows
from dspark.decoding.prefixes import Counts, leading
from dspark.decoding.truncation import WHOLE, Truncation

if TYPE_CHECKING:
    from dspark.decoding.drafting import Proposal


def distribution(
    logits: Tensor, temperature: float, precision: torch.dtype = torch.float32, truncation: Truncation = WHOLE
) -> Tensor:
    """softmax(logits / temperature), and what a truncation leaves of it.

    Args:
        logits: [..., V], any floating dtype.
        temperature: > 0.
        precision: of the result and of what is computed on the way, at least float32.
        truncation: top-k and top-p, applied after the temperature.
    """
    logits = logits.to(precision)
    return truncation.of(torch.softmax(logits if temperature == 1 else logits / temperature, -1))


def accept_greedy(target_logits: Tensor, drafts: Tensor, lengths: Counts) -> tuple[Counts, Tensor]:
    """At temperature 0 a draft token is accepted iff it is the target's arg max.

    Args:
        target_logits: [B, K + 1, V]; row j is the target's view after the first j draft tokens.
        drafts: target ids, [B, >= K].
        lengths: draft tokens under verification per row, [B], at most K.
    Returns:
        accepted leading tokens [B]; the token that follows them [B].
    """
    return accept_best(target_logits.argmax(-1), drafts, lengths)


def accept_best(best: Tensor, drafts: Tensor, lengths: Counts) -> tuple[Counts, Tensor]:
    """As `accept_greedy`, from the target's arg maxima, [B, K + 1]."""
    width = best.shape[1] - 1
    matches = (best[:, :width] == drafts[:, :width]).cpu().numpy()
    matches &= np.arange(width) < lengths[:, None]
    accepted = leading(matches)
    return accepted, best.gather(1, torch.from_numpy(accepted).to(best.device)[:, None]).squeeze(1)


def accept_sampled(
    target_probs: Tensor, proposal: Proposal | None, lengths: Counts, draws: Draws, requests: Rows
) -> tuple[Counts, Tensor]:
    """Rejection sampling of a drafted block.

    Args:
        target_probs: [B, K + 1, V], from `distribution`.
        proposal: drafted at the same temperature, with `probs` and `indices`; None where nothing was drafted (K = 0).
        lengths: draft tokens under verification per row, [B], at most K.
        draws: where randomness comes from.
        requests: the request of each row, [B].
    Returns:
        accepted leading tokens [B]; the token that follows them [B], drawn from the residual or as the bonus.
    """
    width = target_probs.shape[1] - 1
    if proposal is None or width == 0:
        return np.zeros(len(lengths), np.int64), draws.categorical(target_probs[:, 0], requests)
    if proposal.probs is None or proposal.indices is None:
        raise ValueError("a proposal without its distributions cannot be verified at a temperature above 0")
    target = target_probs[:, :width].gather(2, proposal.tokens[:, :width, None]).squeeze(2)
    drafter = proposal.probs[:, :width].gather(2, proposal.indices[:, :width, None]).squeeze(2)
    accepted = draws.accept((target / drafter).clamp(max=1), lengths, requests)

    rows = torch.arange(len(accepted), device=target_probs.device)
    stop = torch.from_numpy(accepted).to(target_probs.device)
    following = target_probs[rows, stop]  # [B, V]
    rejected = accepted < lengths
    if rejected.any():
        # The clamped index is only read where something was rejected, hence where stop < width.
        drafted = proposal.probs[rows, stop.clamp(max=width - 1)]
        remaining = residual(following, drafted, proposal.token_ids)
        following = torch.where(torch.from_numpy(rejected).to(stop.device)[:, None], remaining, following)
    return accepted, draws.categorical(following, requests)


def residual(target: Tensor, drafter: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """normalise(max(p - q, 0)): what a rejected draft token is replaced from.

    Args:
        target: p, [B, V].
        drafter: q, [B, Vd].
        token_ids: target id of each column of q, [Vd]; None: Vd = V.
    Returns:
        [B, V]. Where p and q agree up to rounding there is nothing left to draw from, and p is returned.
    """
    drafter = drafter.to(target.dtype)
    if token_ids is None:
        remaining = (target - drafter).clamp_(min=0)
    else:
        remaining = target.index_add(1, token_ids, drafter, alpha=-1).clamp_(min=0)
    mass = remaining.sum(-1, keepdim=True)
    return torch.where(mass > 0, remaining / mass.clamp(min=torch.finfo(mass.dtype).tiny), target)
