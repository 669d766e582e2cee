from __future__ import annotations

import numpy as np
import pytest

from dspark.errors import DataError
from dspark.profiling.cost import CostReport, CostRow
from dspark.profiling.times import MeasuredSteps


def row(requests: int, tokens: int, context: int, seconds: float) -> CostRow:
    return CostRow(requests=requests, verify_tokens=tokens, context=context, draft_seconds=seconds / 4,
                   verify_seconds=3 * seconds / 4, step_seconds=seconds, n=5, ci95=(seconds, seconds))  # fmt: skip


def seconds(requests: float, tokens: float, context: float) -> float:
    return 1 + 0.5 * requests + 0.25 * tokens + 0.01 * context


@pytest.fixture
def report() -> CostReport:
    rows = tuple(
        row(requests, requests * (1 + drafts), context, seconds(requests, requests * (1 + drafts), context))
        for context in (64, 256)
        for requests in (1, 4)
        for drafts in (0, 1, 4)
    )
    plain = tuple(row(requests, requests, context, 0.5 * requests) for context in (64, 256) for requests in (1, 4))
    return CostReport(profile="cpu", target="t", target_digest="0", geometry="g", gamma=4, dtype="float32", threads=1,
                      draft_backend="torch", warmup=1, repeats=5, fingerprint={}, rows=rows, plain=plain,
                      drafting=())  # fmt: skip


def test_a_cost_that_is_linear_is_found_everywhere_between_what_was_measured(report: CostReport):
    """Tokens are requests times tokens per request, which is linear in each of them."""
    steps = MeasuredSteps(report)
    for requests in (1, 2, 3, 4):
        for drafts in (0, 1, 2, 3, 4):
            for context in (64, 100, 256):
                lengths = np.full(requests, drafts)
                expected = seconds(requests, requests * (1 + drafts), context)
                assert steps.drafting(lengths, np.full(requests, context)) == pytest.approx(expected)
    assert steps.plain(np.array([64, 70, 80])) == pytest.approx(1.5)
    assert steps.most_requests == 4


def test_rows_of_different_lengths_cost_what_the_engine_makes_of_them(report: CostReport):
    """Rows of 1 and 4 tokens: 3 of 8 places would be padding, so 5 tokens are computed; of 3 and 4, 8 are."""
    contexts = np.array([64, 64])
    assert MeasuredSteps(report).drafting(np.array([0, 3]), contexts) == pytest.approx(seconds(2, 5, 64))
    assert MeasuredSteps(report).drafting(np.array([2, 3]), contexts) == pytest.approx(seconds(2, 8, 64))
    assert MeasuredSteps(report, packs=False).drafting(np.array([0, 3]), contexts) == pytest.approx(seconds(2, 8, 64))


def test_a_pass_reads_as_far_as_the_longest_context(report: CostReport):
    assert MeasuredSteps(report).drafting(np.array([1, 1]), np.array([64, 200])) == pytest.approx(seconds(2, 4, 200))


def test_what_was_not_measured(report: CostReport):
    """Shorter and longer contexts cost what the nearest ones do; more requests are refused."""
    steps = MeasuredSteps(report)
    assert steps.drafting(np.array([0]), np.array([5])) == pytest.approx(seconds(1, 1, 64))
    assert steps.drafting(np.array([0]), np.array([5000])) == pytest.approx(seconds(1, 1, 256))
    with pytest.raises(DataError, match="measured steps of 4 requests at most, not of 5"):
        steps.plain(np.full(5, 64))
    with pytest.raises(DataError, match="no step of profile cpu was measured"):
        MeasuredSteps(report.model_copy(update={"rows": ()}))


def test_fewer_requests_than_were_measured_cost_what_the_fewest_do(report: CostReport):
    """The tail of a round: one request where four are the least."""
    at_four = {name: tuple(row for row in getattr(report, name) if row.requests == 4) for name in ("rows", "plain")}
    steps = MeasuredSteps(report.model_copy(update=at_four))
    assert (steps.least_requests, steps.most_requests) == (4, 4)
    assert steps.drafting(np.array([1]), np.array([64])) == pytest.approx(seconds(4, 8, 64))
    assert steps.plain(np.array([64])) == pytest.approx(2)
    assert MeasuredSteps(report).least_requests == 1
    assert MeasuredSteps(report.model_copy(update={"plain": at_four["plain"]})).least_requests == 4


def test_steps_of_a_server_that_always_drafts_tell_nothing_of_plain_decoding(report: CostReport):
    absent = {"plain": "a server with a drafter does not decode plainly"}
    steps = MeasuredSteps(report.model_copy(update={"plain": (), "absent": absent}))
    assert steps.most_requests == 4
    assert steps.drafting(np.array([1]), np.array([64])) == pytest.approx(seconds(1, 2, 64))
    with pytest.raises(
        DataError, match="no step of plain decoding was measured on profile cpu: a server with a drafter"
    ):
        steps.plain(np.array([64]))
