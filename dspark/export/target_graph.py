"""The target as a graph: tokens behind a context in, logits and taps out, keys and values handed in and out.

The layers are those of transformers' own model. What is done here: where the keys and values of the context come from,
which of them a token sees, and attention in plain matrix products, for which every runtime has a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dspark.targets.loading import Target

_ATTENTION = "dspark_products"


class TargetStep(nn.Module):
    """One pass of a target over new tokens.

    Args:
        target: attends by `product_attention` while this runs.
    """

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.model = target.model
        self.taps = target.taps
        self._cache_argument = target.cache_argument

    def forward(
        self, token_ids: Tensor, past_keys: Tensor, past_values: Tensor, past_length: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Read Q tokens behind each row's past.

        Args:
            token_ids: int64 [B, Q]; row b's stand at positions past_length[b], past_length[b] + 1, ... Whatever is
                wrong with the last of them (padding, rejected drafts) concerns none before it.
            past_keys, past_values: [layers, B, kv, P, hd]; finite, also beyond a row's past_length.
            past_length: int64 [B].
        Returns:
            logits, float32 [B, Q, V]; concatenated taps, [B, Q, m*d]; keys and values of the Q positions, [layers, B,
            kv, Q, hd], of which the caller stores those of the tokens that stay.
        """
        decoder = self.model.model
        context = _HandedContext(past_keys, past_values)
        steps = torch.arange(token_ids.shape[1])
        positions = past_length.unsqueeze(1) + steps
        hidden = decoder.embed_tokens(token_ids)
        rotation = decoder.rotary_emb(hidden, position_ids=positions)
        visible = _visible(past_keys.shape[3], past_length, steps)
        tapped = []
        for number, layer in enumerate(decoder.layers):
            hidden = layer(
                hidden,
                attention_mask=visible,
                position_ids=positions,
                position_embeddings=rotation,
                use_cache=True,
                **{self._cache_argument: context},
            )
            if number in self.taps:
                tapped.append(hidden)
        logits = self.model.get_output_embeddings()(decoder.norm(hidden))
        return logits, torch.cat(tapped, -1), torch.stack(context.new_keys), torch.stack(context.new_values)


def _visible(past: int, past_length: Tensor, steps: Tensor) -> Tensor:
    """What each new token sees, bool [B, 1, Q, past + Q]: its row's past, and the new tokens up to itself."""
    rows, new = past_length.shape[0], steps.shape[0]
    before = torch.arange(past) < past_length.unsqueeze(1)
    among = steps <= steps.unsqueeze(1)
    both = before.unsqueeze(1).expand(rows, new, past), among.unsqueeze(0).expand(rows, new, new)
    return torch.cat(both, 2).unsqueeze(1)


class _HandedContext:
    """Stands in for a transformers cache: the past is an input, what is new becomes an output."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = keys, values
        self.new_keys: list[Tensor] = []
        self.new_values: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take a layer's new keys and values [B, kv, Q, hd]; returns all that it may look at."""
        self.new_keys.append(keys)
        self.new_values.append(values)
        return torch.cat([self._keys[layer], keys], 2), torch.cat([self._values[layer], values], 2)


@contextmanager
def product_attention(target: Target) -> Iterator[None]:
    """Let a target attend in matrix products meanwhile."""
    from transformers import AttentionInterface

    AttentionInterface.register(_ATTENTION, _attend)
    usual = target.model.config._attn_implementation
    target.model.set_attn_implementation(_ATTENTION)
    try:
        yield
    finally:
        target.model.set_attn_implementation(usual)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention in transformers' calling convention; a group's query heads are more queries of the same keys.

    Args:
        query: [B, heads, Q, hd].
        key, value: [B, kv, K, hd].
        attention_mask: True where visible, [B, 1, Q, K].
    Returns:
        [B, Q, heads, hd], and no attention weights.
    """
    batch, heads, queries, width = query.shape
    kv = key.shape[1]
    group = heads // kv
    together = (query * scaling).reshape(batch, kv, group * queries, width)
    scores = torch.matmul(together, key.transpose(-1, -2)).reshape(batch, kv, group, queries, -1)
    scores = scores.masked_fill(~attention_mask.unsqueeze(1), -torch.inf)
    weights = torch.softmax(scores, -1).reshape(batch, kv, group * queries, -1)
    mixed = torch.matmul(weights, value).reshape(batch, heads, queries, width)
    return mixed.transpose(1, 2), None
