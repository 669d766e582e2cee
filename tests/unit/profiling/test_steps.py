from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dspark.config.models import ServingProfile
from dspark.decoding.drafting import TorchProposer
from dspark.decoding.history import Timing
from dspark.decoding.loop import Batch
from dspark.decoding.policies import Policy
from dspark.errors import CostCurveError, DataError, SettingsError
from dspark.evaluation.tiny import tiny_drafter, tiny_target
from dspark.io.jsonfile import read_model, write_model
from dspark.profiling.cost import CostReport, CostRow, fit_curve
from dspark.profiling.steps import Verify, _in_turn, profile_engine
from dspark.targets.loading import Target

GAMMA = 3


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(40, max_position=400)


def profile(**changes: object) -> ServingProfile:
    fields = {"dtype": "float32", "requests": (1, 3), "contexts": (8, 40), "warmup": 1, "repeats": 5}
    return ServingProfile.model_validate(
        {"name": "here", "engine": "reference", "access": "local", **fields, **changes}
    )


class Clock:
    """Steps that cost what the test says: 10 ms, 1 ms per verified token, 2 ms for drafting; ten times that in the
    warm-up. The real loop runs underneath."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, warmup: int = 1) -> None:
        self.seen: list[tuple[str, int]] = []
        self.batches: dict[int, int] = {}
        real = Batch.cycle

        def cycle(batch: Batch) -> Timing:
            real(batch)
            policy: Policy = batch.policy
            number = self.batches.get(id(batch), 0)
            self.batches[id(batch)] = number + 1
            self.seen.append((policy.name, batch.active))
            width = 1 + (policy.count if isinstance(policy, Verify) else 0)
            slow = 10 if number < warmup * (3 if isinstance(policy, Verify) else 1) else 1
            draft = 0.002 if policy.drafts else 0.0
            return Timing(slow * draft, slow * (0.010 + 0.001 * width * batch.active), batch.active)

        monkeypatch.setattr(Batch, "cycle", cycle)


def test_rows_vary_requests_tokens_and_contexts_apart(target: Target, monkeypatch: pytest.MonkeyPatch):
    """With a made-up clock every median is known: 10 ms + 1 ms per token, and 2 ms for drafting."""
    Clock(monkeypatch)
    config = tiny_drafter(target, GAMMA).config
    report = profile_engine(target, config, profile(), {"engine_version": "1"})
    shapes = {(row.requests, row.verify_tokens, row.context) for row in report.rows}
    assert shapes == {(r, r * w, c) for r in (1, 3) for w in (1, 2, 4) for c in (8, 40)}
    for row in report.rows:
        assert row.draft_seconds == pytest.approx(0.002)
        assert row.verify_seconds == pytest.approx(0.010 + 0.001 * row.verify_tokens)
        assert row.step_seconds == pytest.approx(0.012 + 0.001 * row.verify_tokens)
        assert row.n == 5 and row.ci95 == pytest.approx((row.step_seconds, row.step_seconds))
    assert {(row.requests, row.verify_tokens, row.draft_seconds) for row in report.plain} == {(1, 1, 0), (3, 3, 0)}
    assert {(row.backend, row.requests, row.context, row.n) for row in report.drafting} == {
        ("torch", r, c, 15) for r in (1, 3) for c in (8, 40)
    }
    assert report.curve is not None and report.curve_changes == ()
    assert report.curve.sample_batch_tokens == (1, 2, 3, 4, 6, 12)
    assert report.curve.max_batch_tokens == 12
    for tokens in (1, 2, 3, 4, 6, 12):
        assert report.curve.step_seconds(tokens) == pytest.approx(0.012 + 0.001 * tokens)


def test_a_real_profile_survives_writing_and_reading(target: Target, tmp_path: Path):
    config = tiny_drafter(target, GAMMA, draft_token_ids=(2, 5, 9)).config
    report = profile_engine(target, config, profile(requests=(2,)), {"engine_version": "1"})
    assert report.geometry.endswith("v3") and report.gamma == GAMMA
    assert all(row.step_seconds > 0 and row.ci95[0] <= row.step_seconds <= row.ci95[1] for row in report.rows)
    write_model(tmp_path / "cost.json", report)
    assert read_model(tmp_path / "cost.json", CostReport) == report


def test_other_backends_draft_in_the_same_report(target: Target, monkeypatch: pytest.MonkeyPatch):
    """The profile's backend fills the rows; the others are timed for drafting alone."""
    Clock(monkeypatch)
    config = tiny_drafter(target, GAMMA).config
    made = []

    def backends(drafter):
        made.append(TorchProposer(drafter))
        return {"onnxruntime": made[0]}

    report = profile_engine(target, config, profile(draft_backend="onnxruntime", requests=(2,)), {}, backends=backends)
    assert report.draft_backend == "onnxruntime"
    assert {row.backend for row in report.drafting} == {"torch", "onnxruntime"}
    assert len(report.rows) == 3 * 2
    with pytest.raises(SettingsError, match="draft backend 'onnxruntime' is not available"):
        profile_engine(target, config, profile(draft_backend="onnxruntime"), {})


def test_texts_do_not_end_while_they_are_timed(target: Target, monkeypatch: pytest.MonkeyPatch):
    """A target that says little but its end of sequence still gives every step all of its requests."""
    clock = Clock(monkeypatch)
    talkative = tiny_target(4, eos_token_ids=(1, 2, 3), max_position=400)
    profile_engine(talkative, tiny_drafter(talkative, GAMMA).config, profile(requests=(3,)), {})
    assert {active for _, active in clock.seen} == {3}


def test_shapes_take_turns_forwards_and_backwards():
    assert list(_in_turn(3, 2)) == [(0, 0), (0, 1), (1, 1), (1, 0), (2, 0), (2, 1)]


def test_settings_that_tell_nothing_apart_are_refused(target: Target, processor_flags):
    processor_flags("avx512_bf16")
    config = tiny_drafter(target, GAMMA).config
    with pytest.raises(SettingsError, match="contexts need two lengths or more"):
        profile_engine(target, config, profile(contexts=(8, 8)), {})
    with pytest.raises(SettingsError, match=r"dtype is bfloat16, the target is in torch\.float32"):
        profile_engine(target, config, profile(dtype="bfloat16"), {})
    with pytest.raises(DataError, match="the target has 400"):
        profile_engine(target, config, profile(contexts=(8, 380)), {})


def row(tokens: int, seconds: float) -> CostRow:
    return CostRow(
        requests=1, verify_tokens=tokens, context=8, draft_seconds=0, verify_seconds=seconds,
        step_seconds=seconds, n=5, ci95=(seconds, seconds),
    )  # fmt: skip


def test_the_curve_is_the_median_step_of_each_token_count():
    curve, changes = fit_curve([row(1, 0.01), row(1, 0.02), row(1, 0.5), row(8, 0.04)], 16)
    assert curve.sample_steps_per_second == pytest.approx((50, 25))
    assert changes == ()


def test_noise_in_the_curve_is_flattened_and_reported():
    """0.03 s at 2 tokens after 0.04 s at 1 is noise; pooled they take 0.035 s each."""
    curve, changes = fit_curve([row(1, 0.04), row(2, 0.03), row(8, 0.1)], 8)
    assert curve.sample_steps_per_second == pytest.approx((1 / 0.035, 1 / 0.035, 10))
    assert [(one.tokens, one.steps_per_second_before) for one in changes] == [(1, 25), (2, pytest.approx(1 / 0.03))]


def test_a_flat_curve_is_refused_and_the_report_says_so(target: Target, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(CostCurveError, match="flat"):
        fit_curve([row(1, 0.04), row(8, 0.04)], 8)
    with pytest.raises(CostCurveError, match="no step was measured"):
        fit_curve([], 8)
    real = Batch.cycle
    monkeypatch.setattr(Batch, "cycle", lambda batch: (real(batch), Timing(0.0, 0.01, batch.active))[1])
    report = profile_engine(target, tiny_drafter(target, GAMMA).config, profile(requests=(2,)), {})
    assert report.curve is None and "flat" in report.absent["curve"]
