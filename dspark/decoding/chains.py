"""Drafting with EAGLE-3: every token of a block is one step of the drafter's chain (deepspec.md, section 4.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dspark.decoding.drafting import CachedProposer, Drawn, Proposal
from dspark.decoding.draws import Draws, Rows
from dspark.decoding.truncation import WHOLE, Truncation

if TYPE_CHECKING:
    from dspark.drafters.eagle3 import ChainCache, Eagle3Drafter


class ChainProposer(CachedProposer["Eagle3Drafter", "ChainCache"]):
    """Drafts with an `Eagle3Drafter` in torch, as many steps as a block has tokens. It has no confidences."""

    def __init__(self, drafter: Eagle3Drafter, precision: torch.dtype = torch.float32) -> None:
        super().__init__(drafter, precision, drafter.new_cache)

    def propose(
        self, anchors: Tensor, temperature: float, draws: Draws, requests: Rows, truncation: Truncation = WHOLE
    ) -> Proposal:
        """See `Proposer`. Each token is drawn from the distribution that is returned, and the next step reads it."""
        chains = self.drafter.chains_from_cache(self._context)
        drawn = Drawn(self.drafter, temperature, self.precision, draws, requests, truncation)
        previous = anchors
        for _ in range(self.gamma):
            hidden = self.drafter.step(chains, previous.unsqueeze(1)).squeeze(1)
            previous = drawn.next(self.drafter.base_logits(hidden))
        return drawn.proposal(None)

    def _write(self, cache: ChainCache, features: Tensor, counts: Tensor, token_ids: Tensor | None) -> None:
        if token_ids is None:
            raise RuntimeError("EAGLE-3 reads pairs of features and tokens: hand token_ids on")
        self.drafter.extend(cache, features, token_ids, counts)
