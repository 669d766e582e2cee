"""The drafter as two graphs: one from features alone, one with the context's keys and values handed in and out.

Both run the drafter's own code; only where the context comes from differs. Each ends in the Markov chain, unrolled over
the gamma slots, because every slot's bias needs the token of the slot before it (DSpark, section 3.1). The second one
can draw its tokens: the arg max of logits + temperature * Gumbel noise is distributed as softmax(logits / temperature),
and at temperature 0 it is that of the logits. The caller brings the noise and gets the logits, which rejection needs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark.drafters.cache import ContextCache
from dspark.drafters.dspark import DSparkDrafter


class StatelessBlock(nn.Module):
    """A block from the features of its whole context."""

    def __init__(self, drafter: DSparkDrafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self, features: Tensor, context_length: Tensor, anchor_ids: Tensor) -> tuple[Tensor, ...]:
        """Draft one block per row.

        Args:
            features: concatenated taps of positions 0 .. S-1, [B, S, m*d]; what lies beyond a row's length is padding.
            context_length: int64 [B]; also the position of the anchor.
            anchor_ids: the last committed token, int64 [B].
        Returns:
            draft token ids of the target, int64 [B, gamma]; with a confidence head, its logits, float32 [B, gamma].
        """
        drafter = self.drafter
        positions = torch.arange(features.shape[1]).expand(features.shape[0], -1)
        visible = positions < context_length.unsqueeze(1)
        slots = context_length[:, None, None] + torch.arange(drafter.config.gamma)
        ids = drafter.block_inputs(anchor_ids).unsqueeze(1)
        # Padding may hold anything, NaN too, and a NaN would outlive its weight of zero.
        features = torch.where(visible.unsqueeze(-1), features, torch.zeros(()))
        context = drafter.project(features)
        hidden = drafter.block_hidden(ids, context, positions, slots, visible.unsqueeze(1)).squeeze(1)
        drafted, confidence, _ = markov_chain(drafter, hidden, anchor_ids)
        return _those_there(drafted, confidence)


class CachedBlock(nn.Module):
    """A block from the keys and values of its context and the features of the newest positions."""

    def __init__(self, drafter: DSparkDrafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(
        self,
        features: Tensor,
        new_count: Tensor,
        past_keys: Tensor,
        past_values: Tensor,
        past_length: Tensor,
        anchor_ids: Tensor,
        temperature: Tensor,
        noise: Tensor,
    ) -> tuple[Tensor, ...]:
        """Grow each row's context by new_count[b] positions and draft one block behind it.

        Args:
            features: concatenated taps of the Q positions behind the past, [B, Q, m*d].
            new_count: how many of them row b keeps, int64 [B].
            past_keys, past_values: [layers, B, kv, P, hd]; what lies beyond a row's past_length is not read.
            past_length: int64 [B].
            anchor_ids: int64 [B]; row b's stands at position past_length[b] + new_count[b].
            temperature: of each row, float32 [B]; 0: the most likely tokens, whatever the noise.
            noise: independent standard Gumbel numbers, float32 [B, gamma, Vd]; never used twice.
        Returns:
            draft token ids, int64 [B, gamma]; with a confidence head, its logits, float32 [B, gamma]; the logits that
            the tokens were drawn from, float32 [B, gamma, Vd]; keys and values of the Q new positions, [layers, B, kv,
            Q, hd], for the caller to store behind the past.
        """
        drafter = self.drafter
        layers = range(drafter.config.layers)
        context = _GraphContext([past_keys[i] for i in layers], [past_values[i] for i in layers], past_length)
        kept = torch.arange(features.shape[1]) < new_count.unsqueeze(1)
        drafter.extend(context, torch.where(kept.unsqueeze(-1), features, torch.zeros(())), new_count)
        hidden = drafter.block_from_cache(anchor_ids, context)
        drafted, confidence, logits = markov_chain(drafter, hidden, anchor_ids, temperature[:, None, None] * noise)
        keys, values = torch.stack(context.new_keys), torch.stack(context.new_values)
        return _those_there(drafted, confidence, logits, keys, values)


class _GraphContext(ContextCache):
    """A context that is joined from past and new positions instead of being written in place."""

    new_keys: list[Tensor]
    new_values: list[Tensor]
    past_lengths: Tensor

    def write(self, layers: list[tuple[Tensor, Tensor]], counts: Tensor) -> None:
        self.new_keys = [keys for keys, _ in layers]
        self.new_values = [values for _, values in layers]
        self.past_lengths = self.lengths
        self.lengths = self.lengths + counts

    def read(self) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        past = torch.arange(self.capacity) < self.past_lengths.unsqueeze(1)
        counts = (self.lengths - self.past_lengths).unsqueeze(1)
        new = torch.arange(self.new_keys[0].shape[2]) < counts
        pairs = [
            (torch.cat([keys, new_keys], 2), torch.cat([values, new_values], 2))
            for keys, new_keys, values, new_values in zip(
                self.keys, self.new_keys, self.values, self.new_values, strict=True
            )
        ]
        return pairs, torch.cat([past, new], 1).unsqueeze(1)


def _those_there(*outputs: Tensor | None) -> tuple[Tensor, ...]:
    """The outputs of a graph: without a confidence head there is one fewer."""
    return tuple(output for output in outputs if output is not None)


def markov_chain(
    drafter: DSparkDrafter, hidden: Tensor, anchor_ids: Tensor, added: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Tokens slot by slot, and the confidence of each slot.

    Args:
        hidden: [B, gamma, d].
        anchor_ids: int64 [B].
        added: to the logits before the arg max, [B, gamma, Vd]; None: nothing.
    Returns:
        target token ids, int64 [B, gamma]; confidence logits, float32 [B, gamma], None without a confidence
        head; logits, float32 [B, gamma, Vd].
    """
    base = drafter.base_logits(hidden)
    chain, tokens, logits = drafter.chain(), [anchor_ids], []
    for slot in range(drafter.config.gamma):
        logits.append(base[:, slot] + chain.bias(tokens[-1], hidden[:, slot]))
        scores = logits[-1] if added is None else logits[-1] + added[:, slot]
        tokens.append(drafter.to_target_ids(scores.argmax(-1)))
    confidence = drafter.confidence_logits(hidden, torch.stack(tokens[:-1], 1))
    return torch.stack(tokens[1:], 1), confidence, torch.stack(logits, 1)
