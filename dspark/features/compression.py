"""How features are stored: in a plain dtype, or as small codes with a scale per token.

`int8` and `fp8` (e4m3) divide a group of numbers by what makes the largest of them the largest code. A group is one
token's output of one tapped layer, so that a layer or a token with huge activations costs no other one its precision.
The last hidden state, from which the target's distributions come, is divided in groups of 64 channels
(docs/how-to/feature-store.md has what both cost in tau).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.features.sizes import COMPRESSED

_LARGEST = {"int8": 127.0, "fp8": 448.0}  # code; the other bit pattern of int8 is not used, so that codes are symmetric


@dataclass(frozen=True)
class Codes:
    """Numbers as they are stored."""

    values: Tensor  # [T, n] in the dtype of storage
    scales: Tensor | None  # float32 [T, groups]; None for plain dtypes


def encode(values: Tensor, dtype: str, groups: int) -> Codes:
    """Numbers in a dtype of storage.

    Args:
        values: [T, n], of any floating dtype.
        groups: scales per row, of equal parts of it; a divisor of n.
    Returns:
        codes; an int8 code is off by half a scale at most, an fp8 code by a sixteenth of its number or, for numbers
        below 2^-6 scales, by 2^-10 scales. NaN and infinity show as such in the scale.
    """
    if dtype not in COMPRESSED:
        return Codes(values.to(getattr(torch, dtype)), None)
    grouped = values.float().reshape(*values.shape[:-1], groups, -1)
    largest = _LARGEST[dtype]
    # A row of zeros needs no scale, but no division by zero either.
    scales = (grouped.abs().amax(-1) / largest).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = (grouped / scales.unsqueeze(-1)).clamp(-largest, largest).flatten(-2)
    if dtype == "int8":
        return Codes(scaled.round_().to(torch.int8), scales)
    return Codes(scaled.to(torch.float8_e4m3fn), scales)


def decode(values: Tensor, scales: Tensor | None) -> Tensor:
    """Numbers from what was stored: float32 from codes with scales, otherwise the values as they are."""
    if scales is None:
        return values
    grouped = values.float().reshape(*scales.shape, -1)
    return (grouped * scales.unsqueeze(-1)).flatten(-2)
