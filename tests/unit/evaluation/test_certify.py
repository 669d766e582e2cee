from __future__ import annotations

import datetime
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from dspark.config.models import EvaluationSettings, ServingProfile
from dspark.corpus.prompts import PreparedPrompt
from dspark.decoding.drafting import TorchProposer
from dspark.decoding.history import History, Timing
from dspark.decoding.policies import Fixed, NoDrafts
from dspark.decoding.records import Decoded, RecordSet
from dspark.errors import SettingsError
from dspark.evaluation import throughput
from dspark.evaluation.certify import (
    CertificateEntry,
    absent_entry,
    certify_reference,
    compare_offline,
)
from dspark.evaluation.decoding import decode_prompts
from dspark.evaluation.recommendation import against_champion, note_halves, recommend
from dspark.evaluation.results import GreedyLossless, LosslessReport, SampledLossless
from dspark.evaluation.rivals import Champion
from dspark.evaluation.rounds import Request, Round
from dspark.evaluation.throughput import NONE, Arm, Comparison, round_of
from dspark.evaluation.tiny import tiny_drafter, tiny_target
from dspark.io.jsonfile import model_json
from dspark.io.progress import Progress
from dspark.measured import Measured
from dspark.package.certificate import Certificate
from dspark.scheduling.cost import CostCurve
from dspark.scheduling.prefix import PrefixScheduler
from dspark.targets.loading import Target

SETTINGS = EvaluationSettings(
    max_new_tokens=10, batch_size=4, throughput_prompts=4, throughput_new_tokens=6, throughput_rounds=4,
)  # fmt: skip
PROFILE = ServingProfile(name="here", engine="reference", access="local", dtype="float32", certify_concurrency=(1, 2))
certify = partial(certify_reference, prompts_per_domain=2)
FINGERPRINT = {"engine": "reference", "engine_version": "0.1.0"}


def prompt(name: str, domain: str, *ids: int) -> PreparedPrompt:
    return PreparedPrompt(id=name, domain=domain, messages=[{"role": "user", "content": "x"}], token_ids=list(ids))


PROMPTS = [
    prompt("m1", "math", 3, 4, 5), prompt("m2", "math", 7, 7, 8, 9), prompt("m3", "math", 20, 21),
    prompt("c1", "chat", 11, 12, 13), prompt("c2", "chat", 2, 9, 30, 4, 5), prompt("c3", "chat", 9, 9),
]  # fmt: skip


def lossless(result: str = "pass") -> LosslessReport:
    greedy = GreedyLossless(result=result, n=4, tokens=40, drafts=90, drafts_accepted=5, dtype="float32", noise=1e-6,
                            epsilon=4e-6, largest_gap=0, near_ties=(), near_tie_prompts=0, violations=())  # fmt: skip
    sampled = SampledLossless(result="pass", temperature=1, tolerance=1e-10, largest_difference=0, cases=())
    return LosslessReport.of(greedy, sampled)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(40, spread=0.3)


def load_with(target: Target, seed: int = 1) -> Any:
    asked: list[str] = []

    def load(dtype: str) -> tuple[Target, TorchProposer]:
        asked.append(dtype)
        return target, TorchProposer(tiny_drafter(target, 3, seed=seed))

    load.asked = asked  # type: ignore[attr-defined]
    return load


def scheduler() -> PrefixScheduler:
    curve = CostCurve(sample_batch_tokens=(1, 4), sample_steps_per_second=(10.0, 9.0), max_batch_tokens=16)
    return PrefixScheduler(curve, 3)


def test_an_entry_says_what_was_measured_on_what_and_until_when(target: Target):
    load = load_with(target)
    offline = decode_prompts(target, load("float32")[1], PROMPTS, SETTINGS, temperature=0.0)
    entry = certify(PROFILE, FINGERPRINT, load, PROMPTS, SETTINGS, offline=offline, lossless=lossless(),
                              scheduler=scheduler())  # fmt: skip
    assert load.asked[-1] == "float32"
    assert entry.status == "measured" and entry.reason is None
    assert entry.workload is not None and entry.workload.prompts == 4
    assert set(entry.acceptance) == {"math", "chat"}
    assert all(one.includes_bonus and one.tau.n == 2 for one in entry.acceptance.values())
    assert entry.offline_vs_engine is not None and entry.offline_vs_engine.prompts == 4
    assert entry.offline_vs_engine.relative_difference.value == 0
    assert entry.lossless is not None and (entry.lossless.result, entry.lossless.drafts) == ("pass", 90)
    assert {(one.concurrency, one.policy) for one in entry.load} == {
        (c, p) for c in (1, 2) for p in ("none", "fixed", "scheduled")}  # fmt: skip
    assert {(one.concurrency, one.policy) for one in entry.against_none} == {
        (c, p) for c in (1, 2) for p in ("fixed", "scheduled")}  # fmt: skip
    assert [(one.from_concurrency, one.to_concurrency) for one in entry.recommended] == [(1, 1), (2, 2)]
    assert entry.cycle is not None and entry.cycle.draft_seconds.value > 0
    assert entry.holds_until is not None and entry.holds_until.engine_version == "0.1.0"
    assert datetime.datetime.fromisoformat(entry.measured_at or "").utcoffset() == datetime.timedelta(0)
    assert CertificateEntry.model_validate(model_json(entry)) == entry


def test_a_champion_takes_turns_with_the_candidate_and_stands_beside_it(
    target: Target, monkeypatch: pytest.MonkeyPatch
):
    load = load_with(target)
    offline = decode_prompts(target, load("float32")[1], PROMPTS, SETTINGS, temperature=0.0)
    rounds: list[list[str]] = []
    compare = throughput.compare

    def recorded(target: Target, arms: Sequence[Arm], *rest: Any, **more: Any) -> Comparison:
        rounds.append([arm.name for arm in arms])
        return compare(target, arms, *rest, **more)

    monkeypatch.setattr(throughput, "compare", recorded)
    champion = Champion("c" * 64, lambda target: TorchProposer(tiny_drafter(target, 2, seed=5)), None)
    quick = SETTINGS.model_copy(update={"throughput_rounds": 2})
    entry = certify(PROFILE, FINGERPRINT, load, PROMPTS, quick, offline=offline, lossless=lossless(), champion=champion)
    assert rounds == [["none", "fixed", "champion fixed"]] * 2  # in one comparison: interleaved
    assert {one.arm for one in entry.load} == {one.arm for one in entry.against_none} | {"none"} == {"none", "fixed"}
    found = entry.against_champion
    assert found is not None and found.package_digest == "c" * 64
    assert [(one.concurrency, one.arm, one.policy) for one in found.load] == [
        (1, "champion fixed", "fixed"), (2, "champion fixed", "fixed")]  # fmt: skip
    advised = {one.from_concurrency: one.policy for one in entry.recommended}
    assert {one.concurrency: one.policy for one in found.ratios} == advised
    assert CertificateEntry.model_validate(model_json(entry)) == entry
    assert Certificate(subject="a" * 64, gamma=3, entries=(entry,), engines=()).entries == (entry,)


def test_candidate_and_champion_are_compared_each_under_its_own_recommendation():
    """Rounds of 10 tokens: the candidate pays at one request (2x none) and not at two, the champion the other way."""

    def comparison(concurrency: int, candidate: float, champion: float) -> Comparison:
        seconds = {NONE: 1.0, "fixed": 1 / candidate, "champion fixed": 1 / champion}
        arms = tuple(Arm(name, None, NoDrafts() if name == NONE else Fixed()) for name in seconds)
        one = Request((0,) * 10, 0.1, np.array([0.1] * 3), np.array([3] * 3, np.int32))
        rounds = {
            name: [Round(number % 2, took, (one,) * concurrency, 3, 9, None, None) for number in range(12)]
            for name, took in seconds.items()
        }
        return Comparison(arms, rounds, 0.0, "float32", 1, concurrency, 2, 10, 0)

    both = [comparison(1, 2.0, 0.5), comparison(2, 0.5, 4.0)]
    own = recommend([each.only([NONE, "fixed"]) for each in both], 3)
    assert [one.policy for one in own] == ["fixed", "none"]
    found = against_champion("c" * 64, both, own, {NONE: NONE, "fixed": "champion fixed"}, 3)
    assert [(one.policy, one.champion_policy, one.ratio.value) for one in found.ratios] == [
        ("fixed", "none", pytest.approx(2.0)), ("none", "fixed", pytest.approx(0.25))]  # fmt: skip


def test_another_drafter_than_was_evaluated_disagrees(target: Target):
    """The exported drafter accepts nothing where the evaluation's accepted everything."""
    good = RecordSet(tuple(one.id for one in PROMPTS), tuple(one.domain for one in PROMPTS),
                     tuple(request([3, 3, 3]) for _ in PROMPTS))  # fmt: skip
    entry = certify(PROFILE, FINGERPRINT, load_with(target), PROMPTS, SETTINGS, offline=good,
                              lossless=lossless())  # fmt: skip
    assert entry.status == "disagrees"
    assert entry.reason is not None and "4.000 in the evaluation" in entry.reason


@pytest.mark.parametrize(
    ("offline", "report", "reason"),
    [(False, lossless(), "no records of the evaluation"), (True, None, "losslessness was not shown"),
     (True, lossless("inconclusive"), "losslessness was not shown")],
)  # fmt: skip
def test_what_was_not_shown_is_inconclusive(target: Target, offline: bool, report: Any, reason: str):
    load = load_with(target)
    records = decode_prompts(target, load("float32")[1], PROMPTS, SETTINGS, temperature=0.0) if offline else None
    profile = PROFILE.model_copy(update={"certify_concurrency": (1,)})
    entry = certify(profile, FINGERPRINT, load, PROMPTS, SETTINGS, offline=records, lossless=report)
    assert entry.status == "inconclusive" and reason in (entry.reason or "")


def test_a_difference_that_may_be_noise_leaves_the_entry_inconclusive(target: Target):
    """The engine's drafter accepts nothing; the evaluation's accepted everything on one prompt of four."""
    ids, domains = ("m1", "m2", "c1", "c2"), ("math", "math", "chat", "chat")
    offline = RecordSet(ids, domains, (request([3] * 4), *[request([0] * 20)] * 3))
    profile = PROFILE.model_copy(update={"certify_concurrency": (1,)})
    entry = certify(profile, FINGERPRINT, load_with(target), PROMPTS, SETTINGS, offline=offline, lossless=lossless())
    assert entry.offline_vs_engine is not None and entry.offline_vs_engine.result == "inconclusive"
    assert entry.status == "inconclusive" and "too few prompts" in (entry.reason or "")


def test_a_profile_without_access_gives_an_absent_entry_with_its_reason(target: Target):
    profile = ServingProfile(name="far", engine="reference", access="none", reason="no GPU here")
    entry = certify(profile, {}, load_with(target), PROMPTS, SETTINGS, offline=None, lossless=None)
    assert (entry.status, entry.reason) == ("absent", "no GPU here")
    assert entry == absent_entry(profile)
    with pytest.raises(ValidationError, match="status absent needs a reason"):
        absent_entry(PROFILE)


def test_another_engine_is_not_certified_here(target: Target):
    profile = PROFILE.model_copy(update={"engine": "sglang"})
    with pytest.raises(SettingsError, match="not the reference engine"):
        certify(profile, {}, load_with(target), PROMPTS, SETTINGS, offline=None, lossless=None)


def test_an_entry_cannot_claim_what_it_does_not_hold():
    with pytest.raises(ValidationError, match="lacks measured_at, workload, lossless"):
        CertificateEntry(profile="here", status="measured")


# ---------------------------------------------------------------- agreement


def request(accepted: Sequence[int], temperature: float = 0.0) -> Decoded:
    one = History(4, 3, 10_000, frozenset({1}), temperature, "fixed")
    one.begin(5, 0.1)
    for number, count in enumerate(accepted):
        one.add([7] * 3, 3, count, 1 if number + 1 == len(accepted) else 8, np.zeros(3, np.float32),
                Timing(0.02, 0.08, 1))  # fmt: skip
    return one.result()


def records(*decoded: Decoded, first: int = 0) -> RecordSet:
    return RecordSet(tuple(f"p{first + i}" for i in range(len(decoded))), ("math",) * len(decoded), decoded)


def test_agreement_is_judged_on_common_prompts():
    """p1 and p2 are common: 2 tokens a cycle offline; 2.1 in the engine is 5 % more, the tolerance."""
    offline = records(request([3]), request([1] * 20), request([1] * 20))
    engine = records(*[request([1] * 18 + [2] * 2)] * 2, request([0]), first=1)
    found = compare_offline(offline, engine)
    assert found.prompts == 2
    assert (found.offline_tau.value, found.engine_tau.value) == (2, pytest.approx(2.1))
    assert found.relative_difference.value == pytest.approx(0.05)
    assert compare_offline(offline, engine, tolerance=0.051).result == "agrees"
    assert compare_offline(offline, engine, tolerance=0.049).result == "disagrees"


def test_a_difference_that_may_be_noise_is_inconclusive():
    """One prompt got 100 % better and one 50 % worse."""
    offline, engine = records(request([1] * 4), request([1] * 4)), records(request([3] * 4), request([0] * 4))
    assert compare_offline(offline, engine).result == "inconclusive"


def test_agreement_needs_the_same_kind_and_common_prompts():
    with pytest.raises(SettingsError, match="offline records are of temperature 0"):
        compare_offline(records(request([1])), records(request([1], temperature=1.0)))
    with pytest.raises(SettingsError, match="no prompt in common"):
        compare_offline(records(request([1])), records(request([1]), first=5))
    silent = History(4, 3, 1, frozenset({1}), 0.0, "fixed")
    silent.begin(7, 0.1)
    with pytest.raises(SettingsError, match="no cycle"):
        compare_offline(records(silent.result()), records(request([1])))


# ---------------------------------------------------------------- recommendation


def comparison(concurrency: int, seconds: dict[str, list[float]]) -> Comparison:
    """Rounds of 4 tokens that took so many seconds each; every round has its own prompts."""
    arms = tuple(Arm(name, None, NoDrafts() if name == NONE else Fixed(int(name[-1]))) for name in seconds)
    rounds = {
        name: [round_of(group, value, [request([0, 0, 0])]) for group, value in enumerate(values)]
        for name, values in seconds.items()
    }
    return Comparison(arms, rounds, 0.0, "float32", 1, concurrency, 8, 8, 0)


def test_a_policy_is_recommended_where_it_surely_pays():
    fast = comparison(1, {"none": [2.0] * 12, "k2": [1.0, 1.1] * 6, "k3": [1.5] * 12})
    slow = comparison(4, {"none": [2.0] * 12, "k2": [2.1, 2.2] * 6, "k3": [2.5] * 12})
    first, second = recommend([fast, slow], 3)
    assert (first.from_concurrency, first.to_concurrency, first.policy, first.gamma) == (1, 3, "fixed(2)", 3)
    assert (second.from_concurrency, second.to_concurrency, second.policy) == (4, 4, "none")
    assert "k2 is 1.9" in first.reason and "not surely above 1" in second.reason


def test_what_was_fitted_on_some_rounds_is_judged_on_others():
    """k2 shines in rounds 0, 1, 4, 5, 8, 9, which choose it, and loses in 2, 3, 6, 7, 10, 11, which judge it."""
    lucky = comparison(1, {"none": [2.0] * 12, "k2": [0.5, 0.5, 2.5, 2.5] * 3, "k3": [1.5] * 12})
    (found,) = recommend([lucky], 3)
    assert found.policy == "none" and "k2 is 0.8" in found.reason and found.decided


@pytest.mark.parametrize("rounds", [2, 6, 11])
def test_few_rounds_recommend_nothing_whatever_they_found(rounds: int):
    """At 6 two rounds judge, at 11 four; of two that differ by chance alone both are faster once in four times."""
    (found,) = recommend([comparison(1, {"none": [2.0] * rounds, "k2": [0.5] * rounds})], 3)
    assert (found.policy, found.decided) == ("none", False)
    assert found.reason == (
        f"k2 was 4.000 times as fast as none in {rounds} rounds, too few to tell whether it pays: "
        "--set evaluation.throughput_rounds=12 or more"
    )


@pytest.mark.parametrize(
    ("rounds", "said"),
    [
        (12, None),
        (16, None),
        (6, "6 rounds are too few to recommend a policy"),
        (14, "of 14 rounds 12 choose and judge"),
    ],
)
def test_rounds_that_have_no_part_in_a_recommendation_are_told_before(rounds: int, said: str | None):
    notes: list[str] = []

    class Noting(Progress):
        def note(self, message: str) -> None:
            notes.append(message)

    note_halves(rounds, Noting())
    assert len(notes) == (said is not None) and all(said is not None and said in note for note in notes)


def test_reading_a_certificate_loads_no_torch():
    script = (
        "import sys; import dspark.evaluation.certify, dspark.evaluation.results, dspark.evaluation.acceptance,"
        "dspark.profiling.cost; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_measured_numbers_read_well():
    assert str(Measured(value=1.9, n=4, ci95=(1.8, 2.0))) == "1.900 [1.800, 2.000] (n=4)"
