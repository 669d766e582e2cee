"""Profiling a SGLang server by its records, against one that speaks its protocol and takes the time it is told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))  # protocol_servers.py

from protocol_servers import Engine, SGLangDouble, SGLangProfilingDouble, serving

from dspark.config.models import ServingProfile
from dspark.engines.sglang_client import SGLangClient
from dspark.errors import DataError, PreflightError
from dspark.evaluation.tiny import tiny_drafter, tiny_target
from dspark.profiling.cost import CostReport
from dspark.profiling.sglang import profile_sglang, verified_tokens

PROFILE = ServingProfile(
    name="here", engine="sglang", access="url", url="http://a:1", plain_url="http://a:2", profile_url="http://a:3",
    requests=(1, 4), contexts=(8, 20), warmup=3, repeats=8,
)  # fmt: skip


def milliseconds(requests: int, tokens: int) -> float:
    return 10.0 + 0.5 * requests + 1.0 * tokens


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    target = tiny_target(24, spread=0.4, seed=3)
    return target, tiny_drafter(target, 4, seed=1)


def run(pair: tuple[Any, Any], double: Any, gamma: int | None = None) -> CostReport:
    target, drafter = pair
    config = drafter.config if gamma is None else drafter.config.model_copy(update={"gamma": gamma})
    with serving(double) as address:
        return profile_sglang(SGLangClient(address), target.record, config, PROFILE, {"threads": 1})


def test_requests_and_tokens_vary_apart_where_budgets_can_be_forced(pair: tuple[Any, Any]) -> None:
    double = SGLangProfilingDouble(Engine(*pair), milliseconds)
    report = run(pair, double)
    # Requests 1 and 4, none, half and all of four drafts, at two contexts: the warm-up's slow steps are left out.
    assert {(row.requests, row.verify_tokens) for row in report.rows} == {
        (1, 1),
        (1, 3),
        (1, 5),
        (4, 4),
        (4, 12),
        (4, 20),
    }
    assert len(report.rows) == 12 and {row.context for row in report.rows} == {8, 20}
    for row in report.rows:
        assert row.step_seconds == pytest.approx(milliseconds(row.requests, row.verify_tokens) / 1000)
        assert row.draft_seconds == pytest.approx(0.002) and row.n == 8
    assert report.curve is not None and report.curve.sample_batch_tokens == (1, 3, 4, 5, 12, 20)
    assert report.plain == () and "plain" in report.absent
    assert {(row.requests, row.context) for row in report.drafting} == {(1, 8), (1, 20), (4, 8), (4, 20)}
    assert double.forced[-1] is None, "afterwards the server chooses for itself"
    assert double.flushed == 24, "before every round"


def test_in_static_mode_whole_blocks_are_timed(pair: tuple[Any, Any]) -> None:
    double = SGLangProfilingDouble(Engine(*pair), milliseconds, mode="static")
    report = run(pair, double)
    assert {(row.requests, row.verify_tokens) for row in report.rows} == {(1, 5), (4, 20)}
    assert double.forced == []


@pytest.mark.parametrize(
    ("dump", "message"),
    [
        ({"components": ["core"]}, "does not record draft_gpu_time, step_cpu_time"),
        ({"simulate_acc_len": -1}, "simulates an acceptance of -1, not 1.0"),
        ({"mode": "other"}, "verifies in mode other"),
    ],
)
def test_a_server_that_is_not_in_profiling_mode_is_told_how(
    pair: tuple[Any, Any], dump: dict[str, Any], message: str
) -> None:
    double = SGLangProfilingDouble(Engine(*pair), milliseconds)
    double.information["internal_states"][0]["dspark_info_record"] |= dump
    with pytest.raises(PreflightError, match=message) as caught:
        run(pair, double)
    assert "SGLANG_SIMULATE_ACC_LEN=1.0" in str(caught.value.hint)


def test_servers_that_cannot_be_profiled_are_refused(pair: tuple[Any, Any]) -> None:
    engine = Engine(*pair)
    with pytest.raises(PreflightError, match="records no steps"):
        run(pair, SGLangDouble(engine))
    with pytest.raises(PreflightError, match="without CUDA graphs"):
        run(pair, SGLangDouble(engine, disable_cuda_graph=True))
    with pytest.raises(DataError, match="drafts blocks of 4, the build's drafter has gamma 7"):
        run(pair, SGLangProfilingDouble(engine, milliseconds), gamma=7)


def test_a_budget_that_is_not_taken_is_noticed(pair: tuple[Any, Any]) -> None:
    """Once refused by the server, once accepted and not followed."""

    class Refuses(SGLangProfilingDouble):
        def post(self, path: str, body: dict[str, Any]) -> Any:
            answer = super().post(path, body)
            return [{"updated": False}] if path == "/set_internal_state" else answer

    class Ignores(SGLangProfilingDouble):
        def post(self, path: str, body: dict[str, Any]) -> Any:
            if path == "/set_internal_state":
                return [{"updated": True}]
            return super().post(path, body)

    with pytest.raises(PreflightError, match="refuses a forced budget"):
        run(pair, Refuses(Engine(*pair), milliseconds))
    with pytest.raises(DataError, match=r"recorded 0 steps of 1 requests and 1 tokens, 4 were to be timed"):
        run(pair, Ignores(Engine(*pair), milliseconds))


def test_a_forced_budget_is_rounded_down_over_all_requests() -> None:
    assert [verified_tokens(3, share, 7) for share in (0.0, 0.5, 1.0, None)] == [3, 13, 24, 24]
