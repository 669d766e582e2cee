"""Is the text still the target's, and are the exported files the drafter that was measured?"""

from __future__ import annotations

from collections.abc import Iterator

from dspark.evaluation.results import LosslessReport
from dspark.export.report import ParityReport
from dspark.report.page.evidence import Evidence
from dspark.report.page.model import Block, Facts, Missing, Section, Table


def soundness(evidence: Evidence) -> Section:
    """Losslessness and export parity, with what they rest on."""
    blocks: list[Block] = []
    if evidence.lossless is not None:
        blocks += _lossless(evidence.lossless)
    else:
        blocks.append(Missing("losslessness", evidence.absent["losslessness"]))
    if evidence.parity is not None:
        blocks += _parity(evidence.parity)
    else:
        blocks.append(Missing("export parity", evidence.absent["export parity"]))
    return Section("soundness", "Is the text still the target's?", tuple(blocks))


def _lossless(report: LosslessReport) -> Iterator[Block]:
    greedy, sampled = report.greedy, report.sampled
    yield Facts(
        (
            ("overall", report.result),
            (
                "temperature 0",
                f"{greedy.result}: {greedy.tokens} tokens of n = {greedy.n} prompts ({greedy.drafts} drafts verified, "
                f"{greedy.drafts_accepted} accepted) scored in plain {greedy.dtype} passes; {len(greedy.violations)} "
                f"beyond epsilon = {greedy.epsilon:.2g}, {len(greedy.near_ties)} near-ties within it on "
                f"{greedy.near_tie_prompts} prompts",
            ),
            (
                f"temperature {sampled.temperature:g}",
                f"{sampled.result}: the joint law of the first tokens, enumerated over n = {len(sampled.cases)} small "
                f"cases, differs from the target's by at most {sampled.largest_difference:.2g} (tolerance "
                f"{sampled.tolerance:.2g})",
            ),
        )
    )
    if greedy.violations:
        yield Table(
            "Tokens that are not the target's best",
            ("prompt", "position", "token", "best", "gap of logits"),
            tuple(
                (one.prompt, str(one.position), str(one.token), str(one.best), f"{one.gap:.3g}")
                for one in greedy.violations
            ),
        )


def _parity(report: ParityReport) -> Iterator[Block]:
    probes = report.probes
    faults = ((f"fault: {name}", item) for name, item in report.negative_controls.items())
    yield Table(
        "Exported files against torch",
        ("dialect", "verdict", "blocks that differ", "near-ties", "largest difference of a confidence"),
        tuple(
            (
                name,
                item.verdict,
                f"{item.differing_blocks} of {item.blocks}",
                str(item.near_ties),
                f"{item.max_confidence_difference:.2g}",
            )
            for name, item in (*report.dialects.items(), *faults)
        ),
        f"{probes.blocks} blocks of real contexts of {probes.shortest_context} to {probes.longest_context} tokens, "
        "token by token; files with a known fault must differ.",
    )
    for name, reason in report.absent.items():
        yield Missing(f"export of {name}", reason)
