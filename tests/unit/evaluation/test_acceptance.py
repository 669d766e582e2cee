from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from dspark.decoding.history import History, Timing
from dspark.decoding.records import Decoded, RecordSet
from dspark.errors import DataError
from dspark.evaluation.acceptance import (
    measure_acceptance,
    measure_temperature,
    read_sweep_csv,
    threshold_sweep,
    write_position_csv,
    write_sweep_csv,
)

GAMMA = 3
EOS = 1


def request(accepted: Sequence[int], *, logits: float | Sequence[float] = 1.0, policy: str = "fixed",
            temperature: float = 0.0, eos_at: int | None = None) -> Decoded:  # fmt: skip
    """A request whose cycles accepted so many drafts, ended by a bonus eos or by an accepted draft eos."""
    one = History(4, GAMMA, 10_000, frozenset({EOS}), temperature, policy)
    one.begin(5, 0.1)
    confidences = np.full(GAMMA, logits, np.float32) if np.isscalar(logits) else np.array(logits, np.float32)
    for number, count in enumerate(accepted):
        last = number + 1 == len(accepted)
        drafts = [7] * GAMMA
        if last and eos_at is not None:
            drafts[eos_at] = EOS
        one.add(drafts, GAMMA, count, EOS if last else 8, confidences, Timing(0.02, 0.08, 2))
    return one.result()


def records(*decoded: Decoded, domains: Sequence[str] | None = None) -> RecordSet:
    names = tuple(str(index) for index in range(len(decoded)))
    return RecordSet(names, tuple(domains or ["math"] * len(decoded)), decoded)


def values(measured) -> list[float]:
    return [one.value for one in measured]


def test_tau_is_tokens_per_cycle_with_the_bonus_pooled_over_all_cycles():
    """Committed 1+2+4 and 3 in 4 cycles: 10/4. A mean of the requests' own means would be 2.67."""
    figures = measure_acceptance([request([0, 1, 3]), request([2])])
    assert figures.tau.value == pytest.approx(2.5)
    assert figures.tau.n == 2
    assert figures.includes_bonus is True


def test_a_cycle_ended_by_an_accepted_eos_counts_what_it_emitted():
    """Three drafts accepted, the second of them an eos: two tokens, no bonus, nothing known of the third."""
    figures = measure_acceptance([request([3], eos_at=1)])
    assert figures.tau.value == 2
    assert values(figures.conditional) == [1, 1]
    assert figures.absent["conditional"] == "no block reached position 3"


def test_conditional_acceptance_counts_blocks_that_got_there():
    """Accepted 0, 1, 3, 2: position 1 in 3 of 4; position 2 in 2 of 3; position 3 in 1 of 2."""
    figures = measure_acceptance([request([0, 1, 3, 2])])
    assert values(figures.conditional) == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert values(figures.marginal) == pytest.approx([3 / 4, 1 / 2, 1 / 4])
    assert figures.absent == {}


def test_marginal_acceptance_is_not_lowered_by_blocks_that_ended_in_an_eos():
    """Of 4 blocks two were accepted whole, one was rejected at once, and one ended at its first draft.

    Position 1: 3 of 4. Position 2: of those three the ended one tells nothing, 2 of 2. So survival to 2 is 3/4, where
    counting the ended block as a rejection would give 1/2.
    """
    figures = measure_acceptance([request([3, 3, 0]), request([1], eos_at=0)])
    assert values(figures.marginal) == pytest.approx([3 / 4, 3 / 4, 3 / 4])


def test_positions_that_nothing_reached_are_left_out_with_a_reason():
    figures = measure_acceptance([request([0, 0])])
    assert values(figures.conditional) == values(figures.marginal) == [0]
    assert figures.absent["marginal"] == "no block reached positions 2 to 3"


def test_intervals_come_from_prompts():
    """Ten equal prompts have no spread; two kinds of prompts do, and the interval covers both."""
    assert measure_acceptance([request([1, 1])] * 10).tau.ci95 == (2, 2)
    mixed = measure_acceptance([request([0] * 4), request([3] * 4)] * 10)
    low, high = mixed.tau.ci95
    assert 1 < low < 2.2 < mixed.tau.value == 2.5 < 2.8 < high < 4
    assert 0 < mixed.marginal[2].ci95[0] < 0.5 < mixed.marginal[2].ci95[1] < 1


def test_domains_stand_apart_and_only_those_trained_on_are_averaged():
    """tau 2 in math, 1 in chat, 4 in the domain that is only evaluated: the mean is 1.5."""
    chosen = records(*[request([1] * 4)] * 3, *[request([0] * 4)] * 3, *[request([3] * 4)] * 3,
                     domains=["math"] * 3 + ["chat"] * 3 + ["humaneval"] * 3)  # fmt: skip
    metrics = measure_temperature(chosen, ["math", "chat"], "float32")
    assert {name: one.tau.value for name, one in metrics.domains.items()} == {"math": 2, "chat": 1, "humaneval": 4}
    assert {name: one.role for name, one in metrics.domains.items()} == {
        "math": "training", "chat": "training", "humaneval": "evaluation_only"}  # fmt: skip
    assert metrics.mean_of_domains is not None
    assert metrics.mean_of_domains.tau.value == pytest.approx(1.5)
    assert metrics.mean_of_domains.domains == ("math", "chat")
    assert metrics.mean_of_domains.tau.n == 6
    assert metrics.label == "greedy_match"
    assert "no calibration" in metrics.absent["confidence"]


def test_a_domain_tells_how_much_was_decoded_and_how_fast():
    """Two requests shared every cycle of 0.1 s, so each cycle costs a request 0.05 s; 2 tokens in each: 40 tokens/s."""
    math = measure_temperature(records(request([1, 1, 1])), ["math"], "float32").domains["math"]
    assert (math.prompts, math.stopped, math.cycles, math.tokens) == (1, 1, 3, 7)
    assert math.acceptance_rate is not None and math.acceptance_rate.value == pytest.approx(3 / 9)
    assert math.tokens_per_second is not None and math.tokens_per_second.value == pytest.approx(40)


def test_a_domain_without_a_cycle_is_absent_and_so_is_the_mean():
    silent = History(4, GAMMA, 10, frozenset({EOS}), 0.0, "fixed")
    silent.begin(EOS, 0.1)
    chosen = records(request([1]), silent.result(), domains=["math", "chat"])
    metrics = measure_temperature(chosen, ["math", "chat"], "float32", temperatures=[1.0] * GAMMA)
    assert set(metrics.domains) == {"math"}
    assert metrics.mean_of_domains is None
    assert metrics.absent["mean_of_domains"] == "no figures for chat"
    assert "first token" in metrics.absent["chat"]
    only = measure_temperature(records(silent.result()), ["math"], "float32", temperatures=[1.0] * GAMMA)
    assert "no block" in only.absent["confidence"] and only.mean_of_domains is None


def test_without_domains_trained_on_there_is_no_mean():
    metrics = measure_temperature(records(request([1])), [], "float32")
    assert metrics.mean_of_domains is None and metrics.absent.keys() == {"confidence"}


def test_confidences_are_assessed_on_the_domains_trained_on():
    """All confidences are sigmoid(1) = .731 and the first position was accepted in every block of math."""
    chosen = records(*[request([1] * 30)] * 4, *[request([0] * 30)] * 4, domains=["math"] * 4 + ["humaneval"] * 4)
    confidence = measure_temperature(chosen, ["math"], "float32", temperatures=[2.0, 2.0, 2.0]).confidence
    assert confidence is not None and confidence.conversations == 4
    first = confidence.positions[0]
    assert first.ece_before is not None and first.ece_before.value == pytest.approx(1 - 0.7311, abs=1e-4)
    assert first.ece_after is not None and first.ece_after.value == pytest.approx(1 - 0.6225, abs=1e-4)


def test_records_of_cut_blocks_and_nothing_at_all_are_refused():
    with pytest.raises(DataError, match="whole verified blocks"):
        measure_temperature(records(request([1], policy="threshold(0.5)")), ["math"], "float32")
    silent = History(4, GAMMA, 1, frozenset({EOS}), 0.0, "fixed")
    silent.begin(7, 0.1)
    with pytest.raises(DataError, match="no cycle"):
        measure_acceptance([silent.result()])


def test_a_sweep_cuts_recorded_blocks():
    """Confidences .8, .6, .4. At .5 two of three are verified: accepted 0, 1, 2, 2 of blocks that accept 0, 1, 2, 3."""
    logit = [float(np.log(p / (1 - p))) for p in (0.8, 0.6, 0.4)]
    rows = threshold_sweep(records(request([0, 1, 2, 3, 0], logits=logit)), thresholds=[0.0, 0.5, 0.7, 0.9])
    assert [row.threshold for row in rows] == [0.0, 0.5, 0.7, 0.9]
    assert [row.verified_per_cycle for row in rows] == [3, 2, 1, 0]
    assert [row.accepted_per_cycle for row in rows] == pytest.approx([6 / 5, 5 / 5, 3 / 5, 0])
    assert [row.rejected_per_cycle for row in rows] == pytest.approx([4 / 5, 3 / 5, 2 / 5, 0])
    assert [row.acceptance_rate for row in rows] == [pytest.approx(6 / 15), pytest.approx(5 / 10), 3 / 5, None]
    assert [row.tau for row in rows] == pytest.approx([11 / 5, 10 / 5, 8 / 5, 1])


def test_a_sweep_with_calibrated_confidences_stands_beside_the_raw_one():
    logit = [float(np.log(p / (1 - p))) for p in (0.8, 0.6, 0.4)]
    rows = threshold_sweep(records(request([3, 0], logits=logit)), [8.0, 1.0, 1.0], thresholds=[0.55])
    assert [(row.confidence, row.verified_per_cycle) for row in rows] == [("raw", 2), ("calibrated", 0)]


def test_a_sweep_does_not_call_the_end_of_a_text_a_rejection():
    """The block that ends at its first draft verified one draft that is known, and accepted it."""
    (row,) = threshold_sweep(records(request([2], eos_at=0)), thresholds=[0.0])
    assert (row.verified_per_cycle, row.accepted_per_cycle, row.rejected_per_cycle, row.tau) == (1, 1, 0, 1)


def test_tables_have_one_row_per_position_and_threshold(tmp_path: Path):
    chosen = records(request([0, 1, 3]), request([2]))
    write_position_csv(tmp_path / "p.csv", {"0": measure_temperature(chosen, ["math"], "float32")})
    rows = list(csv.DictReader((tmp_path / "p.csv").open()))
    assert [(row["temperature"], row["domain"], row["position"]) for row in rows] == [
        ("0", "math", "1"), ("0", "math", "2"), ("0", "math", "3")]  # fmt: skip
    assert float(rows[0]["conditional"]) == pytest.approx(3 / 4) and rows[0]["conditional_n"] == "2"
    assert float(rows[0]["marginal_low"]) <= 3 / 4 <= float(rows[0]["marginal_high"])
    write_sweep_csv(tmp_path / "s.csv", threshold_sweep(chosen, thresholds=[0.0, 0.9]))
    rows = list(csv.DictReader((tmp_path / "s.csv").open()))
    assert [row["acceptance_rate"] for row in rows] == ["0.5", ""]
    assert read_sweep_csv(tmp_path / "s.csv") == threshold_sweep(chosen, thresholds=[0.0, 0.9])
    for wrong, reason in (("p.csv", r"p\.csv:1: columns are"), ("absent.csv", "file not found")):
        with pytest.raises(DataError, match=reason):
            read_sweep_csv(tmp_path / wrong)


def test_without_a_confidence_head_acceptance_is_measured_and_confidence_is_absent_with_the_reason():
    one, two = (records(request([2, 0, 3], logits=logits), domains=["math"]) for logits in (np.nan, 1.0))
    bare, full = (measure_temperature(found, ["math"], "float32") for found in (one, two))
    assert full.domains["math"].expectation is not None and bare.confidence is None
    assert bare.domains["math"] == full.domains["math"].model_copy(update={"expectation": None})
    assert bare.absent["confidence"] == "the drafter has no confidence head"
    assert threshold_sweep(one) == [] and threshold_sweep(two)
