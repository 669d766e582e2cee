"""The EAGLE-3 drafter: one layer that drafts token by token, fed with its own output (deepspec.md, section 4.1).

What stands at position i is a pair: the target's projected features f[i] and the token *after* them, x[i+1]. The layer
attends to pairs; its state predicts x[i+2]. A chain with anchor x[p] starts at the last verified position, p - 1, with
the pair (f[p-1], x[p]), and goes on where the target has not been yet: step j pairs the state of step j - 1 with the
token that was drafted from it (or, in training, with the text's), at position p - 1 + j, and predicts x[p+1+j]. So slot
j of a chain means what slot j of a DSpark block means: the same label, the same previous token, the same context of
features strictly before p.

A chain sees the pairs of the text before p - 1 and its own steps, never another chain's (training-time test, with the
steps of one chain behind each other instead of the sequence copied per step; the numbers are the same).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from dspark.drafters.attention import Packing, Visible, attend
from dspark.drafters.backbone import Attention, FeedForward, Pair, RMSNorm, Rotary
from dspark.drafters.base import Drafter, randomise
from dspark.drafters.cache import ContextCache
from dspark.drafters.config import DrafterConfig


class ChainAttention(Attention):
    """Attention of the draft layer: queries, keys and values are made of [embedding ; state], 2d wide."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        wide, bias = 2 * config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(wide, self.heads * self.size, bias=bias)
        self.k_proj = nn.Linear(wide, self.kv * self.size, bias=bias)
        self.v_proj = nn.Linear(wide, self.kv * self.size, bias=bias)

    def step(self, x: Tensor, context: Pair, own: list[Pair], rotation: Pair, visible: Visible) -> Tensor:
        """One step of chains; appends its keys and values to `own`.

        Args:
            x: [B, N, 2d].
            context: keys and values of the text's pairs, [B, kv, S, hd].
            own: keys and values of the chains' earlier steps, [B, kv, N, hd] each.
            rotation: cos and sin of the step's positions, [B, N, hd / 2].
            visible: pairs of the text that a chain sees, bool [B, N, S], or how a single row is packed.
        Returns:
            [B, N, d].
        """
        batch, chains, _ = x.shape
        queries = self._turned(self._split(self.q_proj(x), self.heads), self.q_norm, rotation)
        own.append(self.keys_values(x, rotation))
        keys, values = (torch.stack(parts, 3) for parts in zip(*own, strict=True))
        mixed = attend(queries.unsqueeze(3), *context, keys, values, visible, self.scale)
        joined = mixed.squeeze(3).transpose(1, 2).reshape(batch, chains, self.heads * self.size)
        result: Tensor = self.o_proj(joined)
        return result


class ChainLayer(nn.Module):
    """The draft layer: the state is normed beside the token's embedding, and added un-normed."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, before_products=True)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, before_products=True)
        self.self_attn = ChainAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, before_products=True)
        self.mlp = FeedForward(config)

    def joined(self, embedded: Tensor, state: Tensor) -> Tensor:
        """What attention reads of pairs: embeddings and states [..., d] each, [..., 2d]."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(state)], dim=-1)

    def step(
        self, embedded: Tensor, state: Tensor, context: Pair, own: list[Pair], rotation: Pair, visible: Visible
    ) -> Tensor:
        """States [B, N, d] after one step; the other arguments as in `ChainAttention.step`."""
        attended = self.self_attn.step(self.joined(embedded, state), context, own, rotation, visible)
        mixed: Tensor = state + attended
        result: Tensor = mixed + self.mlp(self.post_attention_layernorm(mixed))
        return result


@dataclass
class Chains:
    """Chains on their way: one step predicts one token of each.

    Attributes:
        state: of the last step, [B, N, d]; before the first one, the features that the chains start from.
        positions: of the next step, int64 [B, N].
        context: keys and values of the text's pairs, [B, kv, S, hd].
        visible: pairs of the text that a chain sees, bool [B, N, S], or how a single row is packed.
        own: keys and values of the steps so far.
    """

    state: Tensor
    positions: Tensor
    context: Pair
    visible: Visible
    own: list[Pair]


class Eagle3Drafter(Drafter):
    """A drafter on a frozen target's embedding and LM head, see `Drafter`. Its one layer is the only depth there is.

    Args:
        seed: of the random initial weights.
    """

    def __init__(
        self,
        config: DrafterConfig,
        embedding: Tensor,
        head: Tensor,
        draft_token_ids: Tensor | None = None,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__(config, embedding, head, draft_token_ids)
        self.fc = nn.Linear(config.context_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([ChainLayer(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config)
        randomise(self, seed)

    # ------------------------------------------------------------ one-shot form

    def project(self, features: Tensor) -> Tensor:
        """f = fc(F) of concatenated taps [..., m*d], [..., d]; the layer has a norm for it."""
        projected: Tensor = self.fc(features)
        return projected

    def pairs(self, projected: Tensor, following_ids: Tensor) -> Tensor:
        """What attention reads of the text's pairs: f [..., d] with the tokens after them [...], [..., 2d]."""
        return self._layer.joined(self._embedded(following_ids), projected)

    def chains(self, context: Tensor, start: Tensor, anchors: Tensor) -> Chains:
        """Chains before their first step.

        Args:
            context: made by `pairs`, of positions 0 .. S-1, [B, S, 2d].
            start: f of the position before each anchor, [B, N, d].
            anchors: the anchors' positions, int64 [B, N].
        """
        steps = torch.arange(context.shape[1], device=context.device)
        # The pair that a chain starts with is its own first step: it is visible once.
        visible = steps < (anchors - 1).unsqueeze(-1)
        return self._started(context, steps.expand(context.shape[:2]), start, anchors, visible)

    def packed_chains(
        self, context: Tensor, positions: Tensor, start: Tensor, anchors: Tensor, packing: Packing
    ) -> Chains:
        """`chains` where a single row holds several sequences.

        Args:
            context: made by `pairs`, one sequence after the other, [1, T, 2d].
            positions: of these in their sequences, int64 [1, T].
            start, anchors: as of `chains`, [1, N, d] and int64 [1, N].
            packing: which chains and which context belong together, and what stands before each anchor.
        """
        return self._started(context, positions, start, anchors, replace(packing, seen=packing.seen - 1))

    def step(self, chains: Chains, token_ids: Tensor) -> Tensor:
        """Take the next step of every chain.

        Args:
            token_ids: what stands before the token to predict: the anchor, then what was drafted, int64 [B, N].
        Returns:
            normed states h, [B, N, d]: the input of the LM head.
        """
        rotation = self.rotary(chains.positions)
        chains.state = self._layer.step(
            self._embedded(token_ids), chains.state, chains.context, chains.own, rotation, chains.visible
        )
        chains.positions = chains.positions + 1
        hidden: Tensor = self.norm(chains.state)
        return hidden

    # ------------------------------------------------------------ incremental form

    def new_cache(self, rows: int, capacity: int) -> ChainCache:
        """An empty cache for `rows` sequences of at most `capacity` positions, in the drafter's dtype."""
        return ChainCache.of(self, rows, capacity)

    def extend(self, cache: ChainCache, features: Tensor, token_ids: Tensor, counts: Tensor) -> None:
        """Add newly verified positions: their features and their tokens.

        The features of a row's last position wait for the token after them, with which they become a pair.

        Args:
            features: concatenated taps, [B, Q, m*d].
            token_ids: at those positions, int64 [B, Q].
            counts: positions to keep per row, int64 [B]; at least one at the first call.
        Raises:
            SettingsError: if a row would grow beyond the cache's capacity.
        """
        projected = self.project(features.to(self.fc.weight.dtype))
        pairs = cache.pairs
        first = 0 if cache.waiting is not None else 1  # nothing stands before the first position
        if cache.waiting is None:
            states, following = projected[:, :-1], token_ids[:, 1:]
            cache.waiting = projected[:, 0]
        else:
            states, following = torch.cat([cache.waiting.unsqueeze(1), projected[:, :-1]], 1), token_ids
        rows = torch.arange(len(projected), device=projected.device)
        last = projected[rows, (counts - 1).clamp(min=0)]
        cache.waiting = torch.where((counts > 0).unsqueeze(-1), last, cache.waiting)
        positions = pairs.lengths.unsqueeze(1) + torch.arange(states.shape[1], device=states.device)
        read = self.pairs(states, following)
        pairs.write([self._layer.self_attn.keys_values(read, self.rotary(positions))], counts - first)

    def chains_from_cache(self, cache: ChainCache) -> Chains:
        """One chain per row, [B, 1, ...], from its last verified position on.

        Raises:
            RuntimeError: nothing was verified yet.
        """
        if cache.waiting is None:
            raise RuntimeError("a chain starts from features, and `extend` was not called")
        (context,), visible = cache.pairs.read()
        return Chains(cache.waiting.unsqueeze(1), cache.pairs.lengths.unsqueeze(1), context, visible, [])

    # ------------------------------------------------------------ inside

    def _started(self, context: Tensor, positions: Tensor, start: Tensor, anchors: Tensor, visible: Visible) -> Chains:
        keys_values = self._layer.self_attn.keys_values(context, self.rotary(positions))
        return Chains(start, anchors - 1, keys_values, visible, [])

    def _embedded(self, token_ids: Tensor) -> Tensor:
        return functional.embedding(token_ids, self.embedding).to(self.fc.weight.dtype)

    @property
    def _layer(self) -> ChainLayer:
        layer = self.layers[0]
        if not isinstance(layer, ChainLayer):
            raise TypeError(f"the draft layer is a {type(layer).__name__}")
        return layer


@dataclass
class ChainCache:
    """What is kept between chains.

    Attributes:
        pairs: keys and values of all pairs but the last; a row's length is the position of the last one.
        waiting: f of each row's last position, [B, d]; its pair is complete when the token after it is known.
    """

    pairs: ContextCache
    waiting: Tensor | None

    @classmethod
    def of(cls, drafter: Eagle3Drafter, rows: int, capacity: int) -> ChainCache:
        """A cache without text."""
        weight = drafter.fc.weight
        pairs = ContextCache.empty(drafter.config, rows, capacity, dtype=weight.dtype, device=weight.device)
        return cls(pairs, None)

    def keep(self, rows: Sequence[int]) -> None:
        """See `ContextCache`."""
        self.pairs.keep(rows)
        if self.waiting is not None:
            self.waiting = self.waiting[torch.tensor(rows, dtype=torch.int64, device=self.waiting.device)]

    def spare(self, count: int) -> ChainCache:
        """See `ContextCache`; nothing stands before the first position of the rows yet."""
        return ChainCache(self.pairs.spare(count), None)

    def take(self, joining: ChainCache) -> None:
        """See `ContextCache`."""
        self.pairs.take(joining.pairs)
        self.waiting = torch.cat([one for one in (self.waiting, joining.waiting) if one is not None])
