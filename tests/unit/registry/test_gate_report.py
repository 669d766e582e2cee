"""The report of the gates: what it promises whoever reads it."""

from __future__ import annotations

from typing import get_args

import pytest
from pydantic import ValidationError

from dspark.io.jsonfile import model_json, read_model, write_model
from dspark.measured import Measured
from dspark.registry.gate_report import GateReport, GateRow, Verdict


def report(*verdicts: str) -> GateReport:
    rows = [GateRow(gate=f"gate {index}", verdict=verdict, reason="so") for index, verdict in enumerate(verdicts)]
    return GateReport.of(rows, build="b", package_digest="a" * 64, champion=None, stage="production")


def test_a_report_passes_only_if_every_gate_is_open():
    opened = {verdict for verdict in get_args(Verdict) if report("pass", verdict).passed}
    assert opened == {"non-inferior", "better", "pass"}
    assert [row.gate for row in report("pass", "undecided", "better", "fail").refusals] == ["gate 1", "gate 3"]


def test_a_written_report_is_read_back_as_it_was(tmp_path):
    row = GateRow(
        gate="tau math, temperature 0",
        candidate=Measured(value=2.0, n=9, ci95=(1.9, 2.1)),
        champion=1.0,
        difference=None,
        verdict="undecided",
        prompts_needed=40,
        reason="so",
    )
    written = GateReport.of([row], build="b", package_digest="a" * 64, champion="c" * 64, stage="staging")
    write_model(tmp_path / "gates.json", written)
    assert read_model(tmp_path / "gates.json", GateReport) == written


def test_a_report_that_says_passed_against_its_own_rows_is_refused():
    value = model_json(report("pass", "worse"))
    assert value["passed"] is False
    with pytest.raises(ValidationError, match="not what the rows come to"):
        GateReport.model_validate({**value, "passed": True})


def test_no_gates_are_no_passed_gates():
    with pytest.raises(ValidationError):
        report()
