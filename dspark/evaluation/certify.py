"""Certify the reference engine on one serving profile: the exported drafter, loaded again, in the engine's dtype.

`CertificateEntry` is torch-free (`entry.py`); torch is imported only where something is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark.config.models import DType, EvaluationSettings, ServingProfile
from dspark.decoding.records import RecordSet
from dspark.errors import SettingsError
from dspark.evaluation.acceptance import measure_acceptance
from dspark.evaluation.agreement import compare_taus
from dspark.evaluation.entries import Engine, measured_entry
from dspark.evaluation.entry import Agreement, CertificateEntry, LosslessSummary, Status, absent_entry
from dspark.evaluation.recommendation import against_champion, note_halves, recommend
from dspark.evaluation.results import LosslessReport
from dspark.io.progress import Progress

if TYPE_CHECKING:
    from dspark.corpus.prompts import PreparedPrompt
    from dspark.decoding.drafting import Proposer
    from dspark.evaluation.rivals import Champion
    from dspark.scheduling.prefix import PrefixScheduler
    from dspark.targets.loading import Target

Load = Callable[[DType], "tuple[Target, Proposer]"]

TOLERANCE = 0.05  # relative difference of tau between evaluation and engine

__all__ = ["CertificateEntry", "Load", "absent_entry", "certify_reference", "compare_offline"]


def certify_reference(
    profile: ServingProfile,
    fingerprint: Mapping[str, Any],
    load: Load,
    prompts: Sequence[PreparedPrompt],
    settings: EvaluationSettings,
    *,
    prompts_per_domain: int,
    offline: RecordSet | None,
    lossless: LosslessReport | None,
    scheduler: PrefixScheduler | None = None,
    champion: Champion | None = None,
    progress: Progress | None = None,
) -> CertificateEntry:
    """Measure acceptance, agreement with the evaluation, load points and cycle times in the engine itself.

    Args:
        profile: its dtype, concurrencies and threads; the caller has set torch's threads.
        fingerprint: of the machine and engine (`profiling.fingerprint`).
        load: the target and a proposer on the *exported* drafter, in a dtype.
        prompts: of the eval split.
        settings: lengths and rounds.
        prompts_per_domain: to decode, at most.
        offline: the evaluation's greedy records, for the agreement; None: status `inconclusive`.
        lossless: the evaluation's check of the loop, which is this engine's loop; None: status `inconclusive`.
        scheduler: for policy `scheduled`; None: that policy is not measured.
        champion: what takes turns with the candidate in the rounds; None: nothing does, at no cost.
        progress: shows the decoding and the rounds.
    Raises:
        SettingsError: an engine other than the reference engine.
    """
    if profile.access == "none":
        return absent_entry(profile)
    if profile.engine != "reference":
        raise SettingsError(f"profile {profile.name}: engine {profile.engine!r} is not the reference engine")
    from dspark.decoding.policies import Fixed, NoDrafts, Policy, Scheduled
    from dspark.evaluation.decoding import decode_prompts, first_prompts, spread_prompts
    from dspark.evaluation.throughput import NONE, Arm, compare

    progress = progress or Progress()
    target, proposer = load(profile.dtype)
    chosen = first_prompts(prompts, prompts_per_domain)
    progress.start("decode in the engine", len(chosen), unit="prompts")
    engine = decode_prompts(target, proposer, chosen, settings, temperature=0.0, progress=progress)
    agreement = None if offline is None else compare_offline(offline, engine, seed=settings.seed)

    def policies(scheduler: PrefixScheduler | None) -> list[Policy]:
        return [Fixed(), *([Scheduled(scheduler)] if scheduler is not None else [])]

    own = [Arm(NONE, None, NoDrafts()), *(Arm(policy.name, proposer, policy) for policy in policies(scheduler))]
    rival = champion.load(target) if champion is not None else None
    turns = policies(champion.scheduler) if champion is not None else []
    theirs = [Arm(f"champion {policy.name}", rival, policy) for policy in turns]
    arms = [*own, *theirs]
    rounds = settings.throughput_rounds
    note_halves(rounds, progress)
    progress.start("measure load", len(profile.certify_concurrency) * len(arms) * rounds, unit="rounds")
    comparisons = []
    for concurrency in sorted(profile.certify_concurrency):
        asked = [one.token_ids for one in spread_prompts(prompts, max(settings.throughput_prompts, concurrency))]
        comparisons.append(
            compare(
                target,
                arms,
                asked,
                rounds=rounds,
                max_new_tokens=settings.throughput_new_tokens,
                concurrency=concurrency,
                seed=settings.seed,
                progress=progress,
            )
        )
    candidates = [comparison.only([arm.name for arm in own]) for comparison in comparisons]
    recommended = recommend(candidates, proposer.gamma)
    against = None
    if champion is not None and rival is not None:
        named = {NONE: NONE} | {arm.policy.name: arm.name for arm in theirs}
        against = against_champion(champion.package_digest, comparisons, recommended, named, rival.gamma)
    return measured_entry(
        Engine(profile, fingerprint, target.record.thinking_mode),
        _status(agreement, lossless),
        {
            domain: measure_acceptance(engine.of_domain(domain).decoded, seed=settings.seed)
            for domain in sorted(set(engine.domains))
            if any(len(one.cycles) for one in engine.of_domain(domain).decoded)
        },
        candidates,
        domains=engine.domains,
        prompts=len(chosen),
        recommended=recommended,
        settings=settings,
        lossless=_lossless(lossless),
        agreement=agreement,
        champion=against,
    )


def compare_offline(offline: RecordSet, engine: RecordSet, *, tolerance: float = TOLERANCE, seed: int = 0) -> Agreement:
    """tau of the evaluation and of the engine on the prompts that both decoded.

    Half precision lets texts part ways at near-ties, so the two are compared as means over prompts.

    Raises:
        SettingsError: different temperatures or policies, or no prompt in common.
    """
    if offline.kind != engine.kind:
        raise SettingsError(f"offline records are of {offline.kind}, the engine's of {engine.kind}")
    places = {name: index for index, name in enumerate(offline.ids)}
    pairs = [(places[name], index) for index, name in enumerate(engine.ids) if name in places]
    if not pairs:
        raise SettingsError("evaluation and engine have no prompt in common")
    sides = []
    for records, indices in ((offline, [a for a, _ in pairs]), (engine, [b for _, b in pairs])):
        cycles = [records.decoded[index].cycles for index in indices]
        sides.append(
            (np.array([one.committed.sum() for one in cycles], float), np.array([len(one) for one in cycles], float))
        )
    return compare_taus(*sides, tolerance=tolerance, seed=seed)


def _lossless(report: LosslessReport | None) -> LosslessSummary:
    if report is None:
        return LosslessSummary(method="none", result="inconclusive", n=0, drafts=0)
    greedy = report.greedy
    return LosslessSummary(
        method=f"{greedy.method}+{report.sampled.method}", result=report.result, n=greedy.n, drafts=greedy.drafts
    )


def _status(agreement: Agreement | None, lossless: LosslessReport | None) -> tuple[Status, str | None]:
    if agreement is None:
        return "inconclusive", "there are no records of the evaluation to compare the engine with"
    if agreement.result == "disagrees":
        return "disagrees", (
            f"tau is {agreement.engine_tau.value:.3f} in the engine and {agreement.offline_tau.value:.3f} in the "
            f"evaluation of the same prompts, more than {agreement.tolerance:.0%} apart"
        )
    if agreement.result == "inconclusive":
        return "inconclusive", "tau of engine and evaluation differ, and there are too few prompts to say by how much"
    if lossless is None or lossless.result == "inconclusive":
        return "inconclusive", "losslessness was not shown"
    return "measured", None
