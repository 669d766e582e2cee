"""Certify llama.cpp on one serving profile: the exported file in the engine's own server, with its own counters."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark.config.models import EvaluationSettings, Sampling, ServingProfile
from dspark.corpus.prompts import PreparedPrompt
from dspark.decoding.policies import Fixed, NoDrafts, parse_policy
from dspark.drafters.dspark import DSparkDrafter
from dspark.engines.agreement import AgreementReport
from dspark.engines.llamacpp import TIMES_SHOWN, Completion, LlamaCppSettings, Streamed
from dspark.engines.llamacpp_load import Servers, Together
from dspark.errors import DataError
from dspark.evaluation.counters import Asked, compare_counters, judge_counters, measure_counters, replay_all
from dspark.evaluation.decoding import first_prompts, spread_prompts
from dspark.evaluation.entry import (
    ENGINE_TEXTS,
    CertificateEntry,
    LosslessSummary,
    Status,
    Workload,
    against_none,
    holds_until,
)
from dspark.evaluation.recommendation import recommend
from dspark.evaluation.results import Difference, Result
from dspark.evaluation.rounds import NONE, Arm, Comparison, Request, Round, run_in_turn
from dspark.io.progress import Progress
from dspark.targets.loading import Target

# Steps of a drafted block and of a single token run other kernels on quantised weights, so that near-ties may fall
# either way: a difference of logits, in float32, up to which a text may part from plain decoding's.
NEAR_TIE = 0.25
FEWEST_EQUAL = 0.95  # share of texts
BURST = 1e-3  # seconds: tokens that arrive closer than that came with one cycle
P_MIN = 0.5


def certify_llamacpp(
    profile: ServingProfile,
    fingerprint: Mapping[str, Any],
    target: Target,
    drafter: DSparkDrafter,
    prompts: Sequence[PreparedPrompt],
    settings: EvaluationSettings,
    *,
    prompts_per_domain: int,
    target_file: Path,
    drafter_file: Path,
    export: AgreementReport,
    work: Path,
    progress: Progress | None = None,
) -> CertificateEntry:
    """Measure acceptance, agreement with the loop, equality of texts and load points in the engine itself.

    Args:
        profile: its threads, memory dtype, policies and concurrencies.
        fingerprint: of the machine and engine (`profiling.fingerprint`).
        target: in float32, for the replay.
        drafter: as the file holds it, in float32.
        prompts: of the eval split.
        settings: lengths and rounds.
        prompts_per_domain: to decode, at most.
        target_file, drafter_file: what the engine serves.
        export: what the export gate found.
        work: folder for the engine's logs.
        progress: shows the decoding and the rounds.
    Raises:
        DataError: too few prompts for a concurrency.
        ServiceError: the engine does not run, or dies.
    """
    progress = progress or Progress()
    gamma, seed = drafter.config.gamma, settings.seed
    arms = served_arms(profile, gamma)
    chosen = first_prompts(prompts, prompts_per_domain)
    asked_together = {
        concurrency: [one.token_ids for one in spread_prompts(prompts, max(settings.throughput_prompts, concurrency))]
        for concurrency in sorted(profile.certify_concurrency)
    }
    longest = max(len(one) for group in (*asked_together.values(), [one.token_ids for one in chosen]) for one in group)
    slots = max(profile.certify_concurrency)
    served = LlamaCppSettings(
        target_file,
        drafter_file,
        context=slots * (longest + max(settings.max_new_tokens, settings.throughput_new_tokens)),
        slots=slots,
        threads=int(fingerprint["threads"]),
        memory="F32" if profile.dtype == "float32" else "F16",
        log_level=TIMES_SHOWN,
    )
    with Servers(served, {arm.name: arm.policy for arm in arms}, gamma, work) as servers:
        drafted, plain = (
            _decode(servers, name, chosen, settings.max_new_tokens, progress) for name in (Fixed().name, NONE)
        )
        progress.start("measure load", len(asked_together) * len(arms) * settings.throughput_rounds, unit="rounds")
        comparisons = [
            _compare(servers, arms, group, concurrency, served, profile, settings, progress)
            for concurrency, group in asked_together.items()
        ]
    asked = replay_all(
        target,
        drafter,
        [one.token_ids for one in chosen],
        drafted,
        max_new_tokens=settings.max_new_tokens,
        n_max=gamma,
        progress=progress,
    )
    agreement = compare_counters(asked, seed=seed)
    lossless = _lossless(target, chosen, drafted, plain)
    verdict, reason = judge_counters(agreement)
    status: Status = "measured" if verdict == "agrees" else verdict
    if status == "measured" and lossless.result == "inconclusive":
        status, reason = "inconclusive", "losslessness was not shown"
    reports = [comparison.report() for comparison in comparisons]
    now = datetime.datetime.now(datetime.UTC)
    return CertificateEntry(
        profile=profile.name,
        status=status,
        reason=reason,
        fingerprint={**fingerprint, "quantisation": target.record.quantisation or served.memory},
        measured_at=now.isoformat(timespec="seconds"),
        workload=Workload(
            domains=tuple(sorted({one.domain for one in chosen})),
            sampling=Sampling(temperature=0.0),
            thinking_mode=target.record.thinking_mode,
            policy=Fixed().name,
            prompts=len(chosen),
            max_new_tokens=settings.max_new_tokens,
        ),
        acceptance={
            domain: measure_counters([one.reply.counters for one in group], seed=seed)
            for domain, group in _by_domain(chosen, asked).items()
        },
        export=export,
        offline_vs_engine=agreement,
        lossless=lossless,
        load=tuple(arm.load for report in reports for arm in report.arms.values()),
        against_none=against_none(reports),
        cycle=reports[0].arms[Fixed().name].cycle,
        recommended=recommend(comparisons, gamma),
        holds_until=holds_until(fingerprint, now),
    )


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


def _decode(
    servers: Servers, name: str, prompts: Sequence[PreparedPrompt], max_new_tokens: int, progress: Progress
) -> list[Completion]:
    """Every prompt by itself, so that what was counted is this prompt's."""
    progress.start(f"decode in the engine, {name}", len(prompts), unit="prompts")
    replies = []
    for prompt in prompts:
        replies.append(servers[name].complete(prompt.token_ids, max_new_tokens))
        progress.advance()
    return replies


def _compare(
    servers: Servers,
    arms: Sequence[Arm],
    prompts: Sequence[Sequence[int]],
    concurrency: int,
    served: LlamaCppSettings,
    profile: ServingProfile,
    settings: EvaluationSettings,
    progress: Progress,
) -> Comparison:
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
        threads=served.threads,
        concurrency=concurrency,
        prompts=min(settings.throughput_rounds, len(prompts) // concurrency) * concurrency,
        max_new_tokens=settings.throughput_new_tokens,
        seed=settings.seed,
    )


def _lossless(
    target: Target, prompts: Sequence[PreparedPrompt], drafted: Sequence[Completion], plain: Sequence[Completion]
) -> LosslessSummary:
    """Texts with drafts against texts without: all but a few equal, and no difference beyond a near-tie."""
    differences = tuple(
        found
        for prompt, one, other in zip(prompts, drafted, plain, strict=True)
        if (found := text_difference(target, prompt, one, other)) is not None
    )
    drafts = sum(one.counters.drafted for one in drafted)
    good = len(differences) <= (1 - FEWEST_EQUAL) * len(prompts) and all(one.gap <= NEAR_TIE for one in differences)
    result: Result = "inconclusive" if not drafts else "pass" if good else "fail"
    return LosslessSummary(
        method=ENGINE_TEXTS,
        result=result,
        n=len(prompts),
        drafts=drafts,
        differences=differences,
    )


@torch.inference_mode()
def text_difference(
    target: Target, prompt: PreparedPrompt, drafted: Completion, plain: Completion
) -> Difference | None:
    """Where a text first parts from plain decoding's, with the target's own difference of logits there; None if never.

    Raises:
        DataError: a reply is longer than the other one and neither was ended by a token.
    """
    ended = sorted(target.eos_token_ids)
    one, other = ([*reply.token_ids, *(ended[:1] if reply.ended else [])] for reply in (drafted, plain))
    shared = next((place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    if shared is None:
        if len(one) != len(other):
            raise DataError(f"prompt {prompt.id}: one reply goes on where the other was cut off", "this is a fault")
        return None
    ids = torch.tensor([[*prompt.token_ids, *one[:shared]]], device=target.device)
    logits = target.logits(target.last_hidden(ids)[:, -1]).float()[0]
    token, best = one[shared], other[shared]
    # Any token that ends a reply may be the one that did.
    alike = [ended if either in target.eos_token_ids else [either] for either in (best, token)]
    gap = abs(float(logits[alike[0]].max() - logits[alike[1]].max()))
    return Difference(prompt=prompt.id, position=shared, token=token, best=best, gap=gap)


def _by_domain(prompts: Sequence[PreparedPrompt], asked: Sequence[Asked]) -> dict[str, list[Asked]]:
    groups: dict[str, list[Asked]] = {}
    for prompt, one in zip(prompts, asked, strict=True):
        groups.setdefault(prompt.domain, []).append(one)
    return {domain: group for domain, group in sorted(groups.items()) if any(one.reply.counters.steps for one in group)}
