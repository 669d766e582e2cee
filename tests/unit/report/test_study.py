"""Studies side by side: every figure comes from the loop's records and is what a hand would make of them."""

from __future__ import annotations

import csv
import io
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dspark.config.studies import StudySpec, variants_of
from dspark.decoding.records import Cycles, Decoded, RecordSet, write_records
from dspark.errors import DataError
from dspark.evaluation.acceptance import measure_temperature, threshold_sweep, write_sweep_csv
from dspark.evaluation.results import EvaluationMetrics
from dspark.io.jsonfile import model_json, write_json, write_model
from dspark.report.study import StudyReport, collect
from dspark.report.study_charts import study_charts
from dspark.report.study_tables import study_csv, study_table

GAMMA = 3
DOMAINS = ("math", "chat")


def decoded(accepted: Sequence[int], temperature: float = 0.0, logit: float = 2.0) -> Decoded:
    """A request whose cycles accepted so many of three drafts, everything known of each."""
    count = len(accepted)
    taken = np.array(accepted, np.int32)
    cycles = Cycles(
        drafted=np.full((count, GAMMA), 7, np.int32),
        verified=np.full(count, GAMMA, np.int32),
        accepted=taken,
        committed=taken + 1,
        known=np.full(count, GAMMA, np.int32),
        confidence_logits=np.full((count, GAMMA), logit, np.float32),
        draft_seconds=np.full(count, 0.1),
        verify_seconds=np.full(count, 0.2),
        rows=np.ones(count, np.int32),
    )
    return Decoded(4, [5] * (1 + sum(accepted) + count), "length", temperature, "fixed", 0.1, cycles)


def study_of(spec: StudySpec) -> Any:
    build = SimpleNamespace(name="mine", target=SimpleNamespace(name="small"), corpus=SimpleNamespace(domains=DOMAINS))
    pipeline = SimpleNamespace(chosen=SimpleNamespace(build=build))
    return SimpleNamespace(spec=spec, variants=variants_of(spec, "mine"), pipeline=pipeline)


def write_build(
    folder: Path,
    accepted: dict[str, list[list[int]]],
    temperatures: Sequence[float] = (0.0,),
    logit: float = 2.0,
    **trained: int,
) -> None:
    """What `train` and `evaluate` leave of a build: by domain, the accepted counts of each prompt."""
    metrics, rows = {}, []
    for temperature in temperatures:
        prompts = [(domain, number, one) for domain, found in accepted.items() for number, one in enumerate(found)]
        records = RecordSet(
            tuple(f"{domain}-{number}" for domain, number, _ in prompts),
            tuple(domain for domain, _, _ in prompts),
            tuple(decoded(one, temperature, logit) for _, _, one in prompts),
        )
        write_records(folder / "evaluate" / "records" / f"temperature-{temperature:g}.safetensors", records)
        metrics[f"{temperature:g}"] = measure_temperature(records, DOMAINS, "float32")
        rows += threshold_sweep(records, thresholds=[0.0, 0.9])
    report = EvaluationMetrics(gamma=GAMMA, policy="fixed", max_new_tokens=9, seed=0, temperatures=metrics)
    write_model(folder / "evaluate" / "metrics.json", report)
    write_sweep_csv(folder / "evaluate" / "threshold_sweep.csv", rows)
    dev = {"step": 1, **dict.fromkeys(("dev_anchor_tau", "dev_anchor_tau_sampled", "dev_cross_entropy", "dev_l1"), 9.0)}
    dev |= {"dev_greedy_match": [1.0], "dev_acceptance": [1.0]}
    counts = dict.fromkeys(("train_sequences", "train_tokens", "skipped_sequences", "dev_sequences"), 1)
    write_json(
        folder / "train" / "metrics.json",
        {
            "schema": "dspark/train/1",
            "geometry": "dspark-g3",
            "trainable_parameters": 1000,
            "steps": 10,
            "seen_tokens": 12345,
            **counts,
            "draft_vocab_size": 8,
            "draft_vocab_coverage": 1.0,
            "precision": "float32",
            "best": dev,
            "final": dev,
            **trained,
        },
    )
    (folder / "train" / "curves.csv").write_text("step,seconds\n1,0.5\n10,61.5\n")


DEPTH = StudySpec(name="depth", vary={"drafter.layers": [1, 2]})
SHALLOW = {"math": [[1, 1], [0, 0]], "chat": [[0], [2]], "code": [[3, 3]]}
DEEP = {"math": [[3, 3], [1, 1]], "chat": [[2], [2]], "code": [[0, 0]]}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> StudyReport:
    builds = tmp_path_factory.mktemp("builds")
    write_build(builds / "mine.depth.layers-1", SHALLOW, (0.0, 1.0))
    write_build(builds / "mine.depth.layers-2", DEEP, (0.0, 1.0), trainable_parameters=2000)
    return collect(study_of(DEPTH), builds)


def test_tau_is_the_mean_of_the_domains_and_acceptance_is_pooled_over_their_prompts(report: StudyReport) -> None:
    """Shallow: math (2+2+1+1)/4 = 1.5, chat (1+3)/2 = 2, mean 1.75; code was not trained on. Position 1: of six blocks
    three accepted it; position 2: of these three one; position 3: of that one none."""
    shallow, deep = report.variants
    assert shallow.temperatures["0"].tau.value == pytest.approx(1.75)
    assert [rate.value for rate in shallow.temperatures["0"].conditional] == pytest.approx([3 / 6, 1 / 3, 0])
    assert deep.temperatures["0"].tau.value == pytest.approx((3.0 + 3.0) / 2)
    assert shallow.temperatures["0"].tau.n == 4  # prompts


def test_differences_are_taken_against_the_first_variant_on_the_same_prompts(report: StudyReport) -> None:
    """Pooled over math and chat: 18 tokens in 6 cycles against 10 in 6."""
    shallow, deep = report.variants
    assert shallow.temperatures["1"].against_first is None
    found = deep.temperatures["1"].against_first
    assert found is not None and found.value == pytest.approx(18 / 10 - 1) and found.n == 4
    assert found.ci95[0] <= found.value <= found.ci95[1]


def test_what_training_took_stands_beside(report: StudyReport) -> None:
    assert [one.training.model_dump() for one in report.variants if one.training is not None] == [
        {"geometry": "dspark-g3", "parameters": count, "steps": 10, "seen_tokens": 12345, "seconds": 61.5}
        for count in (1000, 2000)
    ]
    assert report.variants[0].absent == {"speed": "throughput was not measured"}
    assert StudyReport.model_validate(model_json(report)) == report


def test_the_csv_holds_every_number_of_the_charts(report: StudyReport) -> None:
    rows = list(csv.DictReader(io.StringIO(study_csv(report))))
    assert [(row["build"], row["drafter.layers"], row["temperature"]) for row in rows] == [
        (f"mine.depth.layers-{layers}", str(layers), temperature) for layers in (1, 2) for temperature in "01"
    ]
    first = report.variants[0].temperatures["0"]
    assert (float(rows[0]["tau"]), float(rows[0]["tau_low"]), float(rows[0]["tau_high"])) == (
        first.tau.value, *first.tau.ci95)  # fmt: skip
    assert float(rows[0]["conditional_2"]) == first.conditional[1].value
    assert (rows[0]["against_first"], rows[0]["speed"], rows[0]["draft_seconds_n"]) == ("", "", "")
    assert (rows[0]["seen_tokens"], rows[0]["training_seconds"], rows[2]["parameters"]) == ("12345", "61.5", "2000")
    charts = dict(study_charts(report))
    assert set(charts) == {"study.svg", "acceptance.svg"}
    root = ElementTree.fromstring(charts["study.svg"])
    told = [found.text or "" for found in root.iter() if found.tag.endswith("title")]
    for row in rows:
        low, high = float(row["tau_low"]), float(row["tau_high"])
        point = f"{float(row['tau']):.4g} at drafter.layers {row['drafter.layers']}, 95 % [{low:.4g}, {high:.4g}]"
        assert f"temperature {row['temperature']}: {point}" in told


def test_the_table_has_a_row_for_each_variant_and_temperature(report: StudyReport) -> None:
    header, rows = study_table(report)
    assert len(rows) == 4 and all(len(row) == len(header) for row in rows)
    assert rows[2][:3] == ("2", "0", rows[2][2]) and rows[2][2].startswith("3.000 [")
    assert rows[2][3].startswith("+80.0 % [") and rows[0][4] == "0.50 0.33 0.00"
    assert rows[3][-3:] == ("12,345", "62 s", "2,000")


def test_other_axes_are_lines_of_their_own(tmp_path: Path) -> None:
    spec = StudySpec(name="s", vary={"drafter.layers": [1, 2], "recipe": ["a", "b"]})
    for variant in variants_of(spec, "mine"):
        write_build(tmp_path / variant.name, SHALLOW)
    chart = dict(study_charts(collect(study_of(spec), tmp_path)))["study.svg"]
    root = ElementTree.fromstring(chart)
    assert len([found for found in root.iter() if found.get("class") == "line"]) == 2 * 2  # each in the legend too
    texts = [found.text for found in root.iter() if found.tag.endswith("text")]
    assert {"recipe a, temperature 0", "recipe b, temperature 0"} <= set(texts)


def test_a_sweep_shows_the_rows_that_evaluation_wrote(tmp_path: Path) -> None:
    """Confidence sigmoid(2) = 0.88: threshold 0.9 verifies nothing, 0 everything. Math accepted 2 of the 12 drafts that
    its four blocks verified."""
    write_build(tmp_path / "mine", SHALLOW)
    report = collect(study_of(StudySpec(name="threshold", sweep="threshold")), tmp_path)
    (variant,) = report.variants
    assert {row["domain"] for row in variant.sweep} == {"math", "chat"}
    rows = list(csv.DictReader(io.StringIO(study_csv(report))))
    found = {(row["domain"], row["threshold"]): (row["acceptance_rate"], row["tau"]) for row in rows}
    assert float(found["math", "0.0"][0]) == pytest.approx(2 / 12) and found["math", "0.9"] == ("", "1.0")
    assert variant.training is None
    charts = dict(study_charts(report))
    assert set(charts) == {"study.svg", "tau.svg"}
    header, shown = study_table(report)
    assert len(shown) == 4 and all(len(row) == len(header) for row in shown)


def test_calibrated_confidences_are_swept_where_there_are_some(tmp_path: Path) -> None:
    write_build(tmp_path / "mine", SHALLOW)
    records = RecordSet(("a",), ("math",), (decoded([1]),))
    path = tmp_path / "mine/evaluate/threshold_sweep.csv"
    write_sweep_csv(path, threshold_sweep(records, [2.0] * GAMMA, thresholds=[0.8]))
    report = collect(study_of(StudySpec(name="threshold", sweep="threshold")), tmp_path)
    assert [row["confidence"] for row in report.variants[0].sweep] == ["calibrated"]


def test_a_drafter_without_confidences_has_nothing_to_sweep(tmp_path: Path) -> None:
    write_build(tmp_path / "mine", SHALLOW, logit=float("nan"))
    with pytest.raises(DataError, match="build mine: the drafter has no confidence head"):
        collect(study_of(StudySpec(name="threshold", sweep="threshold")), tmp_path)


def test_variants_that_decoded_other_prompts_are_not_compared(tmp_path: Path) -> None:
    write_build(tmp_path / "mine.depth.layers-1", SHALLOW)
    write_build(tmp_path / "mine.depth.layers-2", DEEP | {"chat": [[2]]})
    with pytest.raises(DataError, match="decoded different prompts"):
        collect(study_of(DEPTH), tmp_path)


def test_missing_files_say_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(DataError) as refused:
        collect(study_of(DEPTH), tmp_path)
    assert "dspark evaluate --study" in refused.value.hint
