"""Whether a drafter is worth deploying: the certificates' own advice in one sentence, and never more than that."""

from __future__ import annotations

import datetime
from typing import Any

import fake_build
import pytest

from dspark.evaluation.entry import AgainstNone, CertificateEntry, LosslessSummary, Recommendation
from dspark.evaluation.results import GreedyLossless, LosslessReport, SampledLossless
from dspark.report.verdict import Verdict, spans, verdict

TODAY = datetime.date(2026, 12, 1)
ABSENT = CertificateEntry(profile="elsewhere", status="absent", reason="no GPU at hand")


def entry(**changes: Any) -> CertificateEntry:
    return fake_build.measured_entry().model_copy(update=changes)


def lossless(result: str = "pass") -> LosslessReport:
    counts = dict.fromkeys(("n", "tokens", "drafts", "drafts_accepted", "near_tie_prompts"), 7)
    floats = dict.fromkeys(("noise", "epsilon", "largest_gap"), 0.0)
    greedy = GreedyLossless(result=result, dtype="float32", near_ties=(), violations=(), **counts, **floats)
    sampled = SampledLossless(result="pass", temperature=1.0, tolerance=0.0, largest_difference=0.0, cases=())
    return LosslessReport.of(greedy, sampled)


def judged(*entries: CertificateEntry, result: str = "pass", today: datetime.date = TODAY) -> Verdict:
    return verdict(entries, lossless(result), None, today=today)


def test_it_says_where_and_by_how_much_with_the_interval():
    """1.3 within 0.05 at one request, switched off at four: the figures of the made-up certificate."""
    found = judged(entry(), ABSENT)
    assert found.answer == "deploy"
    assert found.headline == (
        "Worth deploying on cpu-reference at 1 to 3 concurrent requests: "
        "1.30 [1.25, 1.35] times plain decoding at 1 request"
    )
    assert found.lines[0] == (
        "cpu-reference: at 1 to 3 concurrent requests use policy fixed, 1.30 [1.25, 1.35] times plain "
        "decoding's tokens/s at 1 request (n = 10); at 4 concurrent requests switch speculation off (fixed at 4 "
        "requests: 0.80 [0.75, 0.85] times plain decoding)"
    )
    assert found.lines[1] == "elsewhere: not measured (no GPU at hand)"
    assert found.lines[2].startswith("losslessness: pass (7 greedy tokens of 7 prompts, 0 violations)")


def test_where_nothing_surely_pays_it_is_not_worth_deploying():
    off = (Recommendation(from_concurrency=1, to_concurrency=4, policy="none", gamma=3, reason="slower"),)
    found = judged(entry(recommended=off))
    assert found.answer == "leave off" and found.headline.startswith("Not worth deploying")
    assert "switch speculation off (fixed at 1 request: 1.30 [1.25, 1.35] times plain decoding)" in found.lines[0]
    assert judged(entry(recommended=())).answer == "leave off"


def test_what_was_not_measured_is_not_judged():
    found = judged(ABSENT)
    assert found.answer == "not known" and "no valid certificate" in found.headline
    assert verdict([], None, None, today=TODAY).lines == ("losslessness: not checked",)
    assert judged(entry(status="inconclusive", reason="three prompts")).answer == "not known"


def test_a_certificate_that_ran_out_counts_no_more():
    """It holds until 2027-05-28, that day included."""
    assert judged(entry(), today=datetime.date(2027, 5, 28)).answer == "deploy"
    late = judged(entry(), today=datetime.date(2027, 5, 29))
    assert late.answer == "not known" and "ran out on 2027-05-28" in late.lines[0]


FAILED = {"lossless": LosslessSummary(method="texts", result="fail", n=3, drafts=9)}
DISAGREES = {"status": "disagrees", "reason": "tau is 1.2 in the engine"}


@pytest.mark.parametrize("changes, why", [
    (DISAGREES, "evaluation and engine disagree, do not rely on it (tau is 1.2 in the engine)"),
    (FAILED, "losslessness failed in the engine, its texts with drafts are not those without"),
])  # fmt: skip
def test_what_is_not_what_it_should_be_is_not_deployed_and_the_reason_is_its_own(changes: dict[str, Any], why: str):
    """An engine that agrees with the evaluation and fails its check of losslessness contradicts nothing."""
    found = judged(ABSENT, entry(**changes))
    assert (found.answer, found.headline) == ("do not deploy", f"Do not deploy: on cpu-reference {why}")
    assert found.paying == ()


@pytest.mark.parametrize("changes", [DISAGREES, FAILED])
def test_where_it_pays_it_is_deployed_and_not_where_an_engine_fails(changes: dict[str, Any]):
    found = judged(entry(profile="other", **changes), entry(), ABSENT)
    assert (found.answer, found.paying) == ("deploy", ("cpu-reference",))
    assert found.headline.startswith("Worth deploying on cpu-reference at 1 to 3 concurrent requests: 1.30 ")
    assert found.headline.endswith("; do not deploy on other")


def test_a_failed_check_of_the_text_outweighs_every_gain():
    found = judged(entry(), result="fail")
    assert found.answer == "do not deploy" and "losslessness" in found.headline
    assert "1.30 [1.25, 1.35]" in found.lines[0], "what was measured is told all the same"


def test_neighbours_of_one_policy_are_one_range_with_every_ratio():
    ratios = tuple(
        AgainstNone(concurrency=at, arm="fixed", policy="fixed", ratio=fake_build.number(value, 10, 0.01))
        for at, value in ((1, 1.5), (2, 1.4), (4, 0.9))
    )
    advice = tuple(
        Recommendation(from_concurrency=first, to_concurrency=last, policy=policy, gamma=3, reason="r")
        for first, last, policy in ((1, 1, "fixed"), (2, 3, "fixed"), (4, 4, "none"))
    )
    found = spans(entry(against_none=ratios, recommended=advice))
    assert [(one.first, one.last, one.policy, len(one.ratios)) for one in found] == [
        (1, 3, "fixed", 2),
        (4, 4, "none", 0),
    ]
    assert (
        "1.50 [1.49, 1.51] times plain decoding's tokens/s at 1 request (n = 10), 1.40 [1.39, 1.41] at 2 requests"
        in (judged(entry(against_none=ratios, recommended=advice)).lines[0])
    )


def test_the_evaluation_is_named_as_what_it_is():
    throughput = fake_build.metrics().throughput
    lines = verdict([ABSENT], None, throughput, today=TODAY).lines
    assert lines[-1].startswith("in the evaluation, which is no serving engine") and "0.87 [0.86, 0.88]" in lines[-1]


def test_what_too_few_rounds_were_timed_for_is_not_known():
    """At one request nothing was decided; decided at four, it did not pay, and that is known."""
    first, last = (
        Recommendation(from_concurrency=at, to_concurrency=to, policy="none", gamma=3, decided=False, reason="few")
        for at, to in ((1, 3), (4, 4))
    )
    found = judged(entry(recommended=(first, last)))
    assert found.answer == "not known" and found.headline.endswith("too few rounds were timed to tell")
    told = "cpu-reference: at 1 to 4 concurrent requests too few rounds were timed to tell whether it pays (fixed at 1"
    assert found.lines[0].startswith(told)
    one = judged(entry(recommended=(first, last.model_copy(update={"decided": True}))))
    assert one.answer == "leave off" and "at 4 concurrent requests switch speculation off" in one.lines[0]
