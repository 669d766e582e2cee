"""The soft cap that some families put on logits: cap * tanh(logits / cap)."""

from __future__ import annotations

from torch import Tensor


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """Capped logits, within (-cap, cap), in their dtype; None: as they are."""
    return logits if cap is None else (logits / cap).tanh() * cap


def soft_cap_(logits: Tensor, cap: float | None) -> Tensor:
    """The same in place, without gradients."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
