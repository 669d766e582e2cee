"""`certificate.json`: the entries of all serving profiles, what each engine got, and the rules that make them credible.

The entries are measured elsewhere (`evaluation`); whoever reads a certificate can check here that nothing in it
contradicts anything else (package.md, "certificate.json"). What needs a judgement about numbers is a gate's business.
"""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Iterator
from typing import Literal

from pydantic import Field, model_validator

from dspark.config.models import Digest, Name
from dspark.evaluation.entry import CertificateEntry, Recommendation
from dspark.evaluation.results import Acceptance, Percentiles
from dspark.measured import Measured
from dspark.package.manifest import Part, Text

__all__ = ["Certificate", "CertificateEntry", "EngineFiles", "Recommendation"]

NONE = "none"  # the arm of plain decoding


class EngineFiles(Part):
    """Whether the package holds files for an engine; if not, why."""

    engine: Name
    status: Literal["written", "absent"]
    reason: Text | None = None

    @model_validator(mode="after")
    def _absent_has_a_reason(self) -> EngineFiles:
        if (self.status == "absent") != (self.reason is not None):
            raise ValueError("an engine has either files or a reason for having none")
        return self


class Certificate(Part):
    """`dspark/certificate/1`."""

    schema_: Literal["dspark/certificate/1"] = Field(default="dspark/certificate/1", alias="schema")
    subject: Digest  # the package_digest
    gamma: int = Field(ge=1)
    entries: tuple[CertificateEntry, ...]  # by serving profile
    engines: tuple[EngineFiles, ...]

    @model_validator(mode="after")
    def _credible(self) -> Certificate:
        for names in ([entry.profile for entry in self.entries], [item.engine for item in self.engines]):
            if names != sorted(set(names)):
                raise ValueError("entries and engines are not sorted by name, each once")
        for entry in self.entries:
            mistake = next(_mistakes(entry, self.gamma), None)
            if mistake:
                raise ValueError(f"entry {entry.profile}: {mistake}")
        return self


def _mistakes(entry: CertificateEntry, gamma: int) -> Iterator[str]:
    """What a reader must not believe of an entry."""
    if entry.status == "absent":
        compared = entry.against_none or entry.against_champion or entry.recommended
        if entry.measured_at or entry.acceptance or entry.load or compared:
            yield "is absent and has measurements all the same"
        return
    yield from _lossless_mistakes(entry)
    yield from _status_mistakes(entry)
    for domain, acceptance in entry.acceptance.items():
        yield from (f"{domain}: {mistake}" for mistake in _acceptance_mistakes(acceptance, gamma))
    yield from _load_mistakes(entry)
    yield from _champion_mistakes(entry)
    yield from _recommendation_mistakes(entry, gamma)


def _lossless_mistakes(entry: CertificateEntry) -> Iterator[str]:
    lossless = entry.lossless
    if lossless and (lossless.drafts == 0 or lossless.n == 0) and lossless.result == "pass":
        yield "a lossless check that saw no draft is inconclusive, not passed"


def _status_mistakes(entry: CertificateEntry) -> Iterator[str]:
    agreement, lossless, end = entry.offline_vs_engine, entry.lossless, entry.holds_until
    if entry.status == "measured":
        if agreement is None or agreement.result != "agrees":
            yield "counts as measured, but evaluation and engine were not shown to agree"
        if lossless is None or lossless.result == "inconclusive":
            yield "counts as measured, but losslessness was not shown either way"
    if agreement is not None:
        within = abs(agreement.relative_difference.value) <= agreement.tolerance
        if agreement.result == "agrees" and not within:
            yield "evaluation and engine are said to agree beyond the tolerance"
        if agreement.result == "disagrees" and entry.status != "disagrees":
            yield f"evaluation and engine disagree, but its status is {entry.status}"
    if end is not None:
        if entry.measured_at is not None and _day(end.date) < _day(entry.measured_at):
            yield "ends before it was measured"
        if str(entry.fingerprint.get("engine_version")) != end.engine_version:
            yield "holds for another engine version than it was measured on"


def _acceptance_mistakes(acceptance: Acceptance, gamma: int) -> Iterator[str]:
    if not 1 <= acceptance.tau.value <= gamma + 1:
        yield f"tau {acceptance.tau.value:g} lies outside 1 to {gamma + 1}"
    if max(len(acceptance.conditional), len(acceptance.marginal)) > gamma:
        yield f"acceptance of more than {gamma} positions"
    for rate in (*acceptance.conditional, *acceptance.marginal):
        if not 0 <= rate.value <= 1:
            yield f"{rate.value:g} is not a rate"
    values = [rate.value for rate in acceptance.marginal]
    if any(after > before + 1e-9 for before, after in itertools.pairwise(values)):
        yield "survival rises along the block"
    yield from _interval_mistakes(acceptance.tau, *acceptance.conditional, *acceptance.marginal)


def _load_mistakes(entry: CertificateEntry) -> Iterator[str]:
    loads = [(point.concurrency, point.arm) for point in entry.load]
    ratios = [(item.concurrency, item.arm) for item in entry.against_none]
    if len(set(loads)) != len(loads) or len(set(ratios)) != len(ratios):
        yield "an arm was measured twice at one concurrency"
    # A ratio below 1 is printed, not hidden: whatever was run has its ratio.
    drafting = {(concurrency, arm) for concurrency, arm in loads if arm != NONE}
    if drafting != set(ratios):
        yield "not every arm has its ratio against plain decoding"
    if {concurrency for concurrency, _ in drafting} - {concurrency for concurrency, arm in loads if arm == NONE}:
        yield "an arm has no plain decoding beside it"
    for point in entry.load:
        yield from _latency_mistakes(point.ttft_seconds)
        yield from _latency_mistakes(point.itl_seconds)
        yield from _interval_mistakes(point.tokens_per_second, point.tokens_per_second_per_user)
    for item in entry.against_none:
        yield from _interval_mistakes(item.ratio)
        if item.ratio.value <= 0:
            yield "a ratio of speeds is not positive"
    if entry.cycle is not None:
        cycle = entry.cycle
        predicted = (cycle.draft_seconds.value + cycle.verify_seconds.value) / cycle.tau if cycle.tau > 0 else math.nan
        if not math.isclose(predicted, cycle.latency_per_token_predicted_seconds, rel_tol=1e-6):
            yield "the predicted latency is not (T_draft + T_verify) / tau"


def _champion_mistakes(entry: CertificateEntry) -> Iterator[str]:
    champion = entry.against_champion
    if champion is None:
        return
    loads = sorted({point.concurrency for point in entry.load})
    if [item.concurrency for item in champion.ratios] != loads:
        yield "the champion was not compared at every load, once each"
    for item in champion.ratios:
        advised = [one.policy for one in entry.recommended if _spans(one, item.concurrency)]
        if advised != [item.policy]:
            yield f"was compared with the champion under {item.policy}, which is not what it recommends there"
        measured = {point.policy for point in champion.load if point.concurrency == item.concurrency}
        if item.champion_policy not in {NONE, *measured}:
            yield f"was compared with the champion's {item.champion_policy}, which was not measured"
        yield from _interval_mistakes(item.ratio)
        if item.ratio.value <= 0:
            yield "a ratio of speeds is not positive"
    yield from _interval_mistakes(*(point.tokens_per_second for point in champion.load))


def _recommendation_mistakes(entry: CertificateEntry, gamma: int) -> Iterator[str]:
    last = 0
    for item in entry.recommended:
        if not last < item.from_concurrency <= item.to_concurrency:
            yield "recommendations overlap, run backwards or start below 1"
        if item.gamma != gamma:
            yield f"recommends gamma {item.gamma}, the drafter's is {gamma}"
        if item.policy != NONE and not any(_covers(item, point.concurrency, point.policy) for point in entry.load):
            yield f"recommends {item.policy}, which was not measured there"
        last = item.to_concurrency


def _covers(item: Recommendation, concurrency: int, policy: str) -> bool:
    return _spans(item, concurrency) and item.policy == policy


def _spans(item: Recommendation, concurrency: int) -> bool:
    return item.from_concurrency <= concurrency <= item.to_concurrency


def _latency_mistakes(latency: Percentiles) -> Iterator[str]:
    if not 0 <= latency.p50 <= latency.p95 <= latency.p99:
        yield "percentiles of a latency fall"


def _interval_mistakes(*numbers: Measured) -> Iterator[str]:
    for number in numbers:
        if number.n < 1 or number.ci95[0] > number.ci95[1]:
            yield f"{number} rests on nothing or its interval runs backwards"


def _day(moment: str) -> datetime.date:
    return datetime.datetime.fromisoformat(moment).date()
