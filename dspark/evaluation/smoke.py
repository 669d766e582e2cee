"""Twenty prompts after a rollout: does a server draft as its certificate says, and answer as fast? numpy only.

The prompts were evaluated before, so that each is compared with itself: what is left to chance is small, and few will
do. A server that drafts something else, slowly or not at all, is what this is for; small losses are `dspark drift`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np
from pydantic import Field

from dspark.corpus.prompts import PreparedPrompt
from dspark.decoding.policies import Fixed
from dspark.decoding.records import RecordSet
from dspark.engines.client import Client, Streamed
from dspark.engines.counters import Counters
from dspark.evaluation.agreement import compare_taus
from dspark.evaluation.certified import certified_acceptance
from dspark.evaluation.drift import WHOLE
from dspark.evaluation.entry import Agreement, CertificateEntry
from dspark.evaluation.paired import Counts
from dspark.evaluation.results import LoadPoint, Model

TOLERANCE = 0.05  # relative loss of tau; near-ties and number formats stay below half of it
SLOWER = 2.0  # times the certified time: a machine's load moves it by a third, a wrong device or a debug build by tens
TIMED = 5  # prompts whose tokens are timed, in a second pass


@dataclass(frozen=True)
class Answered:
    """What a server did with the prompts.

    Attributes:
        counters: of each prompt.
        shortened: whether a scheduler chose how much was verified.
        streams: of the prompts that were timed.
    """

    counters: tuple[Counters, ...]
    shortened: bool
    streams: tuple[Streamed, ...]


class Latency(Model):
    """A time against the certified one, both one request at a time."""

    seconds: float
    certified_seconds: float

    @property
    def slow(self) -> bool:
        """Whether it is beyond the limit."""
        return self.seconds > SLOWER * self.certified_seconds


class Smoke(Model):
    """The result, before anything is said of package and server."""

    verdict: Literal["healthy", "unhealthy", "not comparable"]
    reasons: tuple[str, ...]  # why it is not healthy
    prompts: int
    compared_with: Literal["records", "domains"]  # the prompts' own records, or their domains' certified tau
    tau: Agreement | None = None  # `offline` is what is expected
    first_token: Latency | None = None
    between_tokens: Latency | None = None
    absent: dict[str, str] = Field(default_factory=dict)


def ask(client: Client, prompts: Sequence[PreparedPrompt], max_new_tokens: int) -> Answered:
    """Ask for all prompts, one after the other, and time some of them again.

    Raises:
        DataError: a prompt does not fit.
        ServiceError: the server does not answer.
    """
    replies = [client.complete(one.token_ids, max_new_tokens) for one in prompts]
    streams = tuple(client.stream(one.token_ids, max_new_tokens) for one in prompts[:TIMED])
    return Answered(tuple(one.counters for one in replies), any(one.shortened for one in replies), streams)


def judge_smoke(
    answered: Answered,
    prompts: Sequence[PreparedPrompt],
    entry: CertificateEntry,
    gamma: int,
    *,
    engine: str,
    records: RecordSet | None,
) -> Smoke:
    """Whether a server is what was certified.

    Args:
        prompts: as they were asked.
        entry: of the certificate.
        engine: a key of `connect.CLIENTS`.
        records: of the same prompts with the entry's length limit; None: their domains have to do.
    """
    steps = sum(one.steps for one in answered.counters)
    drafted = sum(one.drafted for one in answered.counters)
    compared: Literal["records", "domains"] = "domains" if records is None else "records"
    why = None
    if not steps:
        why = "speculation is off: the server verified no block"
    elif answered.shortened or drafted < WHOLE.get(engine, 1.0) * gamma * steps:
        why = f"the server verified {drafted / steps:.2f} of {gamma} drafts in a step, certified were whole blocks"
    if why is not None:
        return Smoke(verdict="not comparable", reasons=(why,), prompts=len(prompts), compared_with=compared)
    sides, slack = _sides(answered, prompts, entry, gamma, records)
    tau = compare_taus(*sides, tolerance=TOLERANCE + slack)
    first, between, absent = _latencies(answered.streams, entry)
    reasons = []
    if tau.relative_difference.ci95[1] < -tau.tolerance:
        reasons.append(
            f"tau is {tau.engine_tau.value:.3f}, expected on these prompts is {tau.offline_tau.value:.3f}: surely "
            f"lower by more than {tau.tolerance:.1%}"
        )
    for name, latency in (("to the first token", first), ("from token to token", between)):
        if latency is not None and latency.slow:
            reasons.append(
                f"the time {name} is {latency.seconds:.3g} s, more than {SLOWER:g} times the certified "
                f"{latency.certified_seconds:.3g} s"
            )
    return Smoke(
        verdict="unhealthy" if reasons else "healthy",
        reasons=tuple(reasons),
        prompts=len(prompts),
        compared_with=compared,
        tau=tau,
        first_token=first,
        between_tokens=between,
        absent=absent,
    )


def _sides(
    answered: Answered,
    prompts: Sequence[PreparedPrompt],
    entry: CertificateEntry,
    gamma: int,
    records: RecordSet | None,
) -> tuple[tuple[Counts, Counts], float]:
    """Tokens and steps of each prompt, expected and counted, and by how much more they may differ, relatively.

    Engines cut a reply's last blocks, the loop's records do not; a domain's tau has an error of its own.
    """
    certified = certified_acceptance(entry, gamma, cut=False)
    steps = np.array([one.steps for one in answered.counters], float)
    counted = (steps + np.array([one.accepted for one in answered.counters], float), steps)
    lost = certified.lost_tokens(max(0.0, gamma - sum(one.drafted for one in answered.counters) / steps.sum()))
    slack = lost / certified.tau.value
    if records is not None:
        cycles = {name: one.cycles for name, one in zip(records.ids, records.decoded, strict=True)}
        own = [cycles[one.id] for one in prompts]
        expected = (np.array([one.committed.sum() for one in own], float), np.array([len(one) for one in own], float))
        return (expected, counted), slack
    taus = [entry.acceptance[one.domain].tau if one.domain in entry.acceptance else certified.tau for one in prompts]
    errors = [(tau.ci95[1] - tau.ci95[0]) / 2 / tau.value for tau in taus]
    return ((np.array([tau.value for tau in taus]) * steps, steps), counted), slack + sum(errors) / len(errors)


def _latencies(
    streams: Sequence[Streamed], entry: CertificateEntry
) -> tuple[Latency | None, Latency | None, dict[str, str]]:
    """Medians of the timed replies. First tokens are held against the slow ones: prompts differ in length."""
    load = _load(entry)
    told = [one for one in streams if len(one.seconds) > 1]
    if load is None or not told:
        reason = "no load of one request was certified" if load is None else "the replies have no two tokens"
        return None, None, dict.fromkeys(("first_token", "between_tokens"), reason)
    first = Latency(seconds=median(one.seconds[0] for one in told), certified_seconds=load.ttft_seconds.p95)
    gaps = [(one.seconds[-1] - one.seconds[0]) / (len(one.seconds) - 1) for one in told]
    between = Latency(seconds=median(gaps), certified_seconds=1 / load.tokens_per_second_per_user.value)
    return first, between, {}


def _load(entry: CertificateEntry) -> LoadPoint | None:
    """Whole blocks, one request at a time."""
    fitting = [point for point in entry.load if point.policy == Fixed().name and point.concurrency == 1]
    return next(iter(fitting), None)


def records_for(records: RecordSet | None, prompts: Sequence[PreparedPrompt]) -> RecordSet | None:
    """The records, if every prompt is among them and was drafted for."""
    if records is None:
        return None
    known = {name: len(one.cycles) for name, one in zip(records.ids, records.decoded, strict=True)}
    return records if all(known.get(one.id) for one in prompts) else None
