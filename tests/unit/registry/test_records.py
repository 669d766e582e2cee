"""What a run shows is what the package's JSON says, within MLflow's limits."""

from __future__ import annotations

import shutil

import pytest

from dspark.errors import IntegrityError
from dspark.package.verify import read_manifest
from dspark.registry import records

STAGES = [
    {"stage": "train", "key": "demo", "status": "ran", "seconds": 12.5},
    {"stage": "evaluate", "key": "demo", "status": "restored"},
]


def test_parameters_are_the_settings_flattened(pristine):
    found = records.parameters(read_manifest(pristine))
    assert found["recipe.training.steps"] == "5"
    assert found["drafter.gamma"] == "3"
    assert found["drafter.taps"] == "[0,2]"
    assert found["corpus.domains"] == '["math","chat"]'
    assert found["target.public_id"] == "org/tiny-llama"
    assert all(isinstance(value, str) and len(key) <= 250 and len(value) <= 6000 for key, value in found.items())


def test_a_value_that_is_too_long_is_cut_visibly_and_stays_different():
    manifest = type("M", (), {})  # only what `parameters` asks for
    fitted = [records._fitted("x" * 7000 + end, 6000) for end in "ab"]
    assert all(len(value) == 6000 and "sha256:" in value for value in fitted)
    assert fitted[0] != fitted[1]
    assert records._fitted("x" * 6000, 6000) == "x" * 6000
    assert manifest is not None


def test_every_measured_number_comes_with_its_interval(pristine):
    found = records.metrics(pristine, STAGES)
    assert found["evaluate.temperatures.0.domains.math.tau"] == 2.0
    assert found["evaluate.temperatures.0.domains.math.tau.ci95_low"] == pytest.approx(1.9)
    assert found["evaluate.temperatures.0.domains.math.tau.ci95_high"] == pytest.approx(2.1)
    assert found["evaluate.temperatures.0.domains.math.tau.n"] == 12
    assert found["evaluate.temperatures.0.mean_of_domains.tau"] == 1.75
    assert found["calibrate.results.temperature1.held_out.mean_ece_after"] == 0.02
    assert found["certify.entries.cpu-reference.against_none.fixed-concurrency4.ratio"] == 0.8  # bad news too
    assert found["stage.train.demo.seconds"] == 12.5
    assert "stage.evaluate.demo.seconds" not in found


def test_curves_leave_out_what_is_absent(pristine):
    """The file: step 1 with a loss and no dev value, step 2 with both."""
    assert list(records.curves(pristine)) == [
        ("train.loss", 3.5, 1),
        ("train.loss", 3.25, 2),
        ("train.dev_anchor_tau", 1.5, 2),
    ]


@pytest.mark.parametrize("text", ["loss\n3.5\n", "step,loss\nx,3.5\n", "step,loss\n1,y\n", "step,loss\n1,2,3\n"])
def test_a_damaged_curve_is_an_integrity_error_with_its_line(pristine, tmp_path, text):
    folder = shutil.copytree(pristine, tmp_path / "p")
    (folder / "evidence/train/curves.csv").write_text(text)
    with pytest.raises(IntegrityError, match=r"curves\.csv:2"):
        list(records.curves(folder))


def test_tags_say_where_it_comes_from(pristine):
    manifest = read_manifest(pristine)
    found = records.tags(pristine, manifest, STAGES)
    assert found["dspark.package_digest"] == manifest.digests.package_digest
    assert found["dspark.git_commit"] == "0123456789abcdef" and found["dspark.git_dirty"] == "true"
    assert found["dspark.target_revision"] == "r1"
    assert found["dspark.dvc_lock_sha256"].startswith("unknown: ")
    assert found["dspark.stage.evaluate.demo"] == "restored"


def test_keys_hold_only_what_mlflow_allows():
    assert records.metric_key("a@b(c)") == "a_b_c_"
    assert len(records.metric_key("x" * 300)) == 250
