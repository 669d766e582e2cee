"""The gate report as people read it."""

from __future__ import annotations

from dspark.measured import Measured
from dspark.registry.gate_report import GateReport, GateRow
from dspark.report.gates import HEADER, gate_cells, gate_conclusion, gate_markdown


def report(*rows: GateRow, champion: str | None = "c" * 64) -> GateReport:
    return GateReport.of(rows, build="my_build", package_digest="a" * 64, champion=champion, stage="production")


OPEN = GateRow(gate="package", verdict="pass", reason="every digest agrees")
SHUT = GateRow(
    gate="tau math, temperature 0",
    candidate=Measured(value=1.98, n=12, ci95=(1.9, 2.06)),
    champion=1.0,
    difference=Measured(value=-0.012, n=12, ci95=(-0.05, 0.02)),
    verdict="undecided",
    prompts_needed=53,
    reason="12 prompts | neither",
)


def test_a_row_shows_numbers_with_their_intervals_and_differences_in_percent():
    opened, shut = gate_cells(report(OPEN, SHUT))
    assert opened == ("package", "–", "–", "–", "pass", "every digest agrees")
    assert shut == (
        "tau math, temperature 0", "1.980 [1.900, 2.060]", "1", "-1.2 % [-5.0, +2.0]",
        "undecided (about 53 needed)", "12 prompts | neither",
    )  # fmt: skip
    assert len(HEADER) == len(opened)


def test_the_conclusion_says_whether_the_package_may_move():
    assert gate_conclusion(report(OPEN)) == (
        f"package {'a' * 12} of build my_build may move to production (against champion {'c' * 12}): "
        "all 1 gates are open"
    )
    refused = gate_conclusion(report(OPEN, SHUT, champion=None))
    assert "may not move to production (against no speculation: the first one): 1 of 2 gates are shut" in refused


def test_markdown_puts_shut_gates_first_and_keeps_cells_apart():
    lines = gate_markdown(report(OPEN, SHUT)).splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| **tau math, temperature 0**", "| package"]
    assert "**undecided (about 53 needed)**" in rows[2] and r"12 prompts \| neither" in rows[2]
    assert "## Gates of my\\_build" in lines
    assert f"- champion: `{'c' * 64}`" in lines and not any("baseline" in line for line in lines)
