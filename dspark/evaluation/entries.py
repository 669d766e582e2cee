"""Entries of certificates out of what was measured: put together alike for every engine."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dspark.config.models import EvaluationSettings, Sampling, ServingProfile
from dspark.decoding.policies import Fixed
from dspark.engines.agreement import AgreementReport
from dspark.evaluation.entry import (
    AgainstChampion,
    AgainstNone,
    Agreement,
    CertificateEntry,
    HoldsUntil,
    LosslessSummary,
    Recommendation,
    Status,
    Workload,
)
from dspark.evaluation.results import Acceptance, ThroughputReport
from dspark.evaluation.rounds import Comparison

VALID_DAYS = 180


@dataclass(frozen=True)
class Engine:
    """The engine that an entry is about, as it was found.

    Attributes:
        profile: by whose name the entry goes.
        fingerprint: of the machine and engine (`profiling.fingerprint`).
        thinking_mode: of the target.
    """

    profile: ServingProfile
    fingerprint: Mapping[str, Any]
    thinking_mode: Literal["none", "off", "on"]


def measured_entry(
    engine: Engine,
    status: tuple[Status, str | None],
    acceptance: Mapping[str, Acceptance],
    comparisons: Sequence[Comparison],
    *,
    domains: Iterable[str],
    prompts: int,
    recommended: Sequence[Recommendation],
    settings: EvaluationSettings,
    lossless: LosslessSummary,
    agreement: Agreement | None,
    left_out: int = 0,
    export: AgreementReport | None = None,
    champion: AgainstChampion | None = None,
) -> CertificateEntry:
    """The entry of what was measured just now, greedily and with whole blocks verified.

    Args:
        status: with the reason of one that is not `measured`.
        acceptance: by domain.
        comparisons: of load points, one per concurrency, whole blocks among their arms.
        domains, prompts: of what was decoded for the acceptance.
        left_out: prompts that did not fit.
        recommended: from the same comparisons.
        settings: length of the replies.
        lossless, agreement, export, champion: what was found of each.
    """
    whole, now = Fixed().name, datetime.datetime.now(datetime.UTC)
    reports = [comparison.report() for comparison in comparisons]
    return CertificateEntry(
        profile=engine.profile.name,
        status=status[0],
        reason=status[1],
        fingerprint=dict(engine.fingerprint),
        measured_at=now.isoformat(timespec="seconds"),
        workload=Workload(
            domains=tuple(sorted(set(domains))),
            sampling=Sampling(temperature=0.0),
            thinking_mode=engine.thinking_mode,
            policy=whole,
            prompts=prompts,
            left_out=left_out,
            max_new_tokens=settings.max_new_tokens,
        ),
        acceptance=dict(acceptance),
        export=export,
        offline_vs_engine=agreement,
        lossless=lossless,
        load=tuple(arm.load for report in reports for arm in report.arms.values()),
        against_none=_against_none(reports),
        against_champion=champion,
        cycle=reports[0].arms[whole].cycle,
        recommended=tuple(recommended),
        holds_until=_holds_until(engine.fingerprint, now),
    )


def _against_none(reports: Iterable[ThroughputReport]) -> tuple[AgainstNone, ...]:
    """The ratio of every arm but plain decoding."""
    return tuple(
        AgainstNone(concurrency=arm.load.concurrency, arm=name, policy=arm.load.policy, ratio=arm.against_none)
        for report in reports
        for name, arm in report.arms.items()
        if arm.against_none is not None
    )


def _holds_until(fingerprint: Mapping[str, Any], measured: datetime.datetime) -> HoldsUntil:
    """The end of what was measured on an engine at a time."""
    end = measured + datetime.timedelta(days=VALID_DAYS)
    return HoldsUntil(engine_version=str(fingerprint["engine_version"]), date=end.date().isoformat())
