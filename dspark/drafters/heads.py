"""The sequential heads: the Markov bias and the confidence (DSpark, section 3.1).

With a reduced draft vocabulary a drafter of ours starts with channel 0 of W1 at 1 for every previous token, and the
channel does not learn, so that W2[v, 0] is a bias of draft token v whatever precedes it. That buys a full-vocabulary
checkpoint which every engine loads: there W2[v, 0] of the other tokens is very negative, so that they are never
proposed (`checkpoint.py`). A drafter from elsewhere has no such channel: what is stored is what counts, always.

Both heads may be off (DFlash): B is 0 then, and no confidence is stated.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from dspark.drafters.config import DrafterConfig


class MarkovHead(nn.Module):
    """B = W2 z, with z of rank r made from the previous token's row e = W1[u].

        none     no weights, B = 0
        vanilla  z = e
        gated    z = sigmoid(Wg [h; e] + bg) * e
        rnn      (g, c, o) = Wj [s; e; h] + bj,  z = tanh(o),  next s = sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c)

    h is the slot's state; s is 0 at the first slot of a block (deepspec.md, section 1.2).

    Attributes:
        markov_w1: [V, r], indexed by target ids (a previous token can be any, the anchor is the target's); not of none.
        markov_w2: [Vd, r], one row per token that may be proposed; not of none.
        gate_proj: Wg [r, d + r] and bg, of gated heads.
        joint_proj: Wj [3 r, 2 r + d] and bj, of rnn heads.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.kind = config.markov_type
        self.frozen_channel = config.draft_vocab_size is not None and self.kind != "none"
        if self.kind == "none":
            return
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.proposed_vocab_size, bias=False)
        d, r = config.hidden_size, config.markov_rank
        if self.kind == "gated":
            self.gate_proj = nn.Linear(d + r, r)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * r + d, 3 * r)

    @property
    def constant_channel(self) -> bool:
        """Whether channel 0 of W1 is 1 for every token."""
        return self.kind != "none" and bool((self.markov_w1.weight[:, 0] == 1).all())

    def embed(self, previous_ids: Tensor) -> Tensor:
        """W1 rows of target ids [...], [..., r]."""
        if self.kind == "none":
            return torch.zeros(*previous_ids.shape, 0, device=previous_ids.device)
        rows: Tensor = self.markov_w1(previous_ids)
        if not (self.frozen_channel and torch.is_grad_enabled()):
            return rows
        return torch.cat([rows[..., :1].detach(), rows[..., 1:]], dim=-1)

    def latent(self, embedded: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """z of one slot of each block, and what the next slot needs to know.

        Args:
            embedded: rows made by `embed`, [..., r].
            hidden: h of that slot, [..., d].
            state: what the slot before returned; None at the first slot.
        Returns:
            z, [..., r]; the state, None but for rnn heads.
        """
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], -1))) * embedded, None
        if self.kind == "rnn":
            before = torch.zeros_like(embedded) if state is None else state
            gate, candidate, output = self.joint_proj(torch.cat([before, embedded, hidden], -1)).chunk(3, -1)
            kept = torch.sigmoid(gate)
            return torch.tanh(output), kept * before + (1 - kept) * torch.tanh(candidate)
        return embedded, None

    def bias(self, latent: Tensor) -> Tensor:
        """Logit bias of z made by `latent`, [..., Vd]."""
        return functional.linear(latent, self.markov_w2.weight)

    @torch.no_grad()
    def reset_constant_channel(self) -> None:
        """Store the constant; training doesn't move it (it has no gradient, and W1 does not decay)."""
        if self.frozen_channel:
            self.markov_w1.weight[:, 0] = 1


class MarkovChain:
    """A Markov head on its way along blocks, from their first slots on."""

    def __init__(self, head: MarkovHead) -> None:
        self._head = head
        self._state: Tensor | None = None

    def bias(self, previous_ids: Tensor, hidden: Tensor) -> Tensor:
        """B of the next slot, float32 [..., Vd]; draft logits are U + B. Without a head B is one zero for all.

        Args:
            previous_ids: the tokens before it, target ids [...].
            hidden: h of the slot, [..., d].
        """
        if self._head.kind == "none":
            return torch.zeros((), device=hidden.device)
        latent, self._state = self._head.latent(self._head.embed(previous_ids), hidden, self._state)
        return self._head.bias(latent).float()


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
