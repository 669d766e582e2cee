"""Draft logits of a chunk of slots and the way back from their gradient, with a soft cap where there is one."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.targets.capping import soft_cap_
from dspark.training.products import Multiplier


class DraftLogits:
    """z = c tanh(h head^T / c) + z_m W2^T, chunk by chunk; without a soft cap c both products are one.

    Args:
        hidden: h, [M, d].
        markov: z_m, [M, r]; r = 0 without a sequential head.
        markov_w2: W2, [Vd, r].
        head: LM head rows of the draft vocabulary, [Vd, d].
        cap: c, or None.
        multiply: at which precision.
    """

    def __init__(
        self, hidden: Tensor, markov: Tensor, markov_w2: Tensor, head: Tensor, cap: float | None, multiply: Multiplier
    ) -> None:
        self.width, self._cap, self._multiply = hidden.shape[1], cap, multiply
        self._joined = torch.cat([hidden.float(), markov.float()], dim=-1)
        weight = torch.cat([head.float(), markov_w2.float()], dim=-1)
        self._narrow = multiply.narrow(weight)
        parts = (weight,) if cap is None else (head, markov_w2)
        self._wide = [multiply.wide(part) for part in parts]
        self._capped: Tensor | None = None  # base logits of the chunk at hand

    def write(self, rows: slice, out: Tensor) -> None:
        """Logits of some slots into `out`, float32 [rows, Vd]."""
        joined = self._joined[rows]
        if self._cap is None:
            self._multiply.logits(self._multiply.wide(joined), self._wide[0], out)
            return
        if self._capped is None:
            self._capped = torch.empty_like(out)
        base = self._capped[: len(out)]
        hidden, markov = (self._multiply.wide(part) for part in (joined[:, : self.width], joined[:, self.width :]))
        self._multiply.logits(hidden, self._wide[0], base)
        soft_cap_(base, self._cap)
        if markov.shape[1]:
            self._multiply.logits(markov, self._wide[1], out)
            out += base
        else:  # no sequential head
            out.copy_(base)

    def back(self, gradient: Tensor, narrow: Tensor) -> Tensor:
        """Gradient of h and z_m, side by side, [rows, d + r], from that of the logits that were written last.

        Args:
            gradient: float32 [rows, Vd].
            narrow: the same as a factor of products.
        """
        if self._cap is None or self._capped is None:
            return torch.mm(narrow, self._narrow)
        # d c tanh(u / c) / du = 1 - tanh(u / c)^2
        slope = self._capped[: len(gradient)].div_(self._cap).square_().neg_().add_(1)
        through = self._multiply.narrow(slope.mul_(gradient))
        head, markov_w2 = self._narrow[:, : self.width], self._narrow[:, self.width :]
        return torch.cat([torch.mm(through, head), torch.mm(narrow, markov_w2)], dim=-1)
