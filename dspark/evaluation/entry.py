"""One entry of a certificate: what was measured in one engine, on exactly what, and until when it holds (package.md).

Models only; nothing heavy is imported, so that a serving machine can read a certificate.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from dspark.config.models import Digest, Name, Sampling, ServingProfile
from dspark.engines.agreement import AgreementReport
from dspark.evaluation.results import (
    Acceptance,
    CycleCost,
    Difference,
    LoadPoint,
    Model,
    Result,
)
from dspark.measured import Measured

Status = Literal["measured", "absent", "disagrees", "inconclusive"]
ENGINE_TEXTS = "texts of the engine with and without drafts"  # a method of checking losslessness


class Workload(Model):
    """What was decoded."""

    domains: tuple[str, ...]
    sampling: Sampling
    thinking_mode: Literal["none", "off", "on"]
    verification_rule: Literal["standard", "block"] = "standard"
    policy: str  # of `acceptance`
    prompts: int
    left_out: int = 0  # that would have been decoded, but do not fit into the engine with their reply
    max_new_tokens: int


class Agreement(Model):
    """The build's evaluation against the engine, on the same prompts with whole blocks verified."""

    result: Literal["agrees", "disagrees", "inconclusive"]
    tolerance: float  # of the relative difference of tau
    prompts: int
    offline_tau: Measured
    engine_tau: Measured
    relative_difference: Measured  # engine / offline - 1; interval paired over prompts
    equal_counters: int | None = None  # prompts with the very same counters; absent where engines count nothing


class LosslessSummary(Model):
    """How losslessness was checked, and with what result."""

    method: str
    result: Result
    n: int  # prompts, or enumerated cases
    drafts: int  # a check that saw none is inconclusive
    differences: tuple[Difference, ...] = ()  # the first of each text that differs from plain decoding's


class AgainstNone(Model):
    """Tokens per second of an arm against plain decoding; below 1 it is slower, and stands here all the same."""

    concurrency: int
    arm: str
    policy: str
    ratio: Measured


class ChampionRatio(Model):
    """Tokens per second of the candidate against the champion, each under what is recommended for it at that load.

    Both recommendations are chosen on one half of the rounds; the ratio is over all of them.
    """

    concurrency: int
    policy: str
    champion_policy: str
    ratio: Measured


class AgainstChampion(Model):
    """The package that took turns with the candidate in the same rounds."""

    package_digest: Digest
    load: tuple[LoadPoint, ...]  # of its arms
    ratios: tuple[ChampionRatio, ...]  # one per concurrency


class Recommendation(Model):
    """What to run at a number of concurrent requests: chosen on one half of the rounds, judged on the other."""

    from_concurrency: int
    to_concurrency: int
    policy: str  # `none`: switch speculation off
    gamma: int
    decided: bool = True  # False: too few rounds to tell what pays, so that `none` stands for want of knowledge
    reason: str
    # How much slower than the best arm it was on the judging half of the rounds; absent without such a half.
    behind_best: float | None = None


class HoldsUntil(Model):
    """When the entry ends: with another engine version, or after the date."""

    engine_version: str
    date: str  # ISO 8601


class CertificateEntry(Model):
    """`builds/<b>/certify/<profile>.json`, and an element of `certificate.json`."""

    schema_: Literal["dspark/certificate-entry/1"] = Field(default="dspark/certificate-entry/1", alias="schema")
    profile: Name
    status: Status
    reason: str | None = None  # why it is not `measured`
    fingerprint: dict[str, Any] = Field(default_factory=dict)
    measured_at: str | None = None  # ISO 8601, UTC
    workload: Workload | None = None
    acceptance: dict[str, Acceptance] = Field(default_factory=dict)  # by domain
    export: AgreementReport | None = None  # the engine's drafts at full precision, of engines with files of their own
    offline_vs_engine: Agreement | None = None
    lossless: LosslessSummary | None = None
    load: tuple[LoadPoint, ...] = ()
    against_none: tuple[AgainstNone, ...] = ()
    against_champion: AgainstChampion | None = None  # absent where the build names none, or another engine drafts
    # At the lowest concurrency, whole blocks verified; absent where the engine does not tell drafting from verifying.
    cycle: CycleCost | None = None
    recommended: tuple[Recommendation, ...] = ()
    holds_until: HoldsUntil | None = None

    @model_validator(mode="after")
    def _complete(self) -> CertificateEntry:
        if self.status != "measured" and not self.reason:
            raise ValueError(f"status {self.status} needs a reason")
        if self.status != "absent":
            needed = ("measured_at", "workload", "lossless", "holds_until")
            missing = [name for name in (*needed, "fingerprint", "acceptance", "load") if not getattr(self, name)]
            if missing:
                raise ValueError(f"an entry that was measured lacks {', '.join(missing)}")
        return self


def absent_entry(profile: ServingProfile, reason: str | None = None) -> CertificateEntry:
    """The entry of a profile that cannot be measured.

    Args:
        profile: with `access: none` its own reason is taken.
        reason: why; needed for a profile that could have been measured.
    """
    return CertificateEntry(profile=profile.name, status="absent", reason=reason or profile.reason)
