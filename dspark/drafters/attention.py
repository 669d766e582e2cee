"""Attention of isolated blocks over a shared context.

Every block of a row attends to the part of the row's context that is visible to it and, bidirectionally, to itself;
never to another block. Two score matrices, [N*K, S] and [K, K] per block, instead of one dense [N*K, S + N*K].
"""

from __future__ import annotations

import torch
from torch import Tensor


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
    kv, length = context_keys.shape[1:3]
    group = heads // kv
    # [B, kv, N, group, K, hd]: a kv head's group of query heads lies together, block by block.
    grouped = queries.view(batch, kv, group, blocks, slots, size).transpose(2, 3)
    flat = grouped.reshape(batch, kv, blocks * group * slots, size)
    context_scores = torch.matmul(flat, context_keys.transpose(-1, -2))
    context_scores = context_scores.view(batch, kv, blocks, group * slots, length)
    block_scores = torch.matmul(flat.view(batch, kv, blocks, group * slots, size), block_keys.transpose(-1, -2))
    hidden = torch.full((), -torch.inf, dtype=context_scores.dtype, device=context_scores.device)
    context_scores = torch.where(visible[:, None, :, None, :], context_scores, hidden)
    # The block's own keys are always visible, so no row is empty even where no context is.
    weights = torch.softmax(torch.cat([context_scores, block_scores], dim=-1).float() * scale, dim=-1)
    weights = weights.to(queries.dtype)
    on_context = weights[..., :length].reshape(batch, kv, blocks * group * slots, length)
    mixed = torch.matmul(on_context, context_values).view(batch, kv, blocks, group * slots, size)
    mixed = mixed + torch.matmul(weights[..., length:], block_values)
    ungrouped = mixed.view(batch, kv, blocks, group, slots, size).transpose(2, 3)
    return ungrouped.reshape(batch, heads, blocks, slots, size)
