"""The gates about serving: what the certificate says of each profile that a package is promoted to."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dspark.config.gates import DaysGate, DifferenceGate, GatePolicy
from dspark.config.models import ServingProfile
from dspark.measured import Measured
from dspark.package.certificate import NONE, CertificateEntry
from dspark.package.manifest import Manifest
from dspark.package.staleness import differences
from dspark.profiling.fingerprint import profile_mistakes
from dspark.registry.gate_report import GateRow
from dspark.registry.gate_rows import Evidence, drafts_row, judged_row


def profile_rows(
    evidence: Evidence,
    policy: GatePolicy,
    champion: str | None,
    profiles: Sequence[ServingProfile],
    *,
    fingerprints: Mapping[str, Mapping[str, Any]],
    today: datetime.date,
) -> Iterator[GateRow]:
    """Losslessness, agreement, freshness and throughput of every profile; as `gates.judge`."""
    if not profiles:
        yield GateRow(gate="serving profiles", verdict="fail", reason="it is promoted to no serving profile")
    entries = {entry.profile: entry for entry in evidence.certificate.entries}
    for profile in profiles:
        entry = entries.get(profile.name)
        if entry is None or entry.status != "measured":
            why = (
                f"{entry.status} in the certificate: {entry.reason}" if entry else "the certificate has no entry for it"
            )
            for gate in ("lossless", "agreement", "certificate", "throughput"):
                yield GateRow(gate=f"{gate}, {profile.name}", verdict="fail", reason=why)
            continue
        lossless = entry.lossless
        assert lossless is not None  # of what was measured (CertificateEntry)
        yield drafts_row(f"lossless, {profile.name}", lossless.result, lossless.drafts, policy.lossless)
        yield _agreement_row(entry, policy.agreement)
        yield _fresh_row(evidence.manifest, entry, profile, fingerprints.get(profile.name), policy.fresh, today)
        yield from _throughput_rows(entry, profile, policy, champion)


def _agreement_row(entry: CertificateEntry, gate: DifferenceGate) -> GateRow:
    name, found = f"agreement, {entry.profile}", entry.offline_vs_engine
    if found is None:
        return GateRow(gate=name, verdict="fail", reason="evaluation and engine were not compared")
    within = abs(found.relative_difference.value) <= gate.number
    passed = found.result == "agrees" and within
    reason = f"evaluation and engine lie within {100 * gate.number:g} %"
    if not within:
        reason = f"evaluation and engine lie more than {100 * gate.number:g} % apart"
    elif not passed:
        reason = f"the certificate says that evaluation and engine: {found.result}"
    return GateRow(
        gate=name,
        candidate=found.engine_tau,
        champion=found.offline_tau,
        difference=found.relative_difference,
        verdict="pass" if passed else "fail",
        reason=reason,
    )


def _fresh_row(
    manifest: Manifest,
    entry: CertificateEntry,
    profile: ServingProfile,
    here: Mapping[str, Any] | None,
    gate: DaysGate,
    today: datetime.date,
) -> GateRow:
    """Is the entry about what the profile serves, and will it be for a while?"""
    name, end = f"certificate, {profile.name}", entry.holds_until
    assert end is not None  # of what was measured (CertificateEntry)
    left = (datetime.date.fromisoformat(end.date) - today).days
    # Without a fingerprint of the machine that serves, only what the profile itself demands can differ.
    found = [str(one) for one in differences(manifest, entry, profile, here or entry.fingerprint, today=today)]
    if entry.fingerprint.get("engine") != profile.engine:
        found.append(f"engine: certified {entry.fingerprint.get('engine')}, the profile's is {profile.engine}")
    else:
        found += profile_mistakes(profile, entry.fingerprint)
    if 0 <= left < gate.number:
        found.append(f"it holds until {end.date}, at least {gate.number} {gate.unit} are asked for")
    return GateRow(
        gate=name,
        candidate=float(left),
        verdict="fail" if found else "pass",
        reason=f"stale: {'; '.join(found)}" if found else f"holds until {end.date}",
    )


def _throughput_rows(
    entry: CertificateEntry, profile: ServingProfile, policy: GatePolicy, champion: str | None
) -> Iterator[GateRow]:
    """Tokens per second under what is recommended, at the points of the agreement, else at every load measured."""
    points = sorted({level.requests for level in profile.service_levels} or {one.concurrency for one in entry.load})
    for requests in points:
        name = f"throughput, {profile.name} at {requests}"
        speeds = {(one.concurrency, one.policy): one.tokens_per_second for one in entry.load}
        advised = next((one.policy for one in entry.recommended if _spans(one, requests)), None)
        if (requests, NONE) not in speeds or advised is None:
            reason = f"nothing was measured at {requests} concurrent requests: name it in certify_concurrency"
            yield GateRow(gate=name, verdict="fail", reason=reason)
            continue
        candidate = speeds[requests, advised]
        ratio, other, why = _ratio(entry, requests, advised, champion)
        if ratio is None:
            yield GateRow(gate=name, candidate=candidate, verdict="fail", reason=why)
            continue
        low, high = ratio.ci95
        difference = Measured(value=ratio.value - 1, n=ratio.n, ci95=(low - 1, high - 1))
        row = judged_row(name, candidate, other, difference, policy.throughput, each=requests, unit="timed requests")
        yield row.model_copy(update={"reason": f"{why}: {row.reason}"})


def _ratio(
    entry: CertificateEntry, requests: int, advised: str, champion: str | None
) -> tuple[Measured | None, Measured | None, str]:
    """Candidate against what serves now, the latter's speed, and what was compared or why nothing was."""
    speeds = {(one.concurrency, one.policy): one.tokens_per_second for one in entry.load}
    if champion is None:
        if advised == NONE:
            same = Measured(value=1.0, n=speeds[requests, NONE].n, ci95=(1.0, 1.0))
            return same, speeds[requests, NONE], "it recommends no speculation there, as there is none now"
        found = {(one.concurrency, one.policy): one.ratio for one in entry.against_none}
        return found.get((requests, advised)), speeds[requests, NONE], f"{advised} against no speculation"
    against = entry.against_champion
    if against is None or against.package_digest != champion:
        measured = "nothing" if against is None else against.package_digest[:12]
        what = f"the champion is {champion[:12]}, the throughput was measured against {measured}"
        engine = entry.fingerprint.get("engine")
        if against is None and engine != "reference":
            what += f" (this version lets two drafters take turns in the reference engine, not in {engine})"
        return None, None, what
    item = next((one for one in against.ratios if one.concurrency == requests), None)
    if item is None:
        return None, None, f"the champion was not measured at {requests} concurrent requests"
    theirs = {(one.concurrency, one.policy): one.tokens_per_second for one in against.load} | {
        (requests, NONE): speeds[requests, NONE]
    }
    what = f"{item.policy} against the champion's {item.champion_policy}"
    return item.ratio, theirs.get((requests, item.champion_policy)), what


def _spans(item: Any, requests: int) -> bool:
    return bool(item.from_concurrency <= requests <= item.to_concurrency)
