"""Loops with one rule wrong. Whatever checks losslessness must tell each of them from the right one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark.decoding import acceptance, drafting, loop
from dspark.decoding.drafting import Proposal, TorchProposer
from dspark.decoding.draws import CounterDraws, Draws

Mutate = Callable[[pytest.MonkeyPatch], None]


def no_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejected token is replaced from p instead of what q left over."""
    monkeypatch.setattr(acceptance, "residual", lambda target, drafter, token_ids=None: target)


def _proposals(monkeypatch: pytest.MonkeyPatch, change: Callable[[Proposal], Proposal]) -> None:
    real = TorchProposer.propose
    monkeypatch.setattr(TorchProposer, "propose", lambda *arguments: change(real(*arguments)))


def not_drawn_from_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ratio divides by another distribution than the tokens were drawn from."""
    _proposals(monkeypatch, lambda one: dataclasses.replace(one, probs=one.probs.roll(1, 2)))


def half_precision_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn in float32, divided by in bfloat16."""
    _proposals(monkeypatch, lambda one: dataclasses.replace(one, probs=one.probs.bfloat16().double()))


def temperature_of_the_drafter_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are drawn at a temperature that the ratio knows nothing of."""

    def cooler(one: Proposal) -> Proposal:
        probs = one.probs.sqrt()
        return dataclasses.replace(one, probs=probs / probs.sum(-1, keepdim=True))

    _proposals(monkeypatch, cooler)


def temperature_of_the_target_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification forgets the temperature."""
    real = loop.distribution
    monkeypatch.setattr(loop, "distribution", lambda logits, temperature, *rest: real(logits, 1.0, *rest))


def inverted_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """q / p instead of p / q."""
    real = loop.accept_sampled

    def inverted(probs: Tensor, proposal: Proposal | None, *rest: Any) -> Any:
        if proposal is None:
            return real(probs, proposal, *rest)
        swapped = dataclasses.replace(proposal, probs=probs[:, :-1])
        accepted, _ = real(torch.cat([proposal.probs, probs[:, -1:]], 1), swapped, *rest)
        rows = torch.arange(len(accepted))
        return accepted, rest[1].categorical(probs[rows, torch.from_numpy(accepted)], rest[2])

    monkeypatch.setattr(loop, "accept_sampled", inverted)


def bonus_from_the_wrong_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token after the block is drawn from the view before its last token."""
    real = loop.accept_sampled

    def shifted(probs: Tensor, proposal: Proposal | None, *rest: Any) -> Any:
        return real(torch.cat([probs[:, :-1], probs[:, -2:-1]], 1) if proposal else probs, proposal, *rest)

    monkeypatch.setattr(loop, "accept_sampled", shifted)


def rejected_context_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rolling back is forgotten: the target goes on after the rejected tokens."""
    real = loop.SlotCache.advance

    def advance(cache: Any, counts: np.ndarray) -> None:
        real(cache, counts if counts.max() > 2 else np.full_like(counts, 2))

    monkeypatch.setattr(loop.SlotCache, "advance", advance)


class _Rounded:
    """Draws from distributions in bfloat16."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws

    def categorical(self, probs: Tensor, requests: np.ndarray) -> Tensor:
        return self._draws.categorical(probs.bfloat16(), requests)


def drawn_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpec's mistake: drafts are drawn in bfloat16 and the ratio divides by float32."""
    real = drafting.Drawn.__init__

    def rounded(drawn: Any, drafter: Any, temperature: float, precision: Any, draws: Draws, *rest: Any) -> None:
        real(drawn, drafter, temperature, precision, _Rounded(draws), *rest)

    monkeypatch.setattr(drafting.Drawn, "__init__", rounded)


def confidence_of_the_token_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft is as certain as its own probability: what is verified depends on what was drawn."""

    def telling(one: Proposal) -> Proposal:
        own = one.probs.gather(2, one.indices[..., None]).squeeze(2)
        return dataclasses.replace(one, confidence_logits=torch.logit(own))

    _proposals(monkeypatch, telling)


def reused_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number that rejected a token is used again for the token that replaces it."""
    real = CounterDraws.accept

    def accept(draws: CounterDraws, probs: Tensor, lengths: np.ndarray, requests: np.ndarray) -> np.ndarray:
        accepted = real(draws, probs, lengths, requests)
        draws._numbers[requests] -= (lengths - accepted).astype(np.uint64)
        return accepted

    monkeypatch.setattr(CounterDraws, "accept", accept)
