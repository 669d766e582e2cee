from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dspark.decoding.drafting import TorchProposer
from dspark.decoding.policies import Fixed, NoDrafts
from dspark.errors import DataError, SettingsError
from dspark.evaluation import throughput
from dspark.evaluation.throughput import NONE, Arm, compare, pareto
from dspark.evaluation.tiny import tiny_drafter, tiny_target
from dspark.io.progress import Progress
from dspark.targets.loading import Target

PROMPTS = [[3, 4, 5], [7] * 9, [2, 9, 30, 4, 5], [11, 12, 13, 14, 15, 16]]


@pytest.fixture(scope="module")
def target() -> Target:
    made = tiny_target(40, spread=0.3)
    made.eos_token_ids = frozenset()  # every text is as long as it may be
    return made


@pytest.fixture(scope="module")
def arms(target: Target) -> list[Arm]:
    proposer = TorchProposer(tiny_drafter(target, 3))
    return [
        Arm(NONE, None, NoDrafts()),
        Arm("torch fixed", proposer, Fixed()),
        Arm("torch fixed(1)", proposer, Fixed(1)),
    ]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, float]], list[tuple[str, int]]]:
    """A clock on which each arm's call takes what the test says; returns the list of calls."""

    def install(seconds: dict[str, float]) -> list[tuple[str, int]]:
        calls: list[tuple[str, int]] = []
        time = [0.0]
        real = throughput.decode

        def decode(*arguments: Any, **options: Any) -> Any:
            calls.append((options["policy"].name, options["max_new_tokens"]))
            done = real(*arguments, **options)
            time[0] += seconds[options["policy"].name]
            return done

        monkeypatch.setattr(throughput, "decode", decode)
        monkeypatch.setattr(throughput, "now", lambda device: time[0])
        return calls

    return install


def test_arms_take_turns_forwards_and_backwards_after_a_warm_up(target: Target, arms: list[Arm], clock):
    calls = clock({"none": 1, "fixed": 1, "fixed(1)": 1})
    compare(target, arms, PROMPTS, rounds=3, max_new_tokens=10)
    order = ["none", "fixed", "fixed(1)"]
    assert [name for name, _ in calls] == order + order + order[::-1] + order
    assert [tokens for _, tokens in calls] == [8] * 3 + [10] * 9


def test_ratios_are_of_tokens_per_second(target: Target, arms: list[Arm], clock):
    """Every call yields 10 tokens: 2 s for plain decoding, 1 s and 4 s with drafts give ratios 2 and 0.5."""
    clock({"none": 2.0, "fixed": 1.0, "fixed(1)": 4.0})
    report = compare(target, arms, PROMPTS, rounds=8, max_new_tokens=10).report()
    none, fast, slow = (report.arms[arm.name] for arm in arms)
    assert none.against_none is None and none.same_text is None
    assert none.load.tokens_per_second.value == pytest.approx(5)
    assert fast.against_none is not None and fast.against_none.value == pytest.approx(2)
    assert slow.against_none is not None and slow.against_none.value == pytest.approx(0.5)
    assert slow.against_none.ci95 == pytest.approx((0.5, 0.5))
    assert (report.rounds, report.prompts, report.dtype, report.threads) == (8, 4, "float32", 1)
    assert fast.against_none.n == 8, "four groups of prompts are too few to be resampled"


def test_speed_and_text_of_the_real_loop_are_reported(target: Target, arms: list[Arm]):
    report = compare(target, arms, PROMPTS, rounds=4, max_new_tokens=12, concurrency=2).report()
    for name, arm in report.arms.items():
        assert arm.load.concurrency == 2 and arm.load.arm == name
        assert arm.load.tokens_per_second.value > 0
        assert 0 < arm.load.ttft_seconds.p50 <= arm.load.ttft_seconds.p99
        assert 0 < arm.load.itl_seconds.p50 <= arm.load.itl_seconds.p95
        assert arm.same_text in (None, 1.0)
        cost = arm.cycle
        assert cost.latency_per_token_predicted_seconds == pytest.approx(
            (cost.draft_seconds.value + cost.verify_seconds.value) / cost.tau
        )
        assert cost.latency_per_token_measured_seconds > 0
    assert report.arms[NONE].cycle.tau == 1 and report.arms[NONE].load.verified_tokens_per_request == 0
    assert report.arms["torch fixed"].load.verified_tokens_per_request == 3
    assert report.arms["torch fixed(1)"].load.verified_tokens_per_request == 1


def test_the_latency_between_tokens_shares_a_cycle_among_its_tokens(target: Target, arms: list[Arm], clock):
    """Per request, wall time after the prefill over tokens after the first: 3 s a call for 9 tokens."""
    clock({"none": 3.0, "fixed": 3.0, "fixed(1)": 3.0})
    report = compare(target, arms, PROMPTS, rounds=2, max_new_tokens=10).report()
    measured = report.arms[NONE].cycle.latency_per_token_measured_seconds
    assert measured == pytest.approx(3 / 9, rel=0.05)


def test_a_single_prompt_is_judged_over_rounds(target: Target, arms: list[Arm], clock):
    clock({"none": 2.0, "fixed": 1.0, "fixed(1)": 1.0})
    comparison = compare(target, arms, PROMPTS[:1], rounds=4, max_new_tokens=6)
    assert comparison.ratio("torch fixed").n == 4
    assert comparison.ratio("torch fixed", [1, 3]).n == 2


def test_progress_counts_arms_and_rounds(target: Target, arms: list[Arm], clock):
    clock({"none": 1, "fixed": 1, "fixed(1)": 1})
    counted = []

    class Counting(Progress):
        def advance(self, count: int = 1, **fields: Any) -> None:
            counted.append(count)

    compare(target, arms, PROMPTS, rounds=2, max_new_tokens=4, progress=Counting())
    assert sum(counted) == 6


def test_comparisons_that_cannot_be_made_are_refused(target: Target, arms: list[Arm]):
    with pytest.raises(SettingsError, match="one named 'none'"):
        compare(target, arms[1:], PROMPTS, rounds=2, max_new_tokens=4)
    with pytest.raises(SettingsError, match="different names"):
        compare(target, [*arms, arms[1]], PROMPTS, rounds=2, max_new_tokens=4)
    with pytest.raises(DataError, match="4 prompts are too few for 5"):
        compare(target, arms, PROMPTS, rounds=2, max_new_tokens=4, concurrency=5)
    with pytest.raises(DataError, match="no cycle to time"):
        compare(target, arms[:1], PROMPTS, rounds=2, max_new_tokens=1).report()


def test_the_frontier_is_what_no_other_point_beats(target: Target, arms: list[Arm], clock):
    """At equal per-user speeds the faster arm beats the slower ones."""
    clock({"none": 2.0, "fixed": 1.0, "fixed(1)": 4.0})
    report = compare(target, arms, PROMPTS, rounds=4, max_new_tokens=10).report()
    even = {
        name: arm.model_copy(
            update={"load": arm.load.model_copy(update={"tokens_per_second_per_user": arm.load.tokens_per_second})}
        )
        for name, arm in report.arms.items()
    }
    found = pareto([report.model_copy(update={"arms": even})])
    assert {point.arm: point.on_frontier for point in found.points} == {
        "none": False, "torch fixed": True, "torch fixed(1)": False}  # fmt: skip
    assert (found.dtype, found.threads) == ("float32", 1)


def test_dtypes_are_spelt_as_in_settings():
    assert tiny_target(4, dtype=torch.bfloat16).dtype_name == "bfloat16"
