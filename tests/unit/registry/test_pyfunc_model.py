"""The registered model in itself; loading it from the registry is tested with publishing."""

from __future__ import annotations

from types import SimpleNamespace

import fake_build
import numpy as np
import pytest

from dspark.errors import CalibrationError, SettingsError
from dspark.scheduling.additive import AdditiveCost
from dspark.scheduling.config import SchedulerConfig, write_scheduler

LOGITS = np.array([[9.0, 8.0, -9.0], [-2.0, 1.0, 1.0]], np.float32)


def model(folder, **changes):
    from dspark.registry.pyfunc_model import VerificationLengths

    config = SchedulerConfig(
        gamma=3, calibrations=fake_build.calibration().temperatures, curves={"cpu": fake_build.curve()}
    ).model_copy(update=changes)
    write_scheduler(folder / "scheduler" / "scheduler.json", config)
    loaded = VerificationLengths()
    loaded.load_context(SimpleNamespace(artifacts={"package": str(folder)}))
    return lambda logits, **params: loaded.predict(None, logits, params)


def test_lengths_of_a_step(tmp_path):
    """Worked out by hand in the test of publishing; one request alone: theta 100, 199.8 at one draft, 285 at two."""
    predict = model(tmp_path)
    assert predict(LOGITS).tolist() == [2, 3]
    assert predict(LOGITS[:1]).tolist() == [2]
    assert predict(LOGITS[:0]).tolist() == []


def test_the_cost_that_the_package_schedules_by_counts(tmp_path):
    """10 ms a token and no bias to share: 2 / 20 ms without drafts, hardly 3 / 30 ms with the likeliest one."""
    steep = AdditiveCost(
        bias_seconds=0.01, requests=(1,), alpha_seconds=(0.0,), tokens=(1, 8), theta_seconds=(0.0, 0.07)
    )
    assert model(tmp_path, additive={"cpu": steep})(LOGITS).tolist() == [2, 3]
    assert model(tmp_path, additive={"cpu": steep}, cost_models={"cpu": "additive"})(LOGITS).tolist() == [0, 0]
    alone = {"curves": {}, "additive": {"gpu": steep}, "cost_models": {"gpu": "additive"}}
    assert model(tmp_path, **alone)(LOGITS).tolist() == [0, 0]


def test_budgets_of_the_package_are_kept(tmp_path):
    assert model(tmp_path, max_budget=1)(LOGITS).tolist() == [1, 0]


def test_a_profile_must_be_named_where_there_are_several_or_none(tmp_path):
    two = {"cpu": fake_build.curve(), "gpu": fake_build.curve()}
    with pytest.raises(SettingsError, match="costs of 2 serving profiles"):
        model(tmp_path, curves=two)(LOGITS)
    assert model(tmp_path, curves=two)(LOGITS, profile="gpu").tolist() == [2, 3]
    with pytest.raises(SettingsError, match="costs of 0 serving profiles"):
        model(tmp_path, curves={})(LOGITS)


def test_what_was_not_measured_is_refused(tmp_path):
    predict = model(tmp_path)
    with pytest.raises(SettingsError):
        predict(LOGITS, profile="other")
    with pytest.raises(SettingsError):
        predict(LOGITS, temperature=0.7)
    with pytest.raises(CalibrationError):
        predict(LOGITS[:, :2])
    with pytest.raises(CalibrationError, match="NaN"):
        predict(np.full((1, 3), np.nan))


def test_whole_blocks_are_verified_of_a_drafter_without_confidences(tmp_path):
    predict = model(tmp_path, calibrations=(), policy="fixed(3)")
    assert predict(np.full((2, 3), np.nan, np.float32)).tolist() == [3, 3]
