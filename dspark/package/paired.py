"""What a package's paired comparison must agree with: the evaluation beside it and the certificate that rests on it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dspark.evaluation.paired import PairedPrompts, PairedReport
from dspark.evaluation.results import DomainMetrics, EvaluationMetrics
from dspark.package.certificate import Certificate


def paired_mistakes(paired: PairedReport | None, metrics: EvaluationMetrics, certificate: Certificate) -> Iterator[str]:
    """Every contradiction; a comparison of other prompts than those evaluated would say nothing about the drafter.

    Args:
        paired: None: the package was measured against nothing.
    """
    rivals = paired.rivals if paired is not None else ()
    compared = {entry.against_champion.package_digest for entry in certificate.entries if entry.against_champion}
    for digest in sorted(compared - {rival.package_digest for rival in rivals}):
        yield f"the certificate compares with {digest}, on whose prompts nothing is known"
    if paired is not None and paired.gamma != metrics.gamma:
        yield f"the comparison is of gamma {paired.gamma}, the evaluation of {metrics.gamma}"
    for rival in rivals:
        if rival.temperatures.keys() != metrics.temperatures.keys():
            yield f"{rival.package_digest} was compared at other temperatures than were evaluated"
            continue
        for temperature, prompts in rival.temperatures.items():
            found = metrics.temperatures[temperature].domains
            for domain in sorted({*found, *prompts.domains}):
                if not _same(prompts, domain, found.get(domain)):
                    yield f"{domain} at temperature {temperature}: the comparison counted other prompts or cycles"


def _same(prompts: PairedPrompts, domain: str, said: DomainMetrics | None) -> bool:
    """True if the candidate's counts are those that its tau was computed from; None: it had no cycle there."""
    (committed, cycles), _ = prompts.of_domain(domain)
    if said is None or not cycles.any():
        return said is None and not cycles.any()
    if (len(cycles), int(cycles.sum())) != (said.prompts, said.cycles):
        return False
    return math.isclose(committed.sum() / cycles.sum(), said.tau.value, rel_tol=1e-9)
