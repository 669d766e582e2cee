"""What was certified in each engine, and what that rests on."""

from __future__ import annotations

from collections.abc import Iterator

from dspark.evaluation.entry import AgainstChampion, CertificateEntry
from dspark.evaluation.results import CycleCost, LoadPoint, Percentiles, ThroughputReport
from dspark.measured import Measured
from dspark.package.certificate import NONE
from dspark.report.page.charts import charts
from dspark.report.page.evidence import Evidence
from dspark.report.page.model import Block, Code, Facts, Group, Missing, Paragraph, Plain, Section, Table
from dspark.report.verdict import Span, spans
from dspark.report.words import NOTHING, count, interval, leaves, milliseconds

STATUS = {
    "measured": "measured in the engine itself",
    "absent": "not measured",
    "disagrees": "evaluation and engine disagree: do not rely on it",
    "inconclusive": "inconclusive",
}
_LOAD = ("requests", "arm", "tokens/s", "n", "times plain decoding", "n", "tokens/s of one user", "drafts verified",
         "first token ms, p50 / p95 / p99", "between tokens ms, p50 / p95 / p99")  # fmt: skip
_RATIOS = (
    "Arms took turns in the same rounds. A ratio below 1 is slower than plain decoding; drafts verified are per "
    "request and cycle. Brackets are 95 % intervals."
)


def certificates(evidence: Evidence) -> Section:
    """A group for each serving profile."""
    groups = [
        Group(f"{entry.profile}: {STATUS[entry.status]}", tuple(_entry(entry))) for entry in evidence.entries.values()
    ]
    missing = [Missing(name, reason) for name, reason in evidence.absent.items() if name.startswith("certificate of ")]
    blocks: list[Block] = [*groups, *missing]
    if not blocks:
        blocks.append(Missing("certificates", "no serving profile is declared"))
    return Section("serving", "Where it pays, and where not", tuple(blocks))


def speed(evidence: Evidence) -> Section:
    """Throughput against latency, the budget, the cost of a step."""
    blocks: list[Block] = [*charts(evidence.drawn, "pareto", "budget", "load")]
    throughput = evidence.metrics.throughput if evidence.metrics is not None else None
    if throughput is not None:
        blocks.append(_throughput(throughput))
    else:
        reason = evidence.metrics.absent.get("throughput") if evidence.metrics is not None else None
        blocks.append(
            Missing("throughput of the evaluation", reason or evidence.absent.get("evaluation", "not measured"))
        )
    blocks += charts(evidence.drawn, "cost")
    return Section("speed", "Speed", tuple(blocks))


def _entry(entry: CertificateEntry) -> Iterator[Plain]:
    if entry.reason:
        yield Paragraph(f"{entry.reason}.")
    if entry.status == "absent":
        return
    if entry.recommended:
        yield _recommendations(entry)
    else:
        yield Missing("recommendation", "nothing was shown to pay: leave speculation off until it was measured")
    yield _loads(entry)
    if entry.against_champion is not None:
        yield _champion(entry.against_champion)
    yield _acceptance(entry)
    yield Facts(tuple(_facts(entry)))


def _recommendations(entry: CertificateEntry) -> Table:
    rows = []
    for span in spans(entry):
        ratios = ", ".join(f"{interval(one.ratio, 2)} at {one.concurrency} (n = {one.ratio.n})" for one in span.ratios)
        reasons = "; ".join(
            f"{item.reason} at {item.from_concurrency}"
            for item in entry.recommended
            if span.first <= item.from_concurrency <= span.last
        )
        rows.append((span.requests, _policy(span), ratios or NOTHING, reasons))
    return Table(
        "What to run at which load",
        ("load", "policy", "times plain decoding, all rounds", "judged on rounds that had no part in the choice"),
        tuple(rows),
    )


def _policy(span: Span) -> str:
    if span.policy != NONE:
        return span.policy
    return "none: switch speculation off" if span.decided else "none: too few rounds to tell"


def _loads(entry: CertificateEntry) -> Table:
    ratios = {(one.concurrency, one.arm): one.ratio for one in entry.against_none}
    rows = tuple(_load(point, ratios.get((point.concurrency, point.arm))) for point in entry.load)
    return Table("Under load", _LOAD, rows, _RATIOS)


def _load(point: LoadPoint, ratio: Measured | None) -> tuple[str, ...]:
    return (
        str(point.concurrency),
        point.arm,
        interval(point.tokens_per_second, 1),
        count(point.tokens_per_second),
        interval(ratio, 2),
        count(ratio),
        interval(point.tokens_per_second_per_user, 1),
        f"{point.verified_tokens_per_request:.2f}",
        _percentiles(point.ttft_seconds),
        _percentiles(point.itl_seconds),
    )


def _percentiles(latency: Percentiles) -> str:
    return " / ".join(f"{1000 * seconds:.1f}" for seconds in (latency.p50, latency.p95, latency.p99))


def _champion(champion: AgainstChampion) -> Table:
    rows = tuple(
        (str(one.concurrency), one.policy, one.champion_policy, interval(one.ratio), count(one.ratio))
        for one in champion.ratios
    )
    return Table(
        f"Tokens/s against package {champion.package_digest[:12]}, in the same rounds",
        ("requests", "policy", "its policy", "ratio", "n"),
        rows,
    )


def _acceptance(entry: CertificateEntry) -> Table:
    rows = tuple((name, interval(found.tau), count(found.tau)) for name, found in entry.acceptance.items())
    return Table("Tokens per cycle in the engine", ("domain", "tau", "n"), rows)


def _facts(entry: CertificateEntry) -> Iterator[tuple[str, str | Code]]:
    agreement, lossless, load = entry.offline_vs_engine, entry.lossless, entry.workload
    if agreement is not None:
        yield (
            "evaluation against engine",
            f"{agreement.result}: tau {interval(agreement.offline_tau)} offline, {interval(agreement.engine_tau)} in "
            f"the engine on {agreement.prompts} prompts, {interval(agreement.relative_difference)} apart; up to "
            f"{agreement.tolerance:g} counts as agreement",
        )
        if agreement.equal_counters is not None:
            yield "equal counters", f"on {agreement.equal_counters} of {agreement.prompts} prompts"
    if lossless is not None:
        yield "losslessness", f"{lossless.result}: {lossless.method}, n = {lossless.n}, {lossless.drafts} drafts"
    if entry.export is not None:
        found = entry.export.agreement
        refused = sum(one.verdict == "different" for one in entry.export.negative_controls.values())
        yield (
            "drafts at full precision",
            f"{found.blocks - found.differing_blocks} of {found.blocks} blocks are torch's, token by token; "
            f"{refused} of {len(entry.export.negative_controls)} files with a known fault were refused",
        )
    if entry.cycle is not None:
        yield "a cycle", _cycle(entry.cycle)
    if load is not None:
        sampling = load.sampling
        yield (
            "workload",
            f"{', '.join(load.domains)}; {load.prompts} prompts, {load.left_out} left out, replies of up to "
            f"{load.max_new_tokens} tokens; temperature {sampling.temperature:g}, top_k {sampling.top_k}, top_p "
            f"{sampling.top_p:g}, thinking mode {load.thinking_mode}, rule {load.verification_rule}",
        )
    if entry.measured_at is not None:
        yield "measured", entry.measured_at
    if entry.holds_until is not None:
        yield "holds until", f"{entry.holds_until.date}, engine version {entry.holds_until.engine_version} only"
    yield "on", ", ".join(f"{key} {value}" for key, value in leaves(entry.fingerprint) if not key.endswith("digest"))


def _throughput(report: ThroughputReport) -> Table:
    rows = tuple(
        (
            name,
            str(arm.load.concurrency),
            interval(arm.load.tokens_per_second, 1),
            count(arm.load.tokens_per_second),
            interval(arm.against_none, 2),
            count(arm.against_none),
            milliseconds(arm.cycle.draft_seconds if arm.cycle is not None else None),
            milliseconds(arm.cycle.verify_seconds if arm.cycle is not None else None),
        )
        for name, arm in report.arms.items()
    )
    return Table(
        "In the evaluation's own loop",
        ("arm", "requests", "tokens/s", "n", "times plain decoding", "n", "draft ms", "verify ms"),
        rows,
        f"{report.dtype}, {report.threads} thread(s), {report.rounds} interleaved rounds, {report.prompts} prompts, "
        f"temperature {report.temperature:g}, replies of up to {report.max_new_tokens} tokens. A ratio below 1 is "
        "slower than plain decoding.",
    )


def _cycle(cycle: CycleCost) -> str:
    return (
        f"drafting {milliseconds(cycle.draft_seconds)} ms, verifying {milliseconds(cycle.verify_seconds)} ms, "
        f"{cycle.tau:.3f} tokens: {1000 * cycle.latency_per_token_predicted_seconds:.1f} ms per token predicted, "
        f"{1000 * cycle.latency_per_token_measured_seconds:.1f} ms measured"
    )
