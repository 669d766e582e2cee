"""Rounds of llama.cpp servers: what came in, and when, as `rounds.py` compares it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dspark.config.models import EvaluationSettings, ServingProfile
from dspark.decoding.policies import Fixed, NoDrafts, parse_policy
from dspark.engines.llamacpp import Streamed
from dspark.engines.llamacpp_load import Servers, Together
from dspark.evaluation.rounds import NONE, Arm, Comparison, Request, Round, run_in_turn
from dspark.io.progress import Progress

BURST = 1e-3  # seconds: tokens that arrive closer than that came with one cycle
P_MIN = 0.5


def served_arms(profile: ServingProfile, gamma: int) -> list[Arm]:
    """Plain decoding, whole blocks, and the other policies of a profile, by default every shorter block and one p_min.

    Raises:
        SettingsError: a policy that does not exist.
    """
    names = profile.policies or (*(f"fixed({k})" for k in range(1, gamma)), f"threshold({P_MIN:g})")
    policies = [Fixed(), *(parse_policy(name) for name in names if name not in (NONE, Fixed().name))]
    return [Arm(NONE, None, NoDrafts()), *(Arm(policy.name, None, policy) for policy in policies)]


def request_of(streamed: Streamed) -> Request:
    """A request as it came in: tokens that arrive together came with one cycle, the first one with the prefill."""
    if not streamed.token_ids:
        return Request((), streamed.whole_seconds, np.zeros(0), np.zeros(0, np.int32))
    seconds = np.array(streamed.seconds)
    gaps = np.diff(seconds)
    # The first cycle begins with the second token, however soon that came.
    begins = np.flatnonzero((gaps > BURST) | (np.arange(len(gaps)) == 0))
    ends = np.append(begins[1:], len(gaps)) if len(begins) else begins
    cycle_seconds = np.array([gaps[begin:end].sum() for begin, end in zip(begins, ends, strict=True)])
    return Request(streamed.token_ids, float(seconds[0]), cycle_seconds, (ends - begins).astype(np.int32))


def round_of(group: int, done: Together) -> Round:
    """A round as the engine reports it; the time that it does not spend on drafting is verification's."""
    requests = tuple(request_of(one) for one in done.replies)
    cycles = sum(len(one.emitted) for one in requests)
    calls = done.drafting.calls
    drafting = done.drafting.seconds / calls * cycles if calls else 0.0
    whole = sum(float(one.cycle_seconds.sum()) for one in requests)
    return Round(group, done.seconds, requests, cycles, done.counters.drafted, drafting, max(whole - drafting, 0.0))


def compare_served(
    servers: Servers,
    arms: Sequence[Arm],
    prompts: Sequence[Sequence[int]],
    concurrency: int,
    *,
    profile: ServingProfile,
    threads: int,
    settings: EvaluationSettings,
    progress: Progress,
) -> Comparison:
    """Interleaved rounds of all servers at one load.

    Args:
        servers: one for each arm, by its name.
        prompts: token ids; at least `concurrency`.
        profile: whose dtype is reported.
        threads: that the servers run with.
        settings: rounds and lengths.
        progress: advanced by one per arm and round; the caller starts the task.
    Raises:
        DataError: too few prompts.
    """

    def run(arm: Arm, group: int, tokens: int) -> Round:
        members = prompts[group * concurrency : (group + 1) * concurrency]
        return round_of(group, servers.together(arm.name, members, tokens))

    rounds = run_in_turn(
        arms,
        run,
        prompts=len(prompts),
        concurrency=concurrency,
        rounds=settings.throughput_rounds,
        max_new_tokens=settings.throughput_new_tokens,
        progress=progress,
    )
    return Comparison(
        arms=tuple(arms),
        rounds=rounds,
        temperature=0.0,
        dtype=profile.dtype,
        threads=threads,
        concurrency=concurrency,
        prompts=min(settings.throughput_rounds, len(prompts) // concurrency) * concurrency,
        max_new_tokens=settings.throughput_new_tokens,
        seed=settings.seed,
    )
