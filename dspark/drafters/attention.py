"""Attention of isolated blocks over a shared context.

Every block of a row attends to the part of the row's context that is visible to it and, bidirectionally, to itself;
never to another block. Two score matrices, [N*K, S] and [K, K] per block, instead of one dense [N*K, S + N*K].
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.drafters import fused


def attend(
    queries: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    block_keys: Tensor,
    block_values: Tensor,
    visible: Tensor,
    scale: float,
) -> Tensor:
    """Grouped-query attention of N blocks of K slots per row.

    Args:
        queries: [B, heads, N, K, hd].
        context_keys, context_values: [B, kv, S, hd]; head i reads kv head i // (heads / kv).
        block_keys, block_values: [B, kv, N, K, hd].
        visible: which context positions a block sees, bool [B, N, S].
        scale: factor on the scores.
    Returns:
        [B, heads, N, K, hd].
    """
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
