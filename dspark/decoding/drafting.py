"""Proposers: what drafts a block after the anchor.

A proposer keeps its own context of target features per row; the loop feeds it the features of every committed
position and asks for blocks. `TorchProposer` runs a `DSparkDrafter`; other kinds of drafters (`proposers.py`) and other
engines bring their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from dspark.decoding.acceptance import distribution
from dspark.decoding.draws import Draws, Rows
from dspark.decoding.prefixes import Counts
from dspark.decoding.truncation import WHOLE, Truncation

if TYPE_CHECKING:
    from dspark.drafters.base import Drafter
    from dspark.drafters.cache import ContextCache
    from dspark.drafters.dspark import DSparkDrafter


@dataclass(frozen=True)
class Proposal:
    """A drafted block per row.

    Attributes:
        tokens: target token ids, int64 [B, gamma].
        confidence_logits: raw logits of the confidence head, [B, gamma]; sigmoid of slot j is the probability that
            token j survives given that the tokens before it did. None: the drafter has no such head.
        probs: the distributions that the tokens were drawn from, [B, gamma, Vd], at the precision that the acceptance
            rule divides by; None if the tokens are arg maxima (temperature 0).
        indices: columns of `probs` that hold the drawn tokens, [B, gamma]; with `probs`.
        token_ids: target token id of each column of `probs`, [Vd], for a reduced draft vocabulary; None: column = id.
    """

    tokens: Tensor
    confidence_logits: Tensor | None
    probs: Tensor | None = None
    indices: Tensor | None = None
    token_ids: Tensor | None = None


class Cache(Protocol):
    """A drafter's context, a row for each request (`drafters.cache`)."""

    def keep(self, rows: Sequence[int]) -> None:
        """See `Proposer.keep`."""
        ...

    def spare(self, count: int) -> Self:
        """An empty cache in the next rows of the same memory."""
        ...

    def take(self, joining: Self) -> None:
        """Count the rows of a cache that `spare` gave among those in use."""
        ...


class Proposer(Protocol):
    """The contract between the loop and whatever drafts."""

    @property
    def gamma(self) -> int:
        """Draft tokens per block."""
        ...

    def begin(self, batch: int, max_length: int) -> None:
        """Forget everything; make room for `batch` rows of `max_length` positions, all of them in use and empty."""
        ...

    def extend(self, features: Tensor, counts: Counts, token_ids: Tensor) -> None:
        """Add target features after each row's context.

        Args:
            features: [B, Q, taps * d]; positions from `counts[b]` on belong to rejected or padded tokens.
            counts: how many of the Q positions row b keeps, [B].
            token_ids: what stands at the Q positions, int64 [B, Q]; drafters that read pairs of both need it.
        """
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Drop finished rows: row i becomes what row `rows[i]` was; `rows[i] == i` or `rows[i] >= len(rows)`."""
        ...

    def join(self, features: Tensor, counts: Counts, token_ids: Tensor) -> None:
        """Take rows in behind those in use, as far as `begin` made room; arguments as of `extend`, of the new rows."""
        ...

    def propose(
        self, anchors: Tensor, temperature: float, draws: Draws, requests: Rows, truncation: Truncation = WHOLE
    ) -> Proposal:
        """Draft one block per row after `anchors` [B], which stand right after each row's context.

        Args:
            temperature: of the target, at which drafts are drawn; 0: arg maxima.
            draws: where randomness comes from.
            requests: the request of each row, [B].
            truncation: of the target's distributions; drafts are drawn from equally cut ones. The loop names it only
                where something is cut off.
        """
        ...


class Drawn:
    """The tokens of a block as they are drawn, slot by slot: arg maxima, or from the distributions that are handed on.

    Args:
        drafter: whose columns they are.
        temperature: of the target, 0: arg max.
        precision: of the distributions.
        draws, requests, truncation: see `Proposer`.
    """

    def __init__(
        self,
        drafter: Drafter,
        temperature: float,
        precision: torch.dtype,
        draws: Draws,
        requests: Rows,
        truncation: Truncation = WHOLE,
    ) -> None:
        self._drafter, self._temperature, self._precision = drafter, temperature, precision
        self._draws, self._requests, self._truncation = draws, requests, truncation
        self._tokens: list[Tensor] = []
        self._indices: list[Tensor] = []
        self._probs: list[Tensor] = []

    def next(self, logits: Tensor) -> Tensor:
        """The token of the next slot, target ids [B], from draft logits [B, Vd]."""
        if self._temperature == 0:
            index = logits.argmax(-1)
        else:
            self._probs.append(distribution(logits, self._temperature, self._precision, self._truncation))
            index = self._draws.categorical(self._probs[-1], self._requests)
            self._indices.append(index)
        self._tokens.append(self._drafter.to_target_ids(index))
        return self._tokens[-1]

    def proposal(self, confidence_logits: Tensor | None) -> Proposal:
        """The block that was drawn."""
        drafted = torch.stack(self._tokens, 1)
        if self._temperature == 0:
            return Proposal(drafted, confidence_logits)
        reduced = self._drafter.config.draft_vocab_size is not None
        return Proposal(
            drafted,
            confidence_logits,
            probs=torch.stack(self._probs, 1),
            indices=torch.stack(self._indices, 1),
            token_ids=self._drafter.draft_token_ids if reduced else None,
        )


D = TypeVar("D", bound="Drafter")
C = TypeVar("C", bound="Cache")


class CachedProposer(Generic[D, C]):
    """What proposers in torch share: a drafter in evaluation mode, and its context cache with a row for each request.

    Args:
        drafter: its dtype is the dtype of drafting.
        precision: of the distributions that tokens are drawn from.
        new_cache: an empty cache of (rows, positions).
    """

    def __init__(self, drafter: D, precision: torch.dtype, new_cache: Callable[[int, int], C]) -> None:
        self.drafter = drafter.eval()
        self.precision = precision
        self._new_cache = new_cache
        self._cache: C | None = None

    @property
    def gamma(self) -> int:
        """Draft tokens per block."""
        return self.drafter.config.gamma

    def begin(self, batch: int, max_length: int) -> None:
        """See `Proposer`."""
        self._cache = self._new_cache(batch, max_length)

    def extend(self, features: Tensor, counts: Counts, token_ids: Tensor | None = None) -> None:
        """See `Proposer`; `token_ids` may be left out where drafts depend on features alone."""
        self._write(self._context, features, torch.from_numpy(counts).to(features.device), token_ids)

    def keep(self, rows: Sequence[int]) -> None:
        """See `Proposer`."""
        self._context.keep(rows)

    def join(self, features: Tensor, counts: Counts, token_ids: Tensor | None = None) -> None:
        """See `Proposer`."""
        joining = self._context.spare(len(counts))
        self._write(joining, features, torch.from_numpy(counts).to(features.device), token_ids)
        self._context.take(joining)

    def _write(self, cache: C, features: Tensor, counts: Tensor, token_ids: Tensor | None) -> None:
        """Add what `extend` takes to a cache."""
        raise NotImplementedError

    @property
    def _context(self) -> C:
        if self._cache is None:
            raise RuntimeError(f"{type(self).__name__}.begin was not called")
        return self._cache


class TorchProposer(CachedProposer["DSparkDrafter", "ContextCache"]):
    """Drafts with a `DSparkDrafter` in torch: one pass of the backbone, then the Markov head token by token."""

    def __init__(self, drafter: DSparkDrafter, precision: torch.dtype = torch.float32) -> None:
        lean = proposable(drafter)
        super().__init__(lean, precision, lean.new_cache)

    def propose(
        self, anchors: Tensor, temperature: float, draws: Draws, requests: Rows, truncation: Truncation = WHOLE
    ) -> Proposal:
        """See `Proposer`. Tokens are drawn at the temperature of the target, from the distribution that is returned."""
        drafter = self.drafter
        hidden = drafter.block_from_cache(anchors, self._context)  # [B, gamma, d]
        base = drafter.base_logits(hidden)  # [B, gamma, Vd]
        drawn = Drawn(drafter, temperature, self.precision, draws, requests, truncation)
        chain, previous, before = drafter.chain(), anchors, []
        for position in range(base.shape[1]):
            before.append(previous)
            previous = drawn.next(base[:, position] + chain.bias(previous, hidden[:, position]))
        return drawn.proposal(drafter.confidence_logits(hidden, torch.stack(before, 1)))

    def _write(self, cache: ContextCache, features: Tensor, counts: Tensor, token_ids: Tensor | None) -> None:
        self.drafter.extend(cache, features, counts)  # a block reads features alone


def proposable(drafter: DSparkDrafter) -> DSparkDrafter:
    """The same drafter without what changes no draft of it.

    A union checkpoint holds a reduced draft vocabulary as a whole one in which the other tokens have a logit bias of
    -1000, and a drafter without a sequential head with one whose bias is 0 (`drafters.checkpoint`). The probability of
    those tokens is exactly zero in float32, so leaving them out changes no draft; it saves most of the head, which can
    be half of the drafting time.
    """
    from dspark.drafters.checkpoint import MARKOV_W1, MARKOV_W2, UNREACHABLE
    from dspark.drafters.dspark import DSparkDrafter

    head, config = drafter.markov_head, drafter.config
    if config.draft_vocab_size is not None or config.markov_type != "vanilla" or not head.constant_channel:
        return drafter
    weights = head.markov_w2.weight
    reachable = weights[:, 0] > UNREACHABLE / 2
    state, ids = drafter.state_dict(), None
    changes: dict[str, Any] = {}
    if not bool(reachable.all()):
        ids = reachable.nonzero()[:, 0]
        changes["draft_vocab_size"] = len(ids)
        state[MARKOV_W2] = weights[ids]
    if not config.confidence and not bool(state[MARKOV_W2].any()):
        changes |= {"markov_type": "none", "markov_rank": 0}
        del state[MARKOV_W1], state[MARKOV_W2]
    if not changes:
        return drafter
    lean = DSparkDrafter(config.model_copy(update=changes), drafter.embedding, drafter.head, ids)
    lean.load_state_dict(state)
    return lean.to(weights.device, weights.dtype)
