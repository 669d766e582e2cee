"""The gates about the drafter itself: tau per domain, calibration, losslessness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dspark.config.gates import DraftsGate, ErrorGate, GainGate, GatePolicy, LossGate
from dspark.evaluation.paired import Judgement, PairedReport, Rival, judge_gain, judge_loss, relative_difference, tau_of
from dspark.evaluation.results import EvaluationMetrics, LosslessReport
from dspark.measured import Measured
from dspark.package.certificate import Certificate
from dspark.package.manifest import Manifest
from dspark.registry.gate_report import GateRow


@dataclass(frozen=True)
class Evidence:
    """What a verified package holds that gates read."""

    manifest: Manifest
    metrics: EvaluationMetrics
    lossless: LosslessReport | None
    certificate: Certificate
    paired: PairedReport | None


def tau_rows(evidence: Evidence, policy: GatePolicy, rival: str | None, *, baseline: bool = False) -> list[GateRow]:
    """tau of every domain that is evaluated or that the rival was trained on, at every temperature.

    Args:
        rival: package_digest of the champion or the baseline; None: no speculation.
        baseline: which of the two it is.
    """
    prefix = "baseline tau" if baseline else "tau"
    if rival is None:
        return list(_against_nothing(evidence, policy))
    found = evidence.paired.rival(rival) if evidence.paired is not None else None
    if found is None:
        return [_not_measured(evidence, rival, prefix, "the pinned baseline" if baseline else "the champion")]
    return list(_against(evidence, policy, found, prefix, policy.baseline if baseline else policy.tau))


def ece_rows(evidence: Evidence, gate: ErrorGate) -> Iterator[GateRow]:
    """The calibrated confidences on the eval split, which no temperature was fitted on.

    Without a confidence head nothing is scheduled by confidences, and there are none that could be wrong.
    """
    if not evidence.manifest.drafter.confidence.enabled:
        yield GateRow(gate="calibration", verdict="pass", reason="the drafter states no confidences: there is no head")
        return
    for temperature, metrics in sorted(evidence.metrics.temperatures.items()):
        name = f"calibration, temperature {temperature}"
        error = metrics.confidence.mean_ece_after if metrics.confidence is not None else None
        if error is None:
            why = metrics.absent.get("confidence", "no block reached a position whose outcome is known")
            yield GateRow(gate=name, verdict="fail", reason=f"calibration was not measured: {why}")
            continue
        passed = error.value <= gate.number
        yield GateRow(
            gate=name,
            candidate=error,
            verdict="pass" if passed else "fail",
            reason=f"the {gate.unit} is {'at most' if passed else 'above'} {gate.number:g}",
        )


def lossless_row(report: LosslessReport | None, gate: DraftsGate) -> GateRow:
    """The evaluation's own check of the loop, token by token and draw by draw."""
    if report is None:
        return GateRow(gate="lossless", verdict="fail", reason="the package holds no check of losslessness")
    return drafts_row("lossless", report.result, report.greedy.drafts, gate)


def drafts_row(name: str, result: str, drafts: int, gate: DraftsGate) -> GateRow:
    """A check of losslessness: its result, and whether it saw enough drafts to mean something."""
    if result != "pass":
        reason = f"the check's result is {result}"
    elif drafts < gate.number:
        reason = f"the check saw {drafts} {gate.unit}, at least {gate.number} are asked for"
    else:
        return GateRow(gate=name, candidate=float(drafts), verdict="pass", reason=f"passed on {drafts} {gate.unit}")
    return GateRow(gate=name, candidate=float(drafts), verdict="fail", reason=reason)


def judged_row(
    name: str,
    candidate: Measured | None,
    champion: Measured | float | None,
    difference: Measured,
    gate: LossGate | GainGate,
    *,
    each: int = 1,
    unit: str = "prompts",
) -> GateRow:
    """A row about a relative difference, in words.

    Args:
        difference: n counts independent units.
        each: how many of what `unit` names stand behind one of them.
    """
    judge = judge_loss if isinstance(gate, LossGate) else judge_gain
    judgement = judge(difference, gate.number)
    needed = each * judgement.prompts_needed if judgement.prompts_needed is not None else None
    return GateRow(
        gate=name,
        candidate=candidate,
        champion=champion,
        difference=difference,
        verdict=judgement.verdict,
        prompts_needed=needed,
        reason=_reason(judgement, gate, f"{each * difference.n} {unit}", needed),
    )


def _against(evidence: Evidence, policy: GatePolicy, rival: Rival, prefix: str, loss: LossGate) -> Iterator[GateRow]:
    corpus = evidence.manifest.inputs.corpus
    domains = {*corpus.domains, *corpus.evaluation_domains, *rival.training_domains}
    for temperature in sorted(evidence.metrics.temperatures):
        for domain in sorted(domains):
            new = domain in corpus.domains and domain not in rival.training_domains
            name = f"{prefix} {domain}{' (new)' if new else ''}, temperature {temperature}"
            mine, theirs = rival.temperatures[temperature].of_domain(domain)
            candidate, other = tau_of(mine), tau_of(theirs)
            difference = relative_difference(mine, theirs)
            if difference is None:
                what = "no prompt of it was decoded" if not len(mine[0]) else "a side had no cycle on its prompts"
                yield GateRow(gate=name, candidate=candidate, champion=other, verdict="fail", reason=what)
            else:
                few = _too_few(name, candidate, other, difference, policy)
                yield few or judged_row(name, candidate, other, difference, policy.new_domain if new else loss)


def _against_nothing(evidence: Evidence, policy: GatePolicy) -> Iterator[GateRow]:
    """The first promotion: without speculation every cycle commits one token, and every domain is new."""
    corpus = evidence.manifest.inputs.corpus
    for temperature, metrics in sorted(evidence.metrics.temperatures.items()):
        for domain in sorted({*corpus.domains, *corpus.evaluation_domains}):
            name = f"tau {domain} (new), temperature {temperature}"
            if domain not in metrics.domains:
                why = metrics.absent.get(domain, "no prompt of it was decoded")
                yield GateRow(gate=name, champion=1.0, verdict="fail", reason=why)
                continue
            tau = metrics.domains[domain].tau
            gain = Measured(value=tau.value - 1, n=tau.n, ci95=(tau.ci95[0] - 1, tau.ci95[1] - 1))
            few = _too_few(name, tau, 1.0, gain, policy)
            yield few or judged_row(name, tau, 1.0, gain, policy.new_domain)


def _too_few(
    name: str, candidate: Measured | None, champion: Measured | float | None, difference: Measured, policy: GatePolicy
) -> GateRow | None:
    """An undecided row where the interval rests on too few prompts to be one."""
    needed = policy.prompts.number
    if difference.n >= needed:
        return None
    return GateRow(
        gate=name,
        candidate=candidate,
        champion=champion,
        difference=difference,
        verdict="undecided",
        prompts_needed=needed,
        reason=f"measured on {difference.n} prompts, at least {needed} are asked for",
    )


def _not_measured(evidence: Evidence, rival: str, name: str, word: str) -> GateRow:
    rivals: Sequence[Rival] = evidence.paired.rivals if evidence.paired is not None else ()
    measured = ", ".join(one.package_digest[:12] for one in rivals) or "nothing"
    again = f"dspark run --build {evidence.manifest.build}"
    if word == "the champion":
        again += f" --set against={rival}"
    return GateRow(
        gate=name,
        verdict="fail",
        reason=f"{word} is {rival[:12]}, the package was measured against {measured}: {again}",
    )


def _reason(judgement: Judgement, gate: LossGate | GainGate, measured: str, needed: int | None) -> str:
    asked = f"{100 * gate.number:g} %"
    match judgement.verdict:
        case "non-inferior":
            return f"surely no {gate.unit} of {asked}"
        case "better":
            return f"surely a gain, and at least the {asked} asked for"
        case "fail":
            return f"surely below the {gate.unit} of {asked} asked for"
        case "worse":
            return "surely a loss" if isinstance(gate, GainGate) else f"surely a {gate.unit} above {asked}"
    more = f"about {needed} would decide" if needed is not None else "it lies on the very limit"
    return f"{measured} neither show nor exclude a {gate.unit} of {asked}; {more}"
