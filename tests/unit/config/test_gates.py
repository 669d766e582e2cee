"""The gates' own settings: every gate there, every mistake at once, every number with a unit and a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark.config.declared import Mistakes
from dspark.config.gates import PATH, GatePolicy, read_gates
from dspark.errors import SettingsError

CHECKOUT = Path(__file__).resolve().parents[3]


def edited(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    """A workspace with the checkout's gates, changed."""
    text = (CHECKOUT / PATH).read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    (tmp_path / PATH).parent.mkdir(exist_ok=True)
    (tmp_path / PATH).write_text(text)
    return tmp_path


def test_the_gates_of_the_checkout_say_a_number_a_unit_and_a_reason_each():
    policy = read_gates(CHECKOUT)
    gates = {name: getattr(policy, name) for name in GatePolicy.model_fields if name != "baselines"}
    assert gates.keys() == {
        "tau", "new_domain", "baseline", "prompts", "ece", "lossless", "agreement", "throughput", "fresh"}  # fmt: skip
    assert all(gate.unit and len(gate.reason.split()) > 5 for gate in gates.values())
    assert policy.baselines == {}


def test_a_gate_that_is_left_out_is_a_mistake_not_an_open_gate(tmp_path: Path):
    with pytest.raises(Mistakes) as caught:
        read_gates(edited(tmp_path, ("\ntau:", "\ntauu:")))
    assert {mistake.what for mistake in caught.value.mistakes} == {"key 'tau' is missing", "unknown key 'tauu'"}


def test_all_mistakes_are_raised_at_once_with_their_lines(tmp_path: Path):
    root = edited(
        tmp_path,
        ("number: 0.03", "number: 3"),
        ("unit: relative gain", "unit: percent"),
        ("reason: a chain of promotions may give up what two champions may, and no more", "reason: ''"),
        ("ece:\n  number: 0.1", "ece:\n  numbr: 0.1"),
        ("baselines: {}", "baselines: {demo: latest}"),
    )
    with pytest.raises(Mistakes) as caught:
        read_gates(root)
    said = {mistake.what: mistake for mistake in caught.value.mistakes}
    lines = (root / PATH).read_text().splitlines()
    for what in ("tau.number:", "new_domain.unit:", "baseline.reason:", "unknown key 'ece.numbr'", "baselines"):
        mistake = next(found for text, found in said.items() if text.startswith(what))
        key = what.rstrip(":'").rpartition(".")[2]
        assert key in lines[int(mistake.where.partition(":")[2]) - 1]
    assert any("did you mean 'number'?" in mistake.hint for mistake in said.values())


def test_a_workspace_without_gates_is_told_so(tmp_path: Path):
    with pytest.raises(SettingsError, match=r"^pipeline/gates.yaml: file not found"):
        read_gates(tmp_path)
