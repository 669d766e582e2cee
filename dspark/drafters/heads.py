"""The sequential heads: the Markov bias and the confidence (DSpark, section 3.1).

With a reduced draft vocabulary a drafter of ours starts with channel 0 of W1 at 1 for every previous token, and the
channel does not learn, so that W2[v, 0] is a bias of draft token v whatever precedes it. That buys a full-vocabulary
checkpoint which every engine loads: there W2[v, 0] of the other tokens is very negative, so that they are never
proposed (`checkpoint.py`). A drafter from elsewhere has no such channel: what is stored is what counts, always.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from dspark.drafters.config import DrafterConfig


class MarkovHead(nn.Module):
    """B = W2 W1[previous token], rank r; the "vanilla" head.

    Attributes:
        markov_w1: [V, r], indexed by target ids (a previous token can be any, the anchor is the target's).
        markov_w2: [Vd, r], one row per token that may be proposed.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.proposed_vocab_size, bias=False)
        self.frozen_channel = config.draft_vocab_size is not None

    @property
    def constant_channel(self) -> bool:
        """Whether channel 0 of W1 is 1 for every token."""
        return bool((self.markov_w1.weight[:, 0] == 1).all())

    def embed(self, previous_ids: Tensor) -> Tensor:
        """W1 rows of target ids [...], [..., r]."""
        rows: Tensor = self.markov_w1(previous_ids)
        if not (self.frozen_channel and torch.is_grad_enabled()):
            return rows
        return torch.cat([rows[..., :1].detach(), rows[..., 1:]], dim=-1)

    def bias(self, embedded: Tensor) -> Tensor:
        """Logit bias of rows made by `embed`, [..., Vd]."""
        return functional.linear(embedded, self.markov_w2.weight)

    @torch.no_grad()
    def reset_constant_channel(self) -> None:
        """Store the constant; training doesn't move it (it has no gradient, and W1 does not decay)."""
        if self.frozen_channel:
            self.markov_w1.weight[:, 0] = 1


class ConfidenceHead(nn.Module):
    """One logit per slot from [h ; W1[previous]]: P(this draft token survives | those before it survived)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        # The paper's equation has no bias; DeepSpec's code has, and every engine reads one.
        self.proj = nn.Linear(config.hidden_size + config.markov_rank, 1)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Logits of states [..., d] and Markov rows [..., r], [...] in float32."""
        # One column: float32 costs nothing, and calibration divides these logits by temperatures.
        with torch.autocast(hidden.device.type, enabled=False):
            joined = torch.cat([hidden.float(), embedded.float()], dim=-1)
            bias = self.proj.bias.float()
            return functional.linear(joined, self.proj.weight.float(), bias).squeeze(-1)
