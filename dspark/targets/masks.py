"""Explicit attention masks for families whose layers do not all see the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.targets.traits import FULL, SLIDING, Family


def layer_masks(mask: Tensor, family: Family, windows: Sequence[int | None]) -> Tensor | dict[str, Tensor]:
    """What a family's decoder takes for a causal mask.

    Keys and values of all positions are kept, also where a layer sees a window only: what a rollback uncovers again
    must still be there.

    Args:
        mask: True where full attention sees, [B, 1, Q, keys].
        windows: of the layers (`traits.windows`).
    """
    window = next((one for one in windows if one is not None), None)
    if window is None:
        return mask
    near = within_window(mask, window)
    return near if family.masks == "one" else {FULL: mask, SLIDING: near}


def within_window(mask: Tensor, window: int) -> Tensor:
    """Of what each query sees, the `window` newest keys, its own among them.

    Counted among visible keys, not by column: padding between them moves nothing.

    Args:
        mask: True where visible, [.., Q, keys]; a query's keys stand in the order of their positions.
    """
    if mask.shape[-1] <= window:
        return mask
    newer = mask.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1)  # visible keys from this one on
    return mask & (newer <= window)
