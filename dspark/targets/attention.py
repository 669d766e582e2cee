"""Attention for targets on a CPU: grouped keys and values are read where they lie.

With a mask, transformers' own scaled-dot-product path copies keys and values once per query head of a group, each
step and layer. torch's CPU kernel reads them in place, which is several times faster while decoding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAME = "dspark_grouped"


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
        query: [B, heads, Q, head_dim].
        key, value: [B, kv heads, K, head_dim].
        attention_mask: True where visible, [B, 1, Q, K]; None stands for a causal mask (one query sees all keys).
    Returns:
        [B, Q, heads, head_dim], and no attention weights.
    """
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=attention_mask is None and query.shape[2] > 1,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return output.transpose(1, 2).contiguous(), None


def register() -> str:
    """Make the attention known to transformers; returns the name to load a model with."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME
