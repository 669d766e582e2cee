"""The DSpark drafter: one backbone pass per block, then a Markov chain over its slots. With its heads off, DFlash.

Slot layout (anchor first): slot 0 holds the anchor, the last committed token x_p; slots 1..gamma-1 hold the mask token;
slot j predicts x_{p+1+j}. Context is the target's features of positions strictly before p: the target has not run on
the anchor yet. RoPE positions are absolute: context i at i, slot j at p + j (deepspec.md, section 1.1).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from dspark.drafters.attention import Visible
from dspark.drafters.backbone import Layer, RMSNorm, Rotary
from dspark.drafters.base import Drafter, randomise
from dspark.drafters.cache import ContextCache
from dspark.drafters.config import DrafterConfig
from dspark.drafters.heads import ConfidenceHead, MarkovChain, MarkovHead


class DSparkDrafter(Drafter):
    """A drafter on a frozen target's embedding and LM head, see `Drafter`.

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
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, before_products=True)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.markov_head = MarkovHead(config)
        self.confidence_head = ConfidenceHead(config) if config.confidence else None
        self.rotary = Rotary(config)
        randomise(self, seed)
        self.markov_head.reset_constant_channel()

    # ------------------------------------------------------------ one-shot form

    def project(self, features: Tensor) -> Tensor:
        """Context C = RMSNorm(fc(F)) of concatenated taps [..., m*d], [..., d]; the same C feeds every layer."""
        context: Tensor = self.hidden_norm(self.fc(features))
        return context

    def block_hidden(
        self,
        block_ids: Tensor,
        context: Tensor,
        context_positions: Tensor,
        block_positions: Tensor,
        visible: Visible,
    ) -> Tensor:
        """Normed hidden states h of many isolated blocks per row.

        Args:
            block_ids: input ids, int64 [B, N, K] (see `block_inputs`).
            context: projected context, [B, S, d].
            context_positions: absolute positions of the context, int64 [B, S].
            block_positions: absolute positions of the slots, int64 [B, N, K].
            visible: context positions that a block sees, bool [B, N, S]: those before its anchor, no padding; or how a
                single row holds several sequences.
        Returns:
            h, [B, N, K, d]: the input of LM head, Markov head and confidence head.
        """
        rotation = self.rotary(context_positions)
        contexts = [layer.self_attn.keys_values(context, rotation) for layer in self._layers()]
        return self._blocks(block_ids, contexts, block_positions, visible)

    def block_inputs(self, anchor_ids: Tensor) -> Tensor:
        """Input ids of blocks that start at the anchors [...]: anchor, then masks; int64 [..., gamma]."""
        if self.config.gamma == 1:
            return anchor_ids.unsqueeze(-1)  # exported graphs are better without a tensor of no elements
        masks = anchor_ids.unsqueeze(-1).expand(*anchor_ids.shape, self.config.gamma - 1)
        return torch.cat([anchor_ids.unsqueeze(-1), torch.full_like(masks, self.config.mask_token_id)], dim=-1)

    # ------------------------------------------------------------ incremental form

    def new_cache(self, rows: int, capacity: int) -> ContextCache:
        """An empty cache for `rows` sequences of at most `capacity` context positions, in the drafter's dtype."""
        weight = self.fc.weight
        return ContextCache.empty(self.config, rows, capacity, dtype=weight.dtype, device=weight.device)

    def extend(self, cache: ContextCache, features: Tensor, counts: Tensor) -> None:
        """Add the target's features of newly verified positions.

        All Q positions of a row are written behind its context, then the row grows by counts[b] <= Q only: features of
        rejected positions lie beyond its end, unseen, until the next call overwrites them.

        Args:
            features: concatenated taps, [B, Q, m*d].
            counts: positions to keep per row, int64 [B].
        Raises:
            SettingsError: if a row would grow beyond the cache's capacity.
        """
        context = self.project(features.to(self.fc.weight.dtype))
        steps = torch.arange(features.shape[1], device=features.device)
        positions = cache.lengths.unsqueeze(1) + steps  # [B, Q]
        rotation = self.rotary(positions)
        cache.write([layer.self_attn.keys_values(context, rotation) for layer in self._layers()], counts)

    def block_from_cache(self, anchor_ids: Tensor, cache: ContextCache) -> Tensor:
        """h of one block per row; row b's anchor stands at position cache.lengths[b].

        Args:
            anchor_ids: int64 [B].
        Returns:
            [B, gamma, d].
        """
        contexts, visible = cache.read()
        slots = torch.arange(self.config.gamma, device=anchor_ids.device)
        positions = cache.lengths[:, None, None] + slots
        return self._blocks(self.block_inputs(anchor_ids).unsqueeze(1), contexts, positions, visible).squeeze(1)

    # ------------------------------------------------------------ heads

    def chain(self) -> MarkovChain:
        """The Markov head at the first slot of blocks; draft logits are U + B, slot by slot; B = 0 without one."""
        return MarkovChain(self.markov_head)

    def confidence_logits(self, hidden: Tensor, previous_ids: Tensor) -> Tensor | None:
        """Confidence logits of slots with states [..., d] and previous tokens [...], float32 [...]; None: no head."""
        if self.confidence_head is None:
            return None
        logits: Tensor = self.confidence_head(hidden, self.markov_head.embed(previous_ids))
        return logits

    # ------------------------------------------------------------ inside

    def _blocks(
        self, block_ids: Tensor, contexts: list[tuple[Tensor, Tensor]], positions: Tensor, visible: Visible
    ) -> Tensor:
        x = functional.embedding(block_ids, self.embedding).to(self.fc.weight.dtype)
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        rotation = self.rotary(positions)
        for layer, context in zip(self._layers(), contexts, strict=True):
            x = layer(x, context, rotation, visible)
        hidden: Tensor = self.norm(x)
        return hidden

    def _layers(self) -> Iterator[Layer]:
        for layer in self.layers:
            if isinstance(layer, Layer):
                yield layer
