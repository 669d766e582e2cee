"""Certify llama.cpp on one serving profile: the exported file in the engine's own server, with its own counters."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark.config.models import EvaluationSettings, Sampling, ServingProfile
from dspark.corpus.prompts import PreparedPrompt
from dspark.decoding.policies import Fixed
from dspark.drafters.dspark import DSparkDrafter
from dspark.engines.agreement import AgreementReport
from dspark.engines.llamacpp import TIMES_SHOWN, Completion, LlamaCppSettings
from dspark.engines.llamacpp_load import Servers
from dspark.evaluation.counters import Asked, compare_counters, judge_counters, measure_counters, replay_all
from dspark.evaluation.decoding import first_prompts, spread_prompts
from dspark.evaluation.entry import (
    CertificateEntry,
    Status,
    Workload,
    against_none,
    holds_until,
)
from dspark.evaluation.recommendation import recommend
from dspark.evaluation.rounds import NONE
from dspark.evaluation.served import compare_served, served_arms
from dspark.evaluation.texts import compare_texts
from dspark.io.progress import Progress
from dspark.targets.loading import Target


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
            compare_served(
                servers,
                arms,
                group,
                concurrency,
                profile=profile,
                threads=served.threads,
                settings=settings,
                progress=progress,
            )
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
    lossless = compare_texts(target, chosen, drafted, plain)
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


def _by_domain(prompts: Sequence[PreparedPrompt], asked: Sequence[Asked]) -> dict[str, list[Asked]]:
    groups: dict[str, list[Asked]] = {}
    for prompt, one in zip(prompts, asked, strict=True):
        groups.setdefault(prompt.domain, []).append(one)
    return {domain: group for domain, group in sorted(groups.items()) if any(one.reply.counters.steps for one in group)}
