"""What a certificate's entry says of all its domains together, in their certified proportions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dspark.decoding.policies import Fixed
from dspark.decoding.records import RecordSet
from dspark.errors import DataError
from dspark.evaluation.dispersion import Z95, variance_of
from dspark.evaluation.entry import CertificateEntry
from dspark.evaluation.results import Acceptance
from dspark.measured import Measured


@dataclass(frozen=True)
class Certified:
    """Acceptance of the domains together.

    Attributes:
        tau: tokens per step.
        conditional: acceptance at each place, given the places before.
        marginal: survival up to each place.
        not_verified: drafts of a block that were not verified, on average, since a reply ended.
    """

    tau: Measured
    conditional: tuple[Measured, ...]
    marginal: tuple[float, ...]
    not_verified: float

    def lost_tokens(self, not_verified: float) -> float:
        """What a tau is lower by at most, in expectation, since so many drafts of a block were not verified.

        A reply's end has nothing to do with what would have been accepted, and confidences leave out what is accepted
        less. A block always has its first draft verified, and loses its last ones first: on average the lost ones are
        accepted no more often than places 2 to gamma are.
        """
        late = self.marginal[1:]
        return not_verified * sum(late) / len(late) if late else 0.0

    def lost_at(self, place: int, not_verified: float) -> float:
        """The same for acceptance at a place, counted from 0: a block that loses it loses all places behind it."""
        if place == 0 or place >= len(self.marginal) or not self.marginal[place - 1]:
            return 0.0
        return not_verified / (len(self.marginal) - place) * self.conditional[place].value


def certified_acceptance(
    entry: CertificateEntry, gamma: int, *, cut: bool, records: RecordSet | None = None
) -> Certified:
    """All domains of an entry together, by their shares of the steps.

    A certificate does not tell steps. Records of the same prompts do; without them replies are taken to be as long as
    each other, so that a prompt has steps in inverse proportion to its domain's tau.

    Args:
        gamma: drafts of a block.
        records: of single prompts.
        cut: whether the engine cuts a reply's last blocks.
    Raises:
        DataError: the entry has no acceptance.
    """
    domains = list(entry.acceptance.values())
    if not domains:
        raise DataError(f"the certificate's entry {entry.profile} has no acceptance", "certify again: dspark run")
    told = _steps(records, entry.acceptance) if records is not None else None
    steps = [
        one.tau.n * each for one, each in zip(domains, told or [1 / one.tau.value for one in domains], strict=True)
    ]
    shares = [count / sum(steps) for count in steps]
    tau = _pooled([one.tau for one in domains], shares)
    if entry.offline_vs_engine is not None:
        tau = entry.offline_vs_engine.engine_tau  # of these very prompts, pooled where their counts were known
    length = max(len(one.marginal) for one in domains)
    survival = [1.0, *(_mean([_at(one, place) for one in domains], shares) for place in range(length))]
    conditional = []
    for place in range(length):
        reaching = [
            (one.conditional[place], share * (_at(one, place - 1) if place else 1.0))
            for one, share in zip(domains, shares, strict=True)
            if place < len(one.conditional)
        ]
        whole = sum(weight for _, weight in reaching)
        if not whole:
            break
        conditional.append(_pooled([rate for rate, _ in reaching], [weight / whole for _, weight in reaching]))
    loads = [point for point in entry.load if point.policy == Fixed().name]
    first = min(loads, key=lambda point: point.concurrency, default=None)
    verified = first.verified_tokens_per_request if first is not None and cut else gamma
    return Certified(tau, tuple(conditional), tuple(survival[1:]), max(0.0, gamma - verified))


def _steps(records: RecordSet, domains: Iterable[str]) -> list[float] | None:
    """Mean steps of a prompt in each domain; None: a domain has none."""
    found = []
    for domain in domains:
        steps = [len(one.cycles) for one in records.of_domain(domain).decoded]
        if not sum(steps):
            return None
        found.append(sum(steps) / len(steps))
    return found


def _at(acceptance: Acceptance, place: int) -> float:
    return acceptance.marginal[place].value if place < len(acceptance.marginal) else 0.0


def _mean(values: list[float], shares: list[float]) -> float:
    return sum(value * share for value, share in zip(values, shares, strict=True))


def _pooled(numbers: list[Measured], shares: list[float]) -> Measured:
    """A mean of independent numbers, with the interval that follows from theirs."""
    value = _mean([number.value for number in numbers], shares)
    variance = sum(share**2 * variance_of(number) for number, share in zip(numbers, shares, strict=True))
    error = Z95 * math.sqrt(variance)
    return Measured(value=value, n=sum(number.n for number in numbers), ci95=(value - error, value + error))
