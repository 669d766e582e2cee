"""The numbers of the model card: acceptance, losslessness, speed, calibration, parity, good or bad."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dspark.calibration.results import CalibrationReport
from dspark.evaluation.entry import CertificateEntry
from dspark.evaluation.results import EvaluationMetrics, LosslessReport
from dspark.export.report import ParityReport
from dspark.package.certificate import Certificate
from dspark.report.markdown import measured, milliseconds, table, text


def acceptance(metrics: EvaluationMetrics) -> Iterator[str]:
    """tau and conditional acceptance, per temperature and domain."""
    yield (
        "tau is the number of tokens per cycle of the sequential decoding loop, the bonus token included, with the "
        "whole block verified; brackets are 95 % intervals over prompts."
    )
    rows = []
    for temperature, found in metrics.temperatures.items():
        label = text(f"{temperature} in {found.dtype}")
        for name, domain in found.domains.items():
            rates = " ".join(f"{rate.value:.2f}" for rate in domain.conditional)
            trained = "yes" if domain.role == "training" else "no"
            rows.append([label, text(name), trained, str(domain.prompts), measured(domain.tau), rates or "–"])
        if found.mean_of_domains is not None:
            mean = found.mean_of_domains
            rows.append([label, "**mean**", "yes", str(mean.tau.n), measured(mean.tau), ""])
    header = ["temperature", "domain", "trained on", "prompts", "tau", "acceptance per position, given those before"]
    yield table(header, rows)
    yield from _absences(metrics.absent)
    for temperature, found in metrics.temperatures.items():
        yield from _absences({f"temperature {temperature}, {key}": reason for key, reason in found.absent.items()})


def lossless(report: LosslessReport) -> Iterator[str]:
    """Both checks with what they rest on."""
    greedy, sampled = report.greedy, report.sampled
    yield f"Overall: **{report.result}**."
    yield (
        f"- Temperature 0: {greedy.result}. {greedy.tokens} tokens of {greedy.n} prompts ({greedy.drafts} drafts "
        f"verified, {greedy.drafts_accepted} accepted) scored in plain {greedy.dtype} passes: "
        f"{len(greedy.violations)} beyond epsilon = {greedy.epsilon:.2g}; {len(greedy.near_ties)} near-ties within it, "
        f"on {greedy.near_tie_prompts} prompts.\n"
        f"- Temperature {sampled.temperature:g}: {sampled.result}. The joint law of the first tokens, enumerated over "
        f"{len(sampled.cases)} small cases, differs from the target's by at most {sampled.largest_difference:.2g} "
        f"(tolerance {sampled.tolerance:.2g})."
    )


def speed(metrics: EvaluationMetrics, certificate: Certificate) -> Iterator[str]:
    """Tokens per second beside plain decoding, whatever the ratio is."""
    throughput = metrics.throughput
    if throughput is not None:
        yield (
            f"In the evaluation ({throughput.dtype}, {throughput.threads} thread(s), {throughput.rounds} interleaved "
            f"rounds over {throughput.prompts} prompts, temperature {throughput.temperature:g}); a ratio below 1 is "
            "slower than no speculation:"
        )
        rows = [
            [
                text(name),
                str(arm.load.concurrency),
                measured(arm.load.tokens_per_second, 1),
                measured(arm.against_none, 2),
                milliseconds(arm.cycle.draft_seconds.value),
                milliseconds(arm.cycle.verify_seconds.value),
                milliseconds(arm.cycle.latency_per_token_predicted_seconds),
                milliseconds(arm.cycle.latency_per_token_measured_seconds),
            ]
            for name, arm in throughput.arms.items()
            if arm.cycle is not None  # the reference engine always tells
        ]
        header = ["arm", "requests", "tokens/s", "ratio to none", "draft", "verify", "per token predicted", "measured"]
        yield table(header, rows)
    for entry in certificate.entries:
        if entry.load:
            yield f"Serving profile {text(entry.profile)}:"
            yield _load_table(entry)


def _load_table(entry: CertificateEntry) -> str:
    ratios = {(item.concurrency, item.arm): item.ratio for item in entry.against_none}
    rows = [
        [
            str(point.concurrency),
            text(point.arm),
            measured(point.tokens_per_second, 1),
            measured(ratios.get((point.concurrency, point.arm)), 2),
            measured(point.tokens_per_second_per_user, 1),
            f"{point.verified_tokens_per_request:.2f}",
            " / ".join(milliseconds(value) for value in (point.itl_seconds.p50, point.itl_seconds.p99)),
        ]
        for point in entry.load
    ]
    header = [
        "requests",
        "arm",
        "tokens/s",
        "ratio to none",
        "tokens/s per user",
        "verified per request",
        "itl p50 / p99",
    ]
    return table(header, rows)


def confidence(report: CalibrationReport, metrics: EvaluationMetrics) -> Iterator[str]:
    """Calibration error before and after, on held-out records and on the evaluation's."""
    if report.absent is not None:
        yield f"Nothing was calibrated: {text(report.absent)}. Whole blocks, or fixed parts of them, are verified."
        return
    yield (
        "Expected calibration error of prefix survival, before and after the temperatures; on conversations that they "
        "were not fitted on, and on the evaluation's prompts."
    )
    rows = []
    for result in report.results:
        held_out = result.held_out
        key = f"calibration, {result.key}"
        rows.append([text(key), measured(held_out.mean_ece_before, 4), measured(held_out.mean_ece_after, 4)])
    for temperature, found in metrics.temperatures.items():
        if found.confidence is not None:
            before, after = found.confidence.mean_ece_before, found.confidence.mean_ece_after
            rows.append([text(f"evaluation, temperature {temperature}"), measured(before, 4), measured(after, 4)])
    yield table(["records", "before", "after"], rows)
    for result in report.results:
        temperatures = ", ".join(f"{value:.3g}" for value in result.temperatures)
        yield f"Temperatures for {text(result.key)}: {text(temperatures)}."
        yield from _list(text(warning) for warning in result.warnings)


def parity(report: ParityReport) -> Iterator[str]:
    """Each dialect against torch, and the faults that the comparison must notice."""
    probes = report.probes
    yield (
        f"Each dialect drafted {probes.blocks} blocks of real contexts of {probes.shortest_context} to "
        f"{probes.longest_context} tokens and was compared token by token; drafters with a known fault must differ."
    )
    rows = [
        [
            text(name),
            item.verdict,
            f"{item.differing_blocks} of {item.blocks}",
            str(item.near_ties),
            f"{item.max_confidence_difference:.2g}",
        ]
        for name, item in [*report.dialects.items(), *((f"fault: {k}", v) for k, v in report.negative_controls.items())]
    ]
    yield table(["dialect", "verdict", "blocks that differ", "near-ties", "largest confidence difference"], rows)


def _absences(absent: dict[str, str]) -> Iterator[str]:
    yield from _list(f"not measured: {text(name)} ({text(reason)})" for name, reason in absent.items())


def _list(items: Iterable[str]) -> Iterator[str]:
    """One list of all items, nothing if there are none."""
    lines = [f"- {item}" for item in items]
    if lines:
        yield "\n".join(lines)
