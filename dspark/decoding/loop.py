"""The draft-verify loop: batched, ragged, lossless; plain decoding is the same loop with policy `none`.

One cycle: draft a block after each row's anchor (its last committed token), let the policy choose how much of it to
verify, run the target once over [anchor, d_1 .. d_k], accept from left to right, commit the accepted tokens and the
one that follows them, which is the next anchor (DSpark, section 2.1; deepspec.md, section 5.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.decoding.acceptance import accept_greedy, accept_sampled, distribution
from dspark.decoding.cache import SlotCache
from dspark.decoding.clock import now
from dspark.decoding.drafting import Proposal, Proposer
from dspark.decoding.draws import CounterDraws, Draws
from dspark.decoding.history import History, Timing
from dspark.decoding.policies import Fixed, NoDrafts, Policy
from dspark.decoding.prefixes import Counts
from dspark.decoding.records import Decoded
from dspark.errors import DataError
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
    seeds: Sequence[int] | None = None,
    draws: Draws | None = None,
    precision: torch.dtype = torch.float32,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> list[Decoded]:
    """Decode prompts, with drafts or plainly.

    Args:
        target: the model.
        proposer: what drafts; None only for policy `none`.
        prompts: token ids of the rendered prompts.
        max_new_tokens: per prompt.
        policy: how much of a block is verified; None: all of it, or plain decoding without a proposer.
        temperature: 0: arg max; otherwise target and drafts are sampled at it.
        seeds: one per prompt, for draws that don't depend on the batch; None: 0, 1, 2, ...
        draws: where randomness comes from; None: `CounterDraws(seeds)`.
        precision: of the target's distributions at a temperature above 0.
        batch_size: requests decoded together; prompts of similar length share a batch.
        progress: advanced by one per finished request; the caller starts the task.
    Returns:
        one result per prompt, in the order of `prompts`.
    Raises:
        DataError: an empty prompt, or one that leaves no room below the target's largest position.
    """
    if policy is None:
        policy = NoDrafts() if proposer is None else Fixed()
    draws = draws or CounterDraws(range(len(prompts)) if seeds is None else seeds)
    progress = progress or Progress()
    results: dict[int, Decoded] = {}
    order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), index))
    for start in range(0, len(order), batch_size):
        requests = order[start : start + batch_size]
        batch = Batch(
            target,
            proposer,
            [prompts[request] for request in requests],
            requests,
            max_new_tokens=max_new_tokens,
            policy=policy,
            temperature=temperature,
            draws=draws,
            precision=precision,
        )
        batch.prefill()
        results.update(batch.finished())
        progress.advance(len(results) - start)
        while batch.active:
            batch.cycle()
            done = batch.finished()
            results.update(done)
            progress.advance(len(done))
    return [results[request] for request in range(len(prompts))]


class Batch:
    """Requests that are decoded together, from prefill to the last one's end.

    Args:
        prompts: token ids of each request.
        requests: the number of each request in `draws` and in the results.
        target, proposer, max_new_tokens, policy, temperature, draws, precision: as in `decode`.
        eos_token_ids: tokens that end a sequence; None: the target's.
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
        precision: torch.dtype = torch.float32,
        eos_token_ids: frozenset[int] | None = None,
    ) -> None:
        if policy.drafts and proposer is None:
            raise ValueError(f"policy {policy.name} needs a proposer")
        self.target, self.policy, self.temperature = target, policy, temperature
        self.proposer = proposer if policy.drafts else None
        self._draws, self._precision = draws, precision
        self._device = target.device
        self._prompts = prompts
        gamma = self.proposer.gamma if self.proposer is not None else 0
        capacity = _capacity(target, prompts, requests, max_new_tokens + gamma)
        self._cache = SlotCache(target.record.num_layers, len(prompts), capacity)
        if self.proposer is not None:
            self.proposer.begin(len(prompts), capacity)
        self._requests = np.array(requests, np.intp)
        self._anchors = torch.zeros(len(prompts), dtype=torch.int64, device=self._device)
        ends = target.eos_token_ids if eos_token_ids is None else eos_token_ids
        # One per active row, in the order of the rows.
        self._histories = [
            History(len(prompt), gamma, max_new_tokens, ends, temperature, policy.name) for prompt in prompts
        ]
        self._done: dict[int, Decoded] = {}

    @property
    def active(self) -> int:
        """Requests that are not finished."""
        return len(self._histories)

    def finished(self) -> dict[int, Decoded]:
        """Hand over what was finished since the last call, by request."""
        done, self._done = self._done, {}
        return done

    @torch.inference_mode()
    def prefill(self) -> None:
        """Run the prompts, padded on the right to the longest, and draw the first token of each."""
        started = now(self._device)
        lengths = np.array([len(prompt) for prompt in self._prompts], np.int64)
        ids = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.int64)
        for row, prompt in enumerate(self._prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
        ids = ids.to(self._device)
        taps, last_hidden = self._run(ids)
        self._cache.advance(lengths)
        ends = torch.from_numpy(lengths - 1).to(last_hidden.device)
        ends = last_hidden[torch.arange(len(lengths), device=ends.device), ends]
        _, self._anchors = self._accept(self.target.logits(ends)[:, None], None, np.zeros_like(lengths))
        if self.proposer is not None:
            self.proposer.extend(taps, lengths, ids)
        first = self._anchors.tolist()
        seconds = now(self._device) - started
        for history, token in zip(self._histories, first, strict=True):
            history.begin(token, seconds)
        self._remove_finished()

    @torch.inference_mode()
    def cycle(self) -> Timing:
        """Draft, verify and commit once in every active row; returns what it took."""
        started = now(self._device)
        proposal, confidences, lengths = self._propose()
        ids = self._anchors[:, None]
        if proposal is not None:
            ids = torch.cat((ids, proposal.tokens[:, : int(lengths.max())]), 1)
        proposed = now(self._device)
        taps, last_hidden = self._run(ids)
        accepted, self._anchors = self._accept(self.target.logits(last_hidden), proposal, lengths)
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
        proposal = self.proposer.propose(self._anchors, self.temperature, self._draws, self._requests)
        if proposal.confidence_logits is None:
            confidences = np.full((rows, self.proposer.gamma), np.nan, np.float32)
        else:
            confidences = proposal.confidence_logits.float().cpu().numpy()
        return proposal, confidences, self.policy.lengths(confidences)

    def _run(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """One pass of the target over `ids` [B, Q] after each row's context: taps (if needed), final hidden states."""
        positions, mask = self._cache.window(ids.shape[1], ids.device)
        if self.proposer is None:
            last_hidden = self.target.last_hidden(ids, attention_mask=mask, position_ids=positions, cache=self._cache)
            return last_hidden, last_hidden
        output = self.target.hidden(ids, attention_mask=mask, position_ids=positions, cache=self._cache)
        return output.taps, output.last_hidden

    def _accept(self, logits: Tensor, proposal: Proposal | None, lengths: Counts) -> tuple[Counts, Tensor]:
        """Accepted drafts and the token after them, from the target's logits [B, K + 1, V]."""
        if self.temperature == 0:
            drafts = logits.new_zeros(len(lengths), 0) if proposal is None else proposal.tokens
            return accept_greedy(logits, drafts, lengths)
        probs = distribution(logits, self.temperature, self._precision)
        return accept_sampled(probs, proposal, lengths, self._draws, self._requests)

    def _remove_finished(self) -> None:
        """Hand finished rows over and move the last active rows into their places."""
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
        if rows:
            self._cache.keep(rows)
            if self.proposer is not None:
                self.proposer.keep(rows)


def _capacity(target: Target, prompts: Sequence[Sequence[int]], requests: Sequence[int], beyond: int) -> int:
    """Positions per row: the longest prompt and `beyond` (new tokens and a block past the limit)."""
    limit = target.record.max_position
    for request, prompt in zip(requests, prompts, strict=True):
        if not len(prompt):
            raise DataError(f"prompt {request} is empty")
        if len(prompt) + beyond > limit:
            raise DataError(
                f"prompt {request} has {len(prompt)} tokens; with {beyond} more it would pass the target's "
                f"{limit} positions",
                "lower max_new_tokens or the prompt length limit",
            )
    return max(map(len, prompts)) + beyond
