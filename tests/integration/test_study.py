"""`dspark evaluate --study`: variants by DVC's own stages, resumed after a stop, compared from what they left."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import FakeSandbox, Sandbox

pytestmark = pytest.mark.slow

# Stand-ins whose figures follow from the drafter's depth: every block accepts as many drafts as there are layers.
TRAIN = """
import json
import os

from dspark.errors import DataError
from dspark.io.jsonfile import write_json
from dspark.workspace.stage import stage


@stage("train")
def main(inputs, paths, progress):
    with (paths.root / "calls.log").open("a") as log:
        log.write(f"train@{paths.key}\\n")
    layers = inputs.drafter.layers
    if os.environ.get("FAKE_FAIL") == f"layers-{layers}":
        raise DataError("no memory for so many layers", "fewer layers")
    write_json(paths.out / "drafter/model.safetensors", {"layers": layers})
    dev = dict.fromkeys(("dev_anchor_tau", "dev_anchor_tau_sampled", "dev_cross_entropy", "dev_l1"), 1.0)
    dev |= {"step": 1, "dev_greedy_match": [], "dev_acceptance": []}
    counts = ("train_sequences", "train_tokens", "skipped_sequences", "dev_sequences", "draft_vocab_size")
    metrics = dict.fromkeys(counts, 1) | {"steps": inputs.training.steps, "seen_tokens": 640}
    metrics |= {"geometry": f"l{layers}", "trainable_parameters": 100 * layers, "draft_vocab_coverage": 1.0}
    metrics |= {"precision": "float32", "best": dev, "final": dev}
    write_json(paths.out / "metrics.json", {"schema": "dspark/train/1", **metrics})
    (paths.out / "curves.csv").write_text(f"step,seconds\\n1,{layers}.5\\n")


if __name__ == "__main__":
    main()
"""
EVALUATE = """
import json

import numpy as np

from dspark.decoding.records import Cycles, Decoded, RecordSet, write_records
from dspark.evaluation.acceptance import measure_temperature
from dspark.evaluation.results import EvaluationMetrics
from dspark.io.jsonfile import write_model
from dspark.workspace.stage import stage


@stage("evaluate")
def main(inputs, paths, progress):
    with (paths.root / "calls.log").open("a") as log:
        log.write(f"evaluate@{paths.key}\\n")
    layers = json.loads((paths.build / "train/drafter/model.safetensors").read_text())["layers"]
    whole = np.full(3, 7, np.int32)
    taken = np.full(3, layers, np.int32)
    empty = np.zeros((3, 7), np.int32)
    cycles = Cycles(
        empty, whole, taken, taken + 1, whole, empty.astype(np.float32), taken * 0.1, taken * 0.1, whole // 7
    )
    prompts = [Decoded(2, [5] * (4 + 3 * layers), "length", 0.0, "fixed", 0.1, cycles)] * 2
    records = RecordSet(("a", "b"), ("rows", "rows"), tuple(prompts))
    write_records(paths.out / "records/temperature-0.safetensors", records)
    at_0 = measure_temperature(records, inputs.training_domains, "float32")
    metrics = EvaluationMetrics(gamma=7, policy="fixed", max_new_tokens=1, seed=0, temperatures={"0": at_0})
    write_model(paths.out / "metrics.json", metrics)


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def studying(fake: FakeSandbox) -> FakeSandbox:
    """A workspace whose stages cost nothing, with a study of two depths."""
    (fake.root / "stages/train_drafter.py").write_text('"""Stands in for stage `train`."""\n' + TRAIN)
    (fake.root / "stages/evaluate_drafter.py").write_text('"""Stands in for stage `evaluate`."""\n' + EVALUATE)
    (fake.root / "pipeline/studies/two.yaml").write_text("vary: {drafter.layers: [1, 2]}\n")
    return fake


def test_variants_share_the_corpus_and_a_stopped_study_goes_on_where_it_was(studying: FakeSandbox) -> None:
    command = ("evaluate", "--study", "two", "--target", "fake", "--json")
    failed = studying.dspark(*command, FAKE_FAIL="layers-2")
    assert failed.code == 4 and "train@fake.two.layers-2: no memory for so many layers" in failed.err
    first = studying.calls()
    corpus = ["prompts@fake", "responses@fake", "features@fake"]
    assert [call for call in first if call in corpus] == corpus
    assert "train@fake.two.layers-1" in first and "calibrate@fake.two.layers-2" not in first
    assert not [call for call in first if call.startswith(("certify", "package"))]

    status = studying.dspark("status", "--json").json
    assert status["run"]["state"] == "failed"
    assert (status["run"]["verb"], status["run"]["build"]) == (["evaluate", "--study", "two"], "fake")

    done = studying.dspark(*command)
    assert done.code == 0, done.err
    again = studying.calls()
    failed_one = "train@fake.two.layers-2"
    assert first.count(failed_one) == again.count(failed_one) == 1  # what had failed, and nothing that had not
    assert not {*first} & {*again} - {failed_one}
    stages = ("train", "calibrate", "export", "evaluate")
    wanted = {f"{stage}@fake.two.layers-{layers}" for stage in stages for layers in (1, 2)}
    assert {call for call in (*first, *again) if not call.startswith("profile")} == {*corpus, *wanted}
    report = done.json
    assert [one["temperatures"]["0"]["tau"]["value"] for one in report["variants"]] == [2.0, 3.0]
    assert report["variants"][1]["temperatures"]["0"]["against_first"]["value"] == pytest.approx(0.5)
    assert report["variants"][1]["training"] == {
        "geometry": "l2", "parameters": 200, "steps": 100, "seen_tokens": 640, "seconds": 2.5}  # fmt: skip
    folder = Path(report["folder"])
    assert folder == studying.root / "studies/fake/two"
    assert sorted(path.name for path in folder.iterdir()) == sorted(report["files"])

    # What another verb makes of the workspace in between changes nothing; one value more makes one build more.
    other = studying.dspark("plan", "--target", "fake")
    assert other.code == 0, other.err
    assert "fake.two.layers-1" not in studying.workspace.dag.read_text()
    (studying.root / "pipeline/studies/two.yaml").write_text("vary: {drafter.layers: [1, 2, 3]}\n")
    more = studying.dspark("evaluate", "--study", "two", "--target", "fake")
    assert more.code == 0, more.err
    assert {call.partition("@")[2] for call in studying.calls() if call.startswith(("train", "evaluate"))} == {
        "fake.two.layers-3"
    }
    assert "4.000 [4.000, 4.000]" in more.out and "studies/fake/two/study.svg" in more.out
    rows = list(csv.DictReader((folder / "study.csv").open()))
    assert [(row["drafter.layers"], row["tau"]) for row in rows] == [("1", "2.0"), ("2", "3.0"), ("3", "4.0")]


def test_mistakes_end_with_2_and_the_name_that_was_meant(studying: FakeSandbox) -> None:
    done = studying.dspark("evaluate", "--study", "tow", "--target", "fake")
    assert done.code == 2 and "study 'tow' does not exist" in done.err and "did you mean 'two'?" in done.err
    done = studying.dspark("evaluate", "--study", "two", "--target", "fake", "--set", "drafter.layers=3")
    assert done.code == 2 and "study two varies drafter.layers" in done.err
    assert studying.calls() == []


@pytest.mark.long
def test_a_study_of_the_tiny_target_from_prompts_to_charts(new_sandbox: Sandbox) -> None:
    """Real stages: the figures are those of `evaluate`, of more than one geometry, on one corpus."""
    root = new_sandbox.root
    (root / "pipeline/studies/two.yaml").write_text("vary: {drafter.layers: [1, 2]}\n")
    command = ("evaluate", "--study", "two", "--target", "tiny", "--json", "--set", "export.onnx=false")
    done = new_sandbox.dspark(*command, timeout=600)
    assert done.code == 0, done.err
    report = done.json
    for layers, variant in enumerate(report["variants"], start=1):
        build = root / "builds" / variant["build"]
        metrics = json.loads((build / "evaluate/metrics.json").read_text())
        assert set(variant["temperatures"]) == set(metrics["temperatures"]) == {"0", "1"}
        for temperature, found in variant["temperatures"].items():
            assert found["tau"] == metrics["temperatures"][temperature]["mean_of_domains"]["tau"]
            assert len(found["conditional"]) <= metrics["gamma"] == 4
        trained = json.loads((build / "train/metrics.json").read_text())
        assert f"-l{layers}" in trained["geometry"] == variant["training"]["geometry"]
        assert variant["training"]["seen_tokens"] == trained["seen_tokens"] > trained["train_tokens"]
        assert variant["training"]["seconds"] > 0 and variant["speed"]["value"] > 0
    assert [path.name for path in (root / "corpora").iterdir()] == ["tiny"]
    assert {path.name for path in (root / "studies/tiny/two").iterdir()} == {
        "study.json", "study.csv", "study.svg", "acceptance.svg"}  # fmt: skip
    swept = new_sandbox.dspark("evaluate", "--study", "threshold", *command[3:], timeout=600)
    assert swept.code == 0, swept.err
    rows = list(csv.DictReader((root / "studies/tiny/threshold/study.csv").open()))
    assert {row["threshold"] for row in rows} == {f"0.{tenth}" for tenth in range(9)}


@pytest.mark.long
def test_a_load_study_of_the_tiny_target_is_predicted_before_it_is_timed(new_sandbox: Sandbox) -> None:
    """Real stages and rounds. Prompts that are asked had no part in the prediction, which is older than the
    rounds; more requests than there are prompts are refused."""
    root = new_sandbox.root
    text = "sweep: load\nload: {concurrency: [1, 2, 3], rounds: 4, new_tokens: 12, policies: [scheduled]}\n"
    (root / "pipeline/studies/small.yaml").write_text(text)
    command = ("evaluate", "--study", "small", "--target", "tiny", "--set", "export.onnx=false")
    done = new_sandbox.dspark(*command, "--json", timeout=600)
    assert done.code == 0, done.err
    report, folder = done.json, root / "studies/tiny/small"
    predicted = json.loads((folder / "predicted.json").read_text())
    assert not {*predicted["fitted_on"]} & {*predicted["measured_on"]} and predicted["fitted_on"]
    assert (folder / "predicted.json").stat().st_mtime < (folder / "study.json").stat().st_mtime
    names = ["none", "fixed(1)", "fixed(2)", "fixed(4)", "scheduled"]
    assert [sorted(load["arms"]) for load in report["loads"]] == [sorted(names)] * 3
    assert [(one["concurrency"], one["arm"]) for one in report["compared"]] == [
        (load, name) for load in (1, 2, 3) for name in names]  # fmt: skip
    assert len(predicted["points"]) == 15
    # The profile of the tiny build goes up to two requests: steps of three are measured here.
    cost = json.loads((folder / "cost.json").read_text())
    assert {row["requests"] for row in cost["rows"]} == {1, 2, 3} and "are measured first" in done.err
    assert {path.name for path in folder.iterdir()} == {
        "study.json", "study.csv", "gains.csv", "predictions.csv", "predicted.json", "cost.json", "pareto.svg",
        "budget.svg", "predicted.svg"}  # fmt: skip
    rows = list(csv.DictReader((folder / "study.csv").open()))
    assert len(rows) == 15 and all(float(row["tokens_per_second"]) > 0 for row in rows)

    (root / "pipeline/studies/small.yaml").write_text(text.replace("[1, 2, 3]", "[1, 500]"))
    refused = new_sandbox.dspark(*command, timeout=600)
    assert refused.code == 4 and "too few for 500 requests at a time" in refused.err
    assert (folder / "study.json").is_file()  # of the study before
