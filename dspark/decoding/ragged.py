"""Rows of different widths without their padding.

A pass over [B, Q] tokens costs B x Q whatever a row verifies. Laid one behind the other, only what is verified is paid
for in everything that looks at one token at a time, which is all of a model but its attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.decoding.prefixes import Counts, is_worth_packing


@dataclass(frozen=True)
class Ragged:
    """Which places of [B, Q] hold a token: the first ones of each row.

    Attributes:
        real: bool [B, Q].
    """

    real: Tensor

    @classmethod
    def of(cls, widths: Counts, device: torch.device) -> Ragged | None:
        """The layout of rows with so many tokens, [B]; None: padding is not worth the trouble."""
        if not is_worth_packing(widths):
            return None
        places = torch.arange(int(widths.max()), device=device)
        return cls(places < torch.from_numpy(widths).to(device)[:, None])

    def pack(self, rows: Tensor) -> Tensor:
        """[B, Q, ..] -> [1, T, ..], the T tokens row after row."""
        return rows[self.real][None]

    def spread(self, packed: Tensor) -> Tensor:
        """[1, T, ..] -> [B, Q, ..], zeros where there is no token."""
        rows = packed.new_zeros(*self.real.shape, *packed.shape[2:])
        rows[self.real] = packed[0]
        return rows
