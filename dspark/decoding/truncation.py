"""Top-k and top-p: which part of a distribution may be drawn, cut the same way for target and drafter.

The acceptance rule keeps whatever target distribution it is given, so with both sides cut it keeps the cut one: the
ratio divides the cut p by the cut q that the token was drawn from, and the residual is what that q leaves of that p.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dspark.errors import SettingsError

if TYPE_CHECKING:
    from torch import Tensor

# Nuclei rarely hold more tokens; a row whose nucleus does is sorted in full.
_NUCLEUS_GUESS = 64


@dataclass(frozen=True)
class Truncation:
    """The `top_k` most likely tokens, and of these the fewest that hold `top_p` of their mass (`targets.sampling`).

    Attributes:
        top_k: 0: no limit.
        top_p: in (0, 1]; 1: no limit.
    Raises:
        SettingsError: a limit out of range.
    """

    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.top_k < 0:
            raise SettingsError(f"top_k is {self.top_k}, it must be at least 0", "top_k 0 sets no limit")
        if not 0 < self.top_p <= 1:
            raise SettingsError(f"top_p is {self.top_p:g}, it must be in (0, 1]", "top_p 1 sets no limit")

    @property
    def whole(self) -> bool:
        """Whether nothing is cut off."""
        return self.top_k == 0 and self.top_p == 1

    def of(self, probs: Tensor) -> Tensor:
        """What remains of distributions [..., V], each summing to one again, at their own precision."""
        vocab = probs.shape[-1]
        if self.whole:
            return probs
        rows = probs.reshape(-1, vocab)
        if 0 < self.top_k < vocab:
            values, ids = rows.topk(self.top_k, -1)
            return self._scattered(rows, values, ids, values).reshape(probs.shape)
        if self.top_p == 1:
            return probs
        values, ids = rows.topk(min(_NUCLEUS_GUESS, vocab), -1)
        cut = self._scattered(rows, values, ids, rows)
        wide = values.double().sum(-1) < self.top_p * rows.double().sum(-1)
        if wide.any():
            values, ids = rows[wide].sort(-1, descending=True)
            cut[wide] = self._scattered(rows[wide], values, ids, values)
        return cut.reshape(probs.shape)

    def _scattered(self, rows: Tensor, values: Tensor, ids: Tensor, of: Tensor) -> Tensor:
        """The nucleus of falling `values` [N, k] of tokens `ids` at their places, normalised, [N, V].

        Args:
            of: what the nucleus must hold `top_p` of, [N, any].
        """
        nucleus = values.double()
        if self.top_p < 1:
            before = nucleus.cumsum(-1) - nucleus
            nucleus = nucleus.masked_fill(before >= self.top_p * of.double().sum(-1, keepdim=True), 0.0)
        nucleus = nucleus / nucleus.sum(-1, keepdim=True)
        return rows.new_zeros(rows.shape).scatter_(-1, ids, nucleus.to(rows.dtype))


WHOLE = Truncation()
