"""Drafting with EAGLE-3: every token of a block is one step of the drafter's chain (deepspec.md, section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dspark.decoding.drafting import Drawn, Proposal
from dspark.decoding.draws import Draws, Rows
from dspark.decoding.prefixes import Counts
from dspark.decoding.truncation import WHOLE, Truncation

if TYPE_CHECKING:
    from dspark.drafters.eagle3 import ChainCache, Eagle3Drafter


class ChainProposer:
    """Drafts with an `Eagle3Drafter` in torch, as many steps as a block has tokens. It has no confidences.

    Args:
        drafter: its dtype is the dtype of drafting.
        precision: of the distributions that tokens are drawn from.
    """

    def __init__(self, drafter: Eagle3Drafter, precision: torch.dtype = torch.float32) -> None:
        self.drafter = drafter.eval()
        self.precision = precision
        self._cache: ChainCache | None = None

    @property
    def gamma(self) -> int:
        """Draft tokens per block."""
        return self.drafter.config.gamma

    def begin(self, batch: int, max_length: int) -> None:
        """See `Proposer`."""
        self._cache = self.drafter.new_cache(batch, max_length)

    def extend(self, features: Tensor, counts: Counts, token_ids: Tensor) -> None:
        """See `Proposer`."""
        self.drafter.extend(self._context, features, token_ids, torch.from_numpy(counts).to(features.device))

    def keep(self, rows: Sequence[int]) -> None:
        """See `Proposer`."""
        self._context.keep(rows)

    def join(self, features: Tensor, counts: Counts, token_ids: Tensor) -> None:
        """See `Proposer`."""
        present = self._context
        self._cache = joining = present.spare(len(counts))
        self.extend(features, counts, token_ids)
        present.take(joining)
        self._cache = present

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

    @property
    def _context(self) -> ChainCache:
        if self._cache is None:
            raise RuntimeError("ChainProposer.begin was not called")
        return self._cache
