"""What one request has been through so far: its tokens, its cycles, and whether it is finished."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dspark.decoding.records import Cycles, Decoded, FinishReason
from dspark.decoding.truncation import WHOLE, Truncation


class Timing(NamedTuple):
    """Of a batch's cycle."""

    draft_seconds: float
    verify_seconds: float
    rows: int  # requests that shared it


class History:
    """Collects one request; the only place that knows where a sequence ends.

    Args:
        prompt_length: tokens of the prompt.
        gamma: draft tokens per block; 0 for plain decoding.
        max_new_tokens: limit of the output.
        eos_token_ids: tokens that end the sequence.
        temperature, policy, truncation: noted in the result.
    """

    def __init__(
        self,
        prompt_length: int,
        gamma: int,
        max_new_tokens: int,
        eos_token_ids: frozenset[int],
        temperature: float,
        policy: str,
        truncation: Truncation = WHOLE,
    ) -> None:
        self._prompt_length, self._gamma = prompt_length, gamma
        self._limit, self._eos = max_new_tokens, eos_token_ids
        self._temperature, self._policy, self._truncation = temperature, policy, truncation
        self._tokens: list[int] = []
        self._prefill_seconds = 0.0
        self._drafted: list[Sequence[int]] = []
        self._logits: list[NDArray[np.float32]] = []
        self._counts: list[tuple[int, int, int, int]] = []  # verified, accepted, committed, known
        self._timings: list[Timing] = []
        self.finish_reason: FinishReason | None = None

    def begin(self, token: int, prefill_seconds: float) -> None:
        """The token that the prefill gave."""
        self._prefill_seconds = prefill_seconds
        self._append([token])

    def add(
        self,
        drafts: Sequence[int],
        verified: int,
        accepted: int,
        following: int,
        confidence_logits: NDArray[np.float32],
        timing: Timing,
    ) -> None:
        """One cycle.

        Args:
            drafts: the drafted block, [gamma].
            verified: how many of them the target looked at.
            accepted: how many leading ones the rule accepted.
            following: the token drawn after these.
            confidence_logits: of the block, [gamma].
            timing: of the batch's cycle.
        """
        committed = [*drafts[:accepted], following]
        # Cut by what was drafted, whatever became of it: behind an end that was accepted no outcome is known, and of
        # blocks in which it was not, all that lies behind it is rejected.
        ended = next((place + 1 for place, token in enumerate(drafts[:verified]) if token in self._eos), verified)
        known = min(ended, self._limit - len(self._tokens))
        for index, token in enumerate(committed):
            if token in self._eos:
                # What follows an end of sequence is not part of the text: dropped, and neither accepted nor rejected.
                committed = committed[: index + 1]
                accepted = min(accepted, index + 1)
                break
        self._drafted.append(drafts)
        self._logits.append(confidence_logits)
        self._counts.append((verified, accepted, len(committed), known))
        self._timings.append(timing)
        self._append(committed)

    def result(self) -> Decoded:
        """The finished request."""
        if self.finish_reason is None:
            raise RuntimeError("the request is not finished")
        count = len(self._counts)
        counts = np.array(self._counts, np.int32).reshape(count, 4)
        timings = np.array(self._timings, np.float64).reshape(count, 3)
        cycles = Cycles(
            drafted=np.array(self._drafted, np.int32).reshape(count, self._gamma),
            verified=counts[:, 0],
            accepted=counts[:, 1],
            committed=counts[:, 2],
            known=counts[:, 3],
            confidence_logits=np.array(self._logits, np.float32).reshape(count, self._gamma),
            draft_seconds=timings[:, 0],
            verify_seconds=timings[:, 1],
            rows=timings[:, 2].astype(np.int32),
        )
        return Decoded(
            self._prompt_length,
            self._tokens,
            self.finish_reason,
            self._temperature,
            self._policy,
            self._prefill_seconds,
            cycles,
            self._truncation.top_k,
            self._truncation.top_p,
        )

    def _append(self, tokens: list[int]) -> None:
        self._tokens += tokens[: self._limit - len(self._tokens)]
        if self._tokens[-1] in self._eos:
            self.finish_reason = "stop"
        elif len(self._tokens) == self._limit:
            self.finish_reason = "length"
