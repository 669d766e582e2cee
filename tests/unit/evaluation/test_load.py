"""Predictions against the real loop, on a clock that its passes turn by what the prediction takes them to cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dspark.config.models import LoadSettings
from dspark.decoding import loop
from dspark.decoding.drafting import TorchProposer
from dspark.decoding.loop import ContinuousBatch, decode
from dspark.decoding.policies import Fixed
from dspark.decoding.prefixes import Counts
from dspark.errors import DataError, SettingsError
from dspark.evaluation import throughput
from dspark.evaluation.load import fixed_lengths, load_arms, measure_load
from dspark.evaluation.load_report import PredictedLoad, load_report, predict_load
from dspark.evaluation.prediction import Recorded
from dspark.evaluation.tiny import tiny_drafter, tiny_target
from dspark.scheduling.cost import CostCurve
from dspark.scheduling.prefix import PrefixScheduler
from dspark.targets.loading import Target

GAMMA = 3
SETTINGS = LoadSettings(concurrency=(1, 4), lengths=(1, 3), rounds=4, new_tokens=16, predicted_rounds=40)
CURVE = CostCurve(
    sample_batch_tokens=(1, 2, 4, 8, 16), sample_steps_per_second=(0.9, 0.8, 0.7, 0.5, 0.3), max_batch_tokens=16
)


class Times:
    """Seconds of a step by its requests and tokens."""

    def drafting(self, lengths: Counts, contexts: Counts) -> float:
        return 1.0 + 0.1 * len(lengths) + 0.05 * float((lengths + 1).sum())

    def plain(self, contexts: Counts) -> float:
        return 0.9 + 0.05 * len(contexts)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(40, spread=0.3, eos_token_ids=(1, 2))


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes over drafts take what `Times` says, everything else takes no time."""
    clock = [0.0]
    real = ContinuousBatch._verify

    def verify(batch: ContinuousBatch, ids: Any, lengths: Counts) -> Any:
        contexts = np.zeros(len(lengths), np.int64)
        clock[0] += Times().plain(contexts) if batch.proposer is None else Times().drafting(lengths, contexts)
        return real(batch, ids, lengths)

    monkeypatch.setattr(ContinuousBatch, "_verify", verify)
    for module in (loop, throughput):
        monkeypatch.setattr(module, "now", lambda device: clock[0])


def test_predicted_rounds_are_those_of_the_engine(target: Target, clocked: None):
    """Prompts are fitted on that are measured, too, so that all that is left are the places of cycles: which ones an
    answer has is drawn at random."""
    generator = np.random.default_rng(5)
    prompts = generator.integers(3, 40, (4, 6)).tolist()
    proposer = TorchProposer(tiny_drafter(target, GAMMA))
    records = decode(target, proposer, prompts, max_new_tokens=16, policy=Fixed(), batch_size=8)
    arms = load_arms(proposer, SETTINGS, scheduler=PrefixScheduler(CURVE, GAMMA))
    assert [arm.name for arm in arms] == [
        "none", "fixed(1)", "fixed(3)", "threshold(0.5)", "scheduled", "scheduled-delayed"]  # fmt: skip
    policies = {arm.name: arm.policy for arm in arms}
    points = predict_load(Recorded.of(records, SETTINGS.new_tokens), policies, Times(), SETTINGS)
    predicted = PredictedLoad(
        made_at="2026-12-01T10:00:00+00:00",
        build="b",
        target="t",
        gamma=GAMMA,
        settings=SETTINGS,
        cost_profile="cpu",
        fitted_on=("a",),
        measured_on=("b",),
        points=points,
    )
    report = load_report("load", predicted, measure_load(target, arms, prompts, SETTINGS))
    assert len(report.compared) == 2 * len(arms)
    assert report.median_tokens_per_second_error < 0.05 and report.median_latency_per_token_error < 0.05
    alone = {one.arm: one for one in report.compared if one.concurrency == 1}
    assert alone["none"].tokens_per_second_error == pytest.approx(0)
    for one in report.compared:
        assert one.predicted.tau == pytest.approx(one.tau, rel=0.1), one
    verified = {
        (arm.load.concurrency, name): arm.load.verified_tokens_per_request
        for each in report.loads for name, arm in each.arms.items()
    }  # fmt: skip
    for one in report.compared:
        assert one.predicted.verified_tokens_per_request == pytest.approx(verified[one.concurrency, one.arm], abs=0.3)
    assert [each.arms["scheduled"].same_text for each in report.loads] == [1.0, 1.0]


def test_fixed_lengths_double_up_to_the_whole_block():
    assert [fixed_lengths(LoadSettings(), gamma) for gamma in (1, 2, 4, 7)] == [(1,), (1, 2), (1, 2, 4), (1, 2, 4, 7)]
    assert fixed_lengths(LoadSettings(lengths=(3, 1)), 4) == (1, 3)
    with pytest.raises(SettingsError, match=r"load.lengths goes up to 5, a block has 4 drafts"):
        fixed_lengths(LoadSettings(lengths=(5,)), 4)


def test_loads_that_cannot_be_measured_are_refused(target: Target):
    proposer = TorchProposer(tiny_drafter(target, 1))
    twice = load_arms(proposer, LoadSettings(policies=("fixed(1)",)))
    with pytest.raises(SettingsError, match="need different names"):
        measure_load(target, twice, [[3]] * 2, LoadSettings(concurrency=(1,)))
    with pytest.raises(DataError, match="1 prompts are too few for 2"):
        measure_load(target, twice[:2], [[3]], LoadSettings(concurrency=(2,)))
