from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from dspark.errors import CostCurveError, DataError, SettingsError
from dspark.scheduling import (
    AdditiveCost,
    CostCurve,
    DelayedPrefixScheduler,
    PrefixScheduler,
    SchedulerConfig,
    Temperatures,
)
from dspark.scheduling.config import read_scheduler, write_scheduler

CURVE = CostCurve(sample_batch_tokens=[1, 8], sample_steps_per_second=[30, 20], max_batch_tokens=64)


def config(**changes):
    values = {
        "gamma": 2,
        "calibrations": [
            Temperatures(temperature=0.0, label="greedy_match", temperatures=(1.5, 1.0)),
            Temperatures(temperature=1.0, label="sampled", temperatures=(1.2, 0.9)),
        ],
        "curves": {"cpu": CURVE},
    }
    return SchedulerConfig(**{**values, **changes})


def test_what_is_written_is_read_back(tmp_path):
    wanted = config(policy="threshold(0.4)", min_budget=1, max_budget=9, min_predicted_gain=0.02)
    write_scheduler(tmp_path / "scheduler.json", wanted)
    assert json.loads((tmp_path / "scheduler.json").read_text())["schema"] == "dspark/scheduler/1"
    assert read_scheduler(tmp_path / "scheduler.json") == wanted


@pytest.mark.parametrize("policy", ["none", "fixed(3)", "threshold(0.4)", "scheduled", "scheduled-delayed"])
def test_the_known_policies_are_accepted(policy):
    assert config(policy=policy).policy == policy


@pytest.mark.parametrize("policy", ["fixed", "fixed(0)", "threshold(1.5)", "auto", "scheduled "])
def test_other_policies_are_refused(policy):
    with pytest.raises(ValidationError, match="policy"):
        config(policy=policy)


def test_a_file_with_a_useless_curve_is_refused_by_name_and_reason(tmp_path):
    path = tmp_path / "scheduler.json"
    write_scheduler(path, config())
    broken = json.loads(path.read_text())
    broken["curves"]["cpu"]["sample_steps_per_second"] = [20, 20]
    path.write_text(json.dumps(broken))
    with pytest.raises(CostCurveError, match=r"scheduler\.json: cost curve: flat"):
        read_scheduler(path)


def test_another_schema_is_refused(tmp_path):
    path = tmp_path / "scheduler.json"
    write_scheduler(path, config())
    path.write_text(path.read_text().replace("scheduler/1", "scheduler/2"))
    with pytest.raises(DataError, match="scheduler/2"):
        read_scheduler(path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gamma": 3}, "2 temperatures for gamma 3"),
        ({"min_budget": 4, "max_budget": 3}, "below min_budget"),
        ({"calibrations": []}, "calibrations"),
        ({"calibrations": config().calibrations + config().calibrations[:1]}, "two calibrations for temperature 0"),
    ],
)
def test_an_inconsistent_config_is_refused(changes, says):
    with pytest.raises(ValidationError, match=says):
        config(**changes)


def test_a_temperature_of_zero_is_refused():
    with pytest.raises(ValidationError, match="greater than 0"):
        Temperatures(temperature=0.0, label="greedy_match", temperatures=(0.0,))


def test_calibrations_are_found_by_their_exact_key():
    assert config().calibration(0.0).temperatures == (1.5, 1.0)
    assert config().calibration(1.0).temperatures == (1.2, 0.9)
    greedy_labels = {"temperature": 1.0, "label": "greedy_match"}
    for wanted in ({"temperature": 0.7}, greedy_labels, {"temperature": 1.0, "top_k": 5}):
        with pytest.raises(SettingsError, match="no calibration for") as caught:
            config().calibration(**wanted)
        assert "temperature 1, top_k 0, top_p 1, rule standard, label sampled" in caught.value.hint


def test_a_scheduler_is_made_for_a_profile_and_a_temperature():
    scheduler = config(min_budget=1, max_budget=4, min_predicted_gain=0.1).scheduler("cpu", 1.0)
    assert type(scheduler) is PrefixScheduler
    assert scheduler.cost == CURVE
    assert scheduler.temperatures.tolist() == [1.2, 0.9]
    assert (scheduler.min_budget, scheduler.max_budget, scheduler.min_predicted_gain) == (1, 4, 0.1)
    assert type(config(policy="scheduled-delayed").scheduler("cpu", 0.0)) is DelayedPrefixScheduler


def test_an_unmeasured_profile_is_refused_with_the_measured_ones():
    with pytest.raises(SettingsError, match="serving profile 'gpu'") as caught:
        config().scheduler("gpu", 1.0)
    assert caught.value.hint == "there are: cpu"
    with pytest.raises(SettingsError) as caught:
        config(curves={}).curve("cpu")
    assert caught.value.hint == "there are: none"


def test_importing_scheduling_loads_no_torch():
    heavy = "('torch', 'transformers', 'mlflow', 'dvc')"
    code = f"import sys, dspark.scheduling; print([m for m in {heavy} if m in sys.modules])"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == "[]"


def test_additive_costs_are_kept_beside_the_curves_and_a_file_from_before_has_none(tmp_path):
    cost = AdditiveCost(
        bias_seconds=0.01, requests=(1, 4), alpha_seconds=(0, 0.003), tokens=(2, 8), theta_seconds=(0, 0.006)
    )
    path = tmp_path / "scheduler.json"
    write_scheduler(path, config(additive={"cpu": cost}))
    assert read_scheduler(path).additive == {"cpu": cost}
    assert read_scheduler(path).cost("cpu") is not cost, "the curve schedules unless the file says otherwise"
    write_scheduler(path, config(additive={"cpu": cost}, cost_models={"cpu": "additive"}))
    assert read_scheduler(path).scheduler("cpu", 0.0).cost == cost
    with pytest.raises(ValidationError, match="by a cost that it does not have: additive"):
        config(cost_models={"cpu": "additive"})
    value = json.loads(path.read_text())
    value["additive"]["cpu"]["theta_seconds"] = [0.006, 0.006]
    path.write_text(json.dumps(value))
    with pytest.raises(CostCurveError, match=r"scheduler\.json: additive cost: flat"):
        read_scheduler(path)
    del value["additive"], value["cost_models"]
    path.write_text(json.dumps(value))
    assert read_scheduler(path) == config()


def test_shorter_blocks_keep_the_temperatures_of_their_drafts_and_everything_else():
    cut = config(min_budget=1, max_budget=9, min_predicted_gain=0.02).cut(1)
    assert (cut.gamma, cut.calibration(0.0).temperatures, cut.calibration(1.0).temperatures) == (1, (1.5,), (1.2,))
    scheduler = cut.scheduler("cpu", 0.0)
    assert (scheduler.gamma, scheduler.min_budget, scheduler.max_budget) == (1, 1, 9)
    assert config().cut(2) == config()
    with pytest.raises(SettingsError, match="blocks of 2 drafts cannot be cut to 3"):
        config().cut(3)


def test_without_confidences_only_fixed_policies_stand_in_a_scheduler():
    fixed = SchedulerConfig(gamma=3, curves={}, policy="fixed(3)")
    with pytest.raises(SettingsError, match="no calibration for temperature 0") as refusal:
        fixed.calibration(0.0)
    assert refusal.value.hint == "there are: none"
    for policy in ("scheduled", "threshold(0.5)"):
        with pytest.raises(ValidationError, match="calibrations: there are none, and policy"):
            SchedulerConfig(gamma=3, curves={}, policy=policy)
