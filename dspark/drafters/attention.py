"""Attention of isolated blocks over a shared context.

Every block of a row attends to the part of the row's context that is visible to it and, bidirectionally, to itself;
never to another block. Two score matrices, [N*K, S] and [K, K] per block, instead of one dense [N*K, S + N*K].

For training, the blocks and contexts of several sequences are packed into one row, so that nothing is computed for
padding: not for sequences shorter than others, nor for those with fewer blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.drafters import fused


@dataclass(frozen=True)
class Packing:
    """Which blocks and which part of the context belong together, in a row that holds several sequences.

    Attributes:
        blocks: blocks of each sequence, one sequence after the other; N in all.
        contexts: context positions of each sequence; T in all.
        seen: how many positions of its own sequence's context a block sees, the first ones, int64 [N].
    """

    blocks: tuple[int, ...]
    contexts: tuple[int, ...]
    seen: Tensor

    def to(self, device: torch.device) -> Packing:
        """The same on another device."""
        return Packing(self.blocks, self.contexts, self.seen.to(device))

    def visible(self) -> Iterator[Tensor]:
        """What the blocks of each sequence see of its context, bool [1, blocks, context] each."""
        for seen, length in zip(torch.split(self.seen, list(self.blocks)), self.contexts, strict=True):
            yield (torch.arange(length, device=seen.device) < seen.unsqueeze(1)).unsqueeze(0)


Visible = Tensor | Packing


def attend(
    queries: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    block_keys: Tensor,
    block_values: Tensor,
    visible: Visible,
    scale: float,
) -> Tensor:
    """Grouped-query attention of N blocks of K slots per row.

    Args:
        queries: [B, heads, N, K, hd].
        context_keys, context_values: [B, kv, S, hd]; head i reads kv head i // (heads / kv).
        block_keys, block_values: [B, kv, N, K, hd].
        visible: which context positions a block sees, bool [B, N, S], or how a single row is packed.
        scale: factor on the scores.
    Returns:
        [B, heads, N, K, hd].
    """
    if isinstance(visible, Packing):
        return _packed(queries, context_keys, context_values, block_keys, block_values, visible, scale)
    batch, heads, blocks, slots, size = queries.shape
    kv = context_keys.shape[1]
    group = heads // kv
    # [B, kv, N, group * K, hd]: a kv head's group of query heads lies together, block by block.
    grouped = (queries * scale).view(batch, kv, group, blocks, slots, size).transpose(2, 3)
    # With blocks of one slot the reshape alone would not lay it out anew, and what follows takes views.
    grouped = grouped.reshape(batch, kv, blocks, group * slots, size).contiguous()
    if torch.is_grad_enabled() and queries.requires_grad:
        mixed = fused.attend(grouped, context_keys, context_values, block_keys, block_values, ~visible)
    else:
        mixed = _attend(grouped, context_keys, context_values, block_keys, block_values, visible)
    ungrouped = mixed.view(batch, kv, blocks, group, slots, size).transpose(2, 3)
    return ungrouped.reshape(batch, heads, blocks, slots, size)


def _packed(
    queries: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    block_keys: Tensor,
    block_values: Tensor,
    packing: Packing,
    scale: float,
) -> Tensor:
    """`attend` of every packed sequence by itself; B is 1."""
    # One split, not a slice per sequence: the derivative of a slice is as large as the whole.
    of_blocks = zip(
        *(torch.split(x, list(packing.blocks), 2) for x in (queries, block_keys, block_values)), strict=True
    )
    of_contexts = zip(*(torch.split(x, list(packing.contexts), 2) for x in (context_keys, context_values)), strict=True)
    mixed = [
        attend(own, keys, values, own_keys, own_values, seen, scale)
        for (own, own_keys, own_values), (keys, values), seen in zip(
            of_blocks, of_contexts, packing.visible(), strict=True
        )
    ]
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed, 2)


def _attend(
    queries: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    block_keys: Tensor,
    block_values: Tensor,
    visible: Tensor,
) -> Tensor:
    """The definition, on scaled and grouped queries [B, kv, N, G, hd]."""
    batch, kv, blocks, group, size = queries.shape
    length = context_keys.shape[2]
    flat = queries.view(batch, kv, blocks * group, size)
    context_scores = torch.matmul(flat, context_keys.transpose(-1, -2)).view(batch, kv, blocks, group, length)
    block_scores = torch.matmul(queries, block_keys.transpose(-1, -2))
    # The block's own keys are always visible, so no row is empty even where no context is.
    context_scores = context_scores.masked_fill(~visible[:, None, :, None, :], -torch.inf)
    weights = torch.softmax(torch.cat([context_scores, block_scores], dim=-1).float(), dim=-1).to(queries.dtype)
    on_context = weights[..., :length].reshape(batch, kv, blocks * group, length)
    mixed = torch.matmul(on_context, context_values).view(queries.shape)
    return mixed + torch.matmul(weights[..., length:], block_values)
