"""The draft-verify loop: batched, ragged, lossless; plain decoding is the same loop with policy `none`.

One cycle: draft a block after each row's anchor (its last committed token), let the policy choose how much of it to
verify, run the target once over [anchor, d_1 .. d_k], accept from left to right, commit the accepted tokens and the
one that follows them, which is the next anchor (DSpark, section 2.1; deepspec.md, section 5.1). Between two cycles
requests that ended have left and others may join.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.decoding.acceptance import accept_best, accept_sampled, distribution
from dspark.decoding.cache import SlotCache
from dspark.decoding.clock import now
from dspark.decoding.drafting import Proposal, Proposer
from dspark.decoding.draws import CounterDraws, Draws
from dspark.decoding.history import History, Timing
from dspark.decoding.policies import Fixed, NoDrafts, Policy, Remembering
from dspark.decoding.prefixes import Counts
from dspark.decoding.ragged import Ragged
from dspark.decoding.records import Decoded
from dspark.decoding.room import NewTokens, beyond_prompts, check_room, drafting, limits_of, positions_for
from dspark.decoding.truncation import WHOLE, Truncation
from dspark.io.progress import Progress
from dspark.targets.loading import Target


def decode(
    target: Target,
    proposer: Proposer | None,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    policy: Policy | None = None,
    temperature: float = 0.0,
    truncation: Truncation = WHOLE,
    seeds: Sequence[int] | None = None,
    draws: Draws | None = None,
    precision: torch.dtype = torch.float32,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> list[Decoded]:
    """Decode prompts, with drafts or plainly; as soon as one has ended, the next one takes its place.

    Args:
        target: the model.
        proposer: what drafts; None only for policy `none`.
        prompts: token ids of the rendered prompts.
        max_new_tokens: per prompt.
        policy: how much of a block is verified; None: all of it, or plain decoding without a proposer.
        temperature: 0: arg max; otherwise target and drafts are sampled at it.
        truncation: top-k and top-p of what is sampled, of target and drafts alike.
        seeds: one per prompt, so that nobody's draws are shared (see `ContinuousBatch`); None: 0, 1, 2, ...
        draws: where randomness comes from; None: `CounterDraws(seeds)`.
        precision: of the target's distributions at a temperature above 0.
        batch_size: requests decoded together at most; shorter prompts come first.
        progress: advanced by one per finished request; the caller starts the task.
    Returns:
        one result per prompt, in the order of `prompts`.
    Raises:
        DataError: an empty prompt, or one that leaves no room below the target's largest position.
    """
    if not prompts:
        return []
    if policy is None:
        policy = NoDrafts() if proposer is None else Fixed()
    progress = progress or Progress()
    # Contexts of similar length side by side: a pass reads as far as the longest reaches.
    waiting = deque(sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), index)))
    batch = ContinuousBatch(
        target,
        proposer,
        slots=min(batch_size, len(prompts)),
        positions=positions_for(target, drafting(proposer, policy), prompts, max_new_tokens),
        policy=policy,
        temperature=temperature,
        truncation=truncation,
        draws=draws or CounterDraws(range(len(prompts)) if seeds is None else seeds),
        precision=precision,
    )
    results: dict[int, Decoded] = {}
    while waiting or batch.active:
        if waiting and batch.free:
            joining = [waiting.popleft() for _ in range(min(batch.free, len(waiting)))]
            batch.join([prompts[request] for request in joining], joining, max_new_tokens)
        else:
            batch.cycle()
        done = batch.finished()
        results.update(done)
        progress.advance(len(done))
    return [results[request] for request in range(len(prompts))]


class ContinuousBatch:
    """Requests that are decoded together and join and leave between cycles, on memory that is allocated once.

    What a request says depends neither on who else is there nor on when it joined: rows see nothing of each other, and
    draws are keyed by the request and the number of its draw. But a policy that looks at the whole batch (`scheduled`,
    `scheduled-delayed`) lets the others decide how many drafts are verified, and each of these takes a number: greedy
    texts stay the same under it, texts at a temperature above 0 become other draws from the same law.

    Args:
        target, proposer, policy, temperature, truncation, draws, precision: as in `decode`.
        slots: requests that fit beside each other.
        positions: of each slot (`positions_for`).
        eos_token_ids: tokens that end a sequence; None: the target's.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None,
        *,
        slots: int,
        positions: int,
        policy: Policy,
        temperature: float,
        draws: Draws,
        truncation: Truncation = WHOLE,
        precision: torch.dtype = torch.float32,
        eos_token_ids: frozenset[int] | None = None,
    ) -> None:
        self.target, self.policy, self.temperature = target, policy, temperature
        self.proposer = drafting(proposer, policy)
        self.slots, self.positions = slots, positions
        self._truncation = truncation if temperature > 0 else WHOLE  # no arg max is cut off
        self._draws, self._precision = draws, precision
        self._device = target.device
        self._ends = target.eos_token_ids if eos_token_ids is None else eos_token_ids
        self._cache = SlotCache(target.record.num_layers, slots, positions)
        self._cache.keep([])
        if self.proposer is not None:
            self.proposer.begin(slots, positions)
            self.proposer.keep([])
        if isinstance(policy, Remembering):
            policy.begin()
        # One per row in use, in the order of the rows.
        self._requests = np.zeros(0, np.intp)
        self._anchors = torch.zeros(0, dtype=torch.int64, device=self._device)
        self._histories: list[History] = []
        self._done: dict[int, Decoded] = {}

    @property
    def active(self) -> int:
        """Requests that are not finished."""
        return len(self._histories)

    @property
    def free(self) -> int:
        """Requests that may join."""
        return self.slots - self.active

    @property
    def gamma(self) -> int:
        """Draft tokens per block; 0 where nothing is drafted."""
        return self.proposer.gamma if self.proposer is not None else 0

    def finished(self) -> dict[int, Decoded]:
        """Hand over what was finished since the last call, by request."""
        done, self._done = self._done, {}
        return done

    @torch.inference_mode()
    def join(self, prompts: Sequence[Sequence[int]], requests: Sequence[int], max_new_tokens: NewTokens) -> float:
        """Take requests in: run their prompts, padded on the right to the longest, and draw the first token of each.

        Args:
            prompts: token ids of each request; at most as many as `free`.
            requests: the number of each request in `draws` and in the results.
            max_new_tokens: of all, or of each request.
        Returns:
            the seconds that it took.
        Raises:
            DataError: a prompt is empty, or does not fit into a slot with its answer.
        """
        started = now(self._device)
        beyond = beyond_prompts(self.proposer, prompts, max_new_tokens)
        check_room(prompts, requests, beyond, self.positions, "a slot's")
        first = self.active
        lengths = np.array([len(prompt) for prompt in prompts], np.int64)
        ids = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
        ids = ids.to(self._device)
        self._cache.join(len(lengths))
        taps, last_hidden = self._run(ids, first)
        self._cache.advance(lengths)
        ends = torch.from_numpy(lengths - 1).to(last_hidden.device)
        ends = last_hidden[torch.arange(len(lengths), device=ends.device), ends]
        joining = np.array(requests, np.intp)
        _, anchors = self._accept(self._views(ends)[:, None], None, np.zeros_like(lengths), joining)
        if self.proposer is not None:
            self.proposer.join(taps, lengths, ids)
        self._requests = np.concatenate([self._requests, joining])
        self._anchors = torch.cat([self._anchors, anchors])
        tokens = anchors.tolist()
        seconds = now(self._device) - started
        for prompt, limit, token in zip(prompts, limits_of(prompts, max_new_tokens), tokens, strict=True):
            history = History(
                len(prompt), self.gamma, limit, self._ends, self.temperature, self.policy.name, self._truncation
            )
            history.begin(token, seconds)
            self._histories.append(history)
        self._remove_finished()
        return seconds

    @torch.inference_mode()
    def cycle(self) -> Timing:
        """Draft, verify and commit once in every row in use; returns what it took."""
        started = now(self._device)
        proposal, confidences, lengths = self._propose()
        ids = self._anchors[:, None]
        if proposal is not None:
            ids = torch.cat((ids, proposal.tokens[:, : int(lengths.max())]), 1)
        proposed = now(self._device)
        taps, views = self._verify(ids, lengths)
        accepted, self._anchors = self._accept(views, proposal, lengths, self._requests)
        # What the caches keep: the anchor and the accepted drafts. The token after them is the next anchor.
        kept = accepted + 1
        self._cache.advance(kept)
        following = self._anchors.tolist()
        verified = now(self._device)
        if self.proposer is not None:
            self.proposer.extend(taps, kept, ids)
        extended = now(self._device)
        timing = Timing(proposed - started + extended - verified, verified - proposed, len(following))
        drafted = [[] for _ in following] if proposal is None else proposal.tokens.tolist()
        rows = zip(self._histories, drafted, lengths.tolist(), accepted.tolist(), following, confidences, strict=True)
        for history, drafts, length, count, token, logits in rows:
            history.add(drafts, length, count, token, logits, timing)
        self._remove_finished()
        return timing

    def _propose(self) -> tuple[Proposal | None, NDArray[np.float32], Counts]:
        """The drafted blocks, their confidence logits [B, gamma] and how many tokens of each to verify [B].

        Without a confidence head they are NaN, which policies that read them refuse.
        """
        rows = self.active
        if self.proposer is None:
            return None, np.zeros((rows, 0), np.float32), np.zeros(rows, np.int64)
        asked = self._anchors, self.temperature, self._draws, self._requests
        # A proposer that knows nothing of truncation drafts all the same where there is none.
        if self._truncation.whole:
            proposal = self.proposer.propose(*asked)
        else:
            proposal = self.proposer.propose(*asked, self._truncation)
        if proposal.confidence_logits is None:
            confidences = np.full((rows, self.proposer.gamma), np.nan, np.float32)
        else:
            confidences = proposal.confidence_logits.float().cpu().numpy()
        if isinstance(self.policy, Remembering):
            return proposal, confidences, self.policy.step(confidences, self._requests)
        return proposal, confidences, self.policy.lengths(confidences)

    def _verify(self, ids: Tensor, lengths: Counts) -> tuple[Tensor, Tensor]:
        """Run the target over each row's anchor and as many drafts as it verifies.

        Args:
            ids: anchors and drafts, [B, Q].
            lengths: drafts of each row, [B], at most Q - 1.
        Returns:
            taps [B, Q, taps * d] and views (`_views`) [B, Q, ..]; what stands beyond a row's length is worth nothing.
        """
        ragged = Ragged.of(lengths + 1, ids.device) if self.target.packs else None
        if ragged is None:
            taps, last_hidden = self._run(ids)
            return taps, self._views(last_hidden)
        taps, last_hidden = self._pass(ragged.pack(ids), *self._cache.ragged_window(ragged))
        return ragged.spread(taps), ragged.spread(self._views(last_hidden))

    def _run(self, ids: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """As `_pass`, over `ids` [B, Q] after the context of each row from `first` on."""
        return self._pass(ids, *self._cache.window(ids.shape[1], ids.device, first=first))

    def _pass(self, ids: Tensor, positions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Taps (where there is somebody to read them) and final hidden states of the target, one per token each."""
        if self.proposer is None:
            last_hidden = self.target.last_hidden(ids, attention_mask=mask, position_ids=positions, cache=self._cache)
            return last_hidden, last_hidden
        output = self.target.hidden(ids, attention_mask=mask, position_ids=positions, cache=self._cache)
        return output.taps, output.last_hidden

    def _views(self, last_hidden: Tensor) -> Tensor:
        """What the target says after final hidden states [.., d]: its arg max [..], or its distribution [.., V]."""
        logits = self.target.logits(last_hidden)
        if self.temperature == 0:
            return logits.argmax(-1)
        return distribution(logits, self.temperature, self._precision, self._truncation)

    def _accept(
        self, views: Tensor, proposal: Proposal | None, lengths: Counts, requests: NDArray[np.intp]
    ) -> tuple[Counts, Tensor]:
        """Accepted drafts and the token after them, from the target's views after 0 .. K drafts, [B, K + 1, ..]."""
        if self.temperature > 0:
            return accept_sampled(views, proposal, lengths, self._draws, requests)
        drafts = views.new_zeros(len(lengths), 0) if proposal is None else proposal.tokens
        return accept_best(views, drafts, lengths)

    def _remove_finished(self) -> None:
        """Hand finished rows over and move the last rows in use into their places."""
        rows = list(range(self.active))
        for row in reversed(range(self.active)):
            if self._histories[row].finish_reason is not None:
                self._done[int(self._requests[row])] = self._histories[row].result()
                last = rows.pop()
                if row < len(rows):
                    rows[row] = last
        if len(rows) == self.active:
            return
        self._histories = [self._histories[row] for row in rows]
        self._requests = self._requests[rows]
        self._anchors = self._anchors[rows]
        self._cache.keep(rows)
        if self.proposer is not None:
            self.proposer.keep(rows)


class Batch(ContinuousBatch):
    """Requests that are decoded together from prefill to the last one's end: nobody joins.

    Args:
        prompts: token ids of each request.
        requests: the number of each request in `draws` and in the results.
        max_new_tokens: per request.
        The others as of `ContinuousBatch`.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None,
        prompts: Sequence[Sequence[int]],
        requests: Sequence[int],
        *,
        max_new_tokens: int,
        policy: Policy,
        temperature: float,
        draws: Draws,
        truncation: Truncation = WHOLE,
        precision: torch.dtype = torch.float32,
        eos_token_ids: frozenset[int] | None = None,
    ) -> None:
        super().__init__(
            target,
            proposer,
            slots=len(prompts),
            positions=positions_for(target, drafting(proposer, policy), prompts, max_new_tokens, requests),
            policy=policy,
            temperature=temperature,
            truncation=truncation,
            draws=draws,
            precision=precision,
            eos_token_ids=eos_token_ids,
        )
        self._first = prompts, requests, max_new_tokens

    def prefill(self) -> None:
        """Take all requests in."""
        self.join(*self._first)
