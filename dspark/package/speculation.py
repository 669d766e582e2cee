"""`speculation_profile.json`: what a capacity planner needs of a drafter, and nothing else.

Accepted lengths and acceptance rates per domain and temperature, and what to run from which load on. A summary: the
numbers are those of `evidence/evaluate/metrics.json` and of the certificate, which verification compares.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dspark.config.models import Digest, Name
from dspark.evaluation.results import EvaluationMetrics
from dspark.measured import Measured
from dspark.package.certificate import Certificate, Recommendation
from dspark.package.manifest import Part


class AcceptanceProfile(Part):
    """One domain at one temperature; rates are per draft position."""

    accept_length: Measured  # tokens per cycle, bonus included
    conditional_accept_rates: tuple[Measured, ...]  # given that the positions before were accepted
    marginal_accept_rates: tuple[Measured, ...]  # that a draft survives up to the position


class TemperatureProfile(Part):
    """One temperature of the target."""

    label: Literal["greedy_match", "sampled"]
    domains: dict[Name, AcceptanceProfile]
    mean_accept_length: Measured | None = None  # over the domains that were trained on


class SpeculationProfile(Part):
    """`dspark/speculation-profile/1`."""

    schema_: Literal["dspark/speculation-profile/1"] = Field(default="dspark/speculation-profile/1", alias="schema")
    subject: Digest  # the package_digest
    method: Literal["dspark"] = "dspark"
    num_speculative_tokens: int = Field(ge=1)
    includes_bonus: Literal[True] = True
    temperatures: dict[str, TemperatureProfile]
    recommended: dict[Name, tuple[Recommendation, ...]]  # by serving profile
    absent: dict[str, str] = Field(default_factory=dict)  # what could not be measured, and why


def speculation_profile(metrics: EvaluationMetrics, certificate: Certificate) -> SpeculationProfile:
    """The summary of an evaluation and a certificate."""
    return SpeculationProfile(
        subject=certificate.subject,
        num_speculative_tokens=metrics.gamma,
        temperatures={
            temperature: TemperatureProfile(
                label=found.label,
                domains={
                    name: AcceptanceProfile(
                        accept_length=domain.tau,
                        conditional_accept_rates=domain.conditional,
                        marginal_accept_rates=domain.marginal,
                    )
                    for name, domain in found.domains.items()
                },
                mean_accept_length=found.mean_of_domains.tau if found.mean_of_domains else None,
            )
            for temperature, found in metrics.temperatures.items()
        },
        recommended={entry.profile: entry.recommended for entry in certificate.entries if entry.recommended},
        absent=dict(metrics.absent),
    )
