"""A gate report for people: plain columns for a terminal, Markdown for the summary of a CI job."""

from __future__ import annotations

from dspark.measured import Measured
from dspark.registry.gate_report import GateReport, GateRow, Number
from dspark.report.markdown import code, table, text
from dspark.report.words import interval, percent

HEADER = ("gate", "candidate", "champion", "difference", "verdict", "why")


def gate_cells(report: GateReport) -> list[tuple[str, ...]]:
    """One row of plain cells per gate, in the order of `HEADER`; intervals are 95 %."""
    return [
        (
            row.gate,
            _number(row.candidate),
            _number(row.champion),
            _percent(row.difference),
            _verdict(row),
            row.reason,
        )
        for row in report.rows
    ]


def gate_conclusion(report: GateReport) -> str:
    """One sentence: whether the package may move, and if not, how many gates are shut."""
    package = f"package {report.package_digest[:12]} of build {report.build}"
    against = f"against champion {report.champion[:12]}" if report.champion else "against no speculation: the first one"
    if report.passed:
        return f"{package} may move to {report.stage} ({against}): all {len(report.rows)} gates are open"
    shut = len(report.refusals)
    return f"{package} may not move to {report.stage} ({against}): {shut} of {len(report.rows)} gates are shut"


def gate_markdown(report: GateReport) -> str:
    """The whole report; shut gates stand first, in bold."""
    rows = sorted(zip(report.rows, gate_cells(report), strict=True), key=lambda pair: pair[0].passed)
    lines = []
    for row, cells in rows:
        shown = [text(cell) for cell in cells]
        lines.append(shown if row.passed else [f"**{shown[0]}**", *shown[1:4], f"**{shown[4]}**", shown[5]])
    digests = [("package", report.package_digest), ("champion", report.champion), ("baseline", report.baseline)]
    named = "\n".join(f"- {word}: {code(digest)}" for word, digest in digests if digest is not None)
    parts = [f"## Gates of {text(report.build)}", f"{text(gate_conclusion(report))}.", table(HEADER, lines), named]
    return "\n\n".join(parts) + "\n"


def _verdict(row: GateRow) -> str:
    return f"{row.verdict} (about {row.prompts_needed} needed)" if row.prompts_needed is not None else row.verdict


def _number(value: Number) -> str:
    return interval(value) if value is None or isinstance(value, Measured) else f"{value:g}"


def _percent(value: Number) -> str:
    return percent(value) if value is None or isinstance(value, Measured) else f"{100 * value:+.1f} %"
