"""Attention for targets on a CPU: grouped keys and values are read where they lie, and queries may come packed.

With a mask, transformers' own scaled-dot-product path copies keys and values once per query head of a group, each
step and layer. torch's CPU kernel reads them in place, but one query at a time. While decoding, the query heads of a
group are few queries of the same keys: laid together they make one product, with the same result, in a fraction of the
time.

Rows that verify different numbers of tokens come as one row of all their tokens, so that nothing but attention computes
padding. Here they are taken apart: the mask says whose a token is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAME = "dspark_grouped"
_FEW_QUERIES = 32  # per head; beyond, the kernel has enough to do and the mask would grow for nothing


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention in transformers' calling convention.

    Args:
        query: [B, heads, Q, head_dim]; or packed, [1, heads, T, head_dim] of B > 1 rows.
        key, value: [B, kv heads, K, head_dim].
        attention_mask: True where visible, [B, 1, Q, K]; None stands for a causal mask (one query sees all keys). Of
            packed queries there are as many as places of the mask that see anything, row after row.
    Returns:
        [B, Q, heads, head_dim] or [1, T, heads, head_dim], and no attention weights.
    """
    if attention_mask is not None and query.shape[0] < key.shape[0]:
        real = attention_mask[:, 0].any(-1)  # [B, Q]
        apart = query.new_zeros(*real.shape, *query.shape[1::2])
        apart[real] = query[0].transpose(0, 1)
        output, _ = grouped_attention(module, apart.transpose(1, 2), key, value, attention_mask, scaling, **options)
        return output[real][None], None
    batch, heads, queries, width = query.shape
    group = heads // key.shape[1]
    together = group > 1 and (queries == 1 or (attention_mask is not None and queries <= _FEW_QUERIES))
    if together:
        query = query.reshape(batch, heads // group, group * queries, width)
        if attention_mask is not None:
            attention_mask = attention_mask.repeat(1, 1, group, 1)
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=attention_mask is None and queries > 1,
        scale=scaling,
        enable_gqa=group > 1 and not together,
    )
    output = output.reshape(batch, heads, queries, -1)
    return output.transpose(1, 2).contiguous(), None


def register() -> str:
    """Make the attention known to transformers; returns the name to load a model with."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME
