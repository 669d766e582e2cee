"""Measure what steps of the reference engine cost: the real loop, a random drafter of the geometry, many shapes.

A random drafter costs what a trained one costs. Shapes are measured in turn, forwards and backwards, so that a machine
that drifts slows all of them alike; medians are taken over the repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.config.models import ServingProfile
from dspark.decoding.drafting import Proposer
from dspark.decoding.draws import CounterDraws
from dspark.decoding.history import Timing
from dspark.decoding.loop import Batch
from dspark.decoding.policies import Logits, NoDrafts, Policy
from dspark.decoding.prefixes import Counts
from dspark.decoding.proposers import torch_proposer
from dspark.drafters.base import Drafter
from dspark.drafters.config import DrafterConfig
from dspark.drafters.kinds import build_drafter
from dspark.errors import DataError, SettingsError
from dspark.io.progress import Progress
from dspark.processor import arithmetic
from dspark.profiling.cost import CostReport, CostRow, DraftRow, curve_fields, draft_row, median
from dspark.targets.loading import Target

Backends = Callable[[Drafter], Mapping[str, Proposer]]
_TORCH = "torch"


class Verify:
    """Policy of a profile: draft whole blocks, verify exactly `count` tokens of each, nothing of them if 0."""

    drafts = True

    def __init__(self, count: int) -> None:
        self.count = count
        self.name = f"verify({count})"

    def lengths(self, confidence_logits: Logits) -> Counts:
        """`count` for every row."""
        return np.full(len(confidence_logits), self.count, np.int64)


def profile_engine(
    target: Target,
    config: DrafterConfig,
    profile: ServingProfile,
    fingerprint: Mapping[str, Any],
    *,
    backends: Backends | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> CostReport:
    """Step times over requests, verified tokens and contexts, and the cost curve that schedulers use.

    Args:
        target: in the profile's dtype; the caller has set torch's threads.
        config: geometry of the drafter.
        profile: which requests and contexts, warm-up, repeats, and whose drafting counts.
        fingerprint: of the machine and engine.
        backends: further proposers on the random drafter, by the profile's names; needed if the profile drafts with
            another backend than torch.
        seed: of drafter and prompts.
        progress: advanced by one per shape.
    Raises:
        SettingsError: fewer than two contexts, a backend that is not there, or a dtype that is not the profile's.
        DataError: a context that does not fit into the target.
    """
    if len(set(profile.contexts)) < 2:
        raise SettingsError(f"profile {profile.name}: contexts need two lengths or more, to tell their cost apart")
    if target.dtype != getattr(torch, arithmetic(profile.dtype, target.device.type)):
        raise SettingsError(f"profile {profile.name}: dtype is {profile.dtype}, the target is in {target.dtype}")
    drafter = random_drafter(config, target.embedding, target.head, seed=seed)
    proposers: dict[str, Proposer] = {_TORCH: torch_proposer(drafter)}
    proposers |= backends(drafter) if backends is not None else {}
    if profile.draft_backend not in proposers:
        raise SettingsError(f"profile {profile.name}: draft backend {profile.draft_backend!r} is not available")
    progress = progress or Progress()
    shapes = [(requests, context) for requests in profile.requests for context in profile.contexts]
    progress.start("profile steps", len(shapes) * (1 + len(proposers)), unit="shapes")
    rows, plain, drafting = [], [], []
    for requests, context in shapes:
        measure = _Shape(target, profile, requests, context, seed)
        plain.append(measure.rows(None, [NoDrafts()])[0])
        progress.advance()
        for backend, proposer in proposers.items():
            counts = _verified(config.gamma) if backend == profile.draft_backend else [0]
            found = measure.rows(proposer, [Verify(count) for count in counts])
            if backend == profile.draft_backend:
                rows += found
            drafting.append(measure.drafting(backend))
            progress.advance()
    return CostReport(
        profile=profile.name,
        target=target.record.name,
        target_digest=target.record.digest,
        geometry=config.geometry,
        gamma=config.gamma,
        dtype=target.dtype_name,
        threads=torch.get_num_threads(),
        draft_backend=profile.draft_backend,
        warmup=profile.warmup,
        repeats=profile.repeats,
        fingerprint=dict(fingerprint),
        rows=tuple(rows),
        plain=tuple(plain),
        drafting=tuple(drafting),
        **curve_fields(rows, max(profile.requests) * (config.gamma + 1)),
    )


class _Shape:
    """Steps of one number of requests at one context."""

    def __init__(self, target: Target, profile: ServingProfile, requests: int, context: int, seed: int) -> None:
        self._target, self._profile = target, profile
        self._requests, self._context, self._seed = requests, context, seed
        self._timings: list[list[Timing]] = []

    def rows(self, proposer: Proposer | None, policies: Sequence[Policy]) -> list[CostRow]:
        """One row per policy, measured in turn."""
        steps = (self._profile.warmup + self._profile.repeats) * len(policies)
        batch = self._batch(proposer, policies[0], steps)
        self._timings = [[] for _ in policies]
        for number, index in _in_turn(self._profile.warmup + self._profile.repeats, len(policies)):
            batch.policy = policies[index]
            timing = batch.cycle()
            if number >= self._profile.warmup:
                self._timings[index].append(timing)
        return [self._row(policy, timings) for policy, timings in zip(policies, self._timings, strict=True)]

    def drafting(self, backend: str) -> DraftRow:
        """Drafting time over all steps of the last `rows`: what is verified afterwards does not change it."""
        seconds = [timing.draft_seconds for timings in self._timings for timing in timings]
        return draft_row(backend, self._requests, self._context, seconds)

    def _row(self, policy: Policy, timings: list[Timing]) -> CostRow:
        draft, _ = median([timing.draft_seconds for timing in timings])
        verify, _ = median([timing.verify_seconds for timing in timings])
        step, interval = median([timing.draft_seconds + timing.verify_seconds for timing in timings])
        return CostRow(
            requests=self._requests,
            verify_tokens=self._requests * (1 + (policy.count if isinstance(policy, Verify) else 0)),
            context=self._context,
            draft_seconds=draft,
            verify_seconds=verify,
            step_seconds=step,
            n=len(timings),
            ci95=interval,
        )

    def _batch(self, proposer: Proposer | None, policy: Policy, steps: int) -> Batch:
        """A prefilled batch whose context is the wanted one half-way through the steps; nothing ends its texts."""
        gamma = proposer.gamma if proposer is not None else 0
        length = max(self._context - steps // 2, 1)
        new_tokens = steps * (gamma + 1) + 2
        room = self._target.record.max_position
        if length + new_tokens + gamma > room:
            raise DataError(
                f"profile {self._profile.name}: {steps} steps from a context of {self._context} need "
                f"{length + new_tokens + gamma} positions, the target has {room}",
                "lower contexts or repeats in the serving profile",
            )
        generator = torch.Generator().manual_seed(self._seed)
        shape = (self._requests, length)
        prompts = torch.randint(self._target.record.vocab_logical, shape, generator=generator).tolist()
        batch = Batch(
            self._target,
            proposer,
            prompts,
            range(self._requests),
            max_new_tokens=new_tokens,
            policy=policy,
            temperature=0.0,
            draws=CounterDraws(range(self._requests)),
            eos_token_ids=frozenset(),
        )
        batch.prefill()
        return batch


def _verified(gamma: int) -> list[int]:
    """How many drafts of a block to verify: none, one, half and all."""
    return sorted({0, 1, gamma // 2, gamma})


def _in_turn(repeats: int, count: int) -> Iterator[tuple[int, int]]:
    """(repeat, index): 0 1 2, 2 1 0, 0 1 2, ..."""
    for number in range(repeats):
        order = range(count) if number % 2 == 0 else reversed(range(count))
        yield from ((number, index) for index in order)


def random_drafter(config: DrafterConfig, embedding: Tensor, head: Tensor, *, seed: int = 0) -> Drafter:
    """A drafter that nobody trained: it costs what a trained one of its geometry costs.

    Args:
        embedding, head: of the target, [V, d]; the drafter takes their dtype and device.
    """
    ids = None
    if config.draft_vocab_size is not None:
        ids = torch.arange(config.draft_vocab_size) * config.vocab_size // config.draft_vocab_size
    return build_drafter(config, embedding, head, ids, seed=seed).to(embedding.device, embedding.dtype)
