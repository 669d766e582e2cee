"""What is made of the engine's replies: cycles from arrival times, differences of texts, counters. No engine needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dspark.config.models import ServingProfile
from dspark.corpus.prompts import PreparedPrompt
from dspark.engines.client import Completion, Streamed
from dspark.engines.counters import Counters
from dspark.engines.llamacpp_load import Together
from dspark.engines.llamacpp_log import Drafting
from dspark.errors import DataError
from dspark.evaluation import texts
from dspark.evaluation.counters import measure_counters
from dspark.evaluation.results import Difference
from dspark.evaluation.served import request_of, round_of, served_arms
from dspark.evaluation.texts import text_difference
from dspark.evaluation.tiny import tiny_target

PROFILE = ServingProfile(name="cpu", engine="llamacpp", access="local", dtype="float16")


def streamed(*seconds: float) -> Streamed:
    return Streamed(tuple(range(len(seconds))), seconds, seconds[-1] + 0.5 if seconds else 2.0)


def test_tokens_that_come_together_share_a_cycle():
    """The first token is the prefill's; then three at 1.5 s, one at 2 s, two at 4 s."""
    found = request_of(streamed(1.0, 1.5, 1.5001, 1.5002, 2.0, 4.0, 4.0003))
    assert found.prefill_seconds == 1.0
    assert found.emitted.tolist() == [3, 1, 2]
    assert found.cycle_seconds.tolist() == pytest.approx([0.5002, 0.4998, 2.0003])
    assert found.cycle_seconds.sum() == pytest.approx(3.0003)


def test_a_cycle_begins_with_the_second_token_however_soon_it_comes():
    found = request_of(streamed(1.0, 1.0001, 1.0002, 2.0))
    assert (found.emitted.tolist(), found.cycle_seconds.tolist()) == ([2, 1], pytest.approx([0.0002, 0.9998]))


@pytest.mark.parametrize(("seconds", "prefill"), [((), 2.0), ((3.0,), 3.0)])
def test_replies_without_a_cycle(seconds: tuple[float, ...], prefill: float):
    found = request_of(streamed(*seconds))
    assert found.prefill_seconds == prefill and len(found.emitted) == len(found.cycle_seconds) == 0


def test_the_time_that_is_not_drafting_is_verification():
    """Two requests of two and one cycles; the engine drafted twice for both together, in 0.2 s."""
    done = Together(9.0, (streamed(1, 2, 3), streamed(1, 2)), Counters(3, 12, 1, (1,)), Drafting(calls=2, seconds=0.2))
    found = round_of(4, done)
    assert (found.group, found.seconds, found.cycles, found.verified, found.tokens) == (4, 9.0, 3, 12, 5)
    assert found.draft_seconds == pytest.approx(0.3)
    assert found.verify_seconds == pytest.approx(2.7)
    plain = round_of(0, replace(done, drafting=Drafting(), counters=Counters()))
    assert (plain.draft_seconds, plain.verify_seconds, plain.verified) == (0, pytest.approx(3), 0)


def test_every_length_of_a_block_and_one_threshold_are_measured_unless_the_profile_says_otherwise():
    assert [arm.name for arm in served_arms(PROFILE, 3)] == ["none", "fixed", "fixed(1)", "fixed(2)", "threshold(0.5)"]
    named = PROFILE.model_copy(update={"policies": ("fixed", "threshold(0.8)")})
    assert [arm.name for arm in served_arms(named, 3)] == ["none", "fixed", "threshold(0.8)"]


def test_acceptance_is_counted_over_prompts():
    """Blocks: 10 steps with 6, 3 and 1 accepted at each place, and 10 with 2."""
    found = measure_counters([Counters(10, 30, 10, (6, 3, 1)), Counters(10, 30, 2, (2,))])
    assert found.tau.value == pytest.approx(1 + 12 / 20) and found.tau.n == 2
    assert [rate.value for rate in found.marginal] == pytest.approx([8 / 20, 3 / 20, 1 / 20])
    assert [rate.value for rate in found.conditional] == pytest.approx([8 / 20, 3 / 8, 1 / 3])
    with pytest.raises(DataError, match="verified no block"):
        measure_counters([Counters()])


# ---------------------------------------------------------------- texts

PROMPT = PreparedPrompt(id="p", domain="math", messages=[{"role": "user", "content": "?"}], token_ids=[3, 4, 5])


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target(40, spread=0.3)


def reply(*tokens: int, ended: bool = False) -> Completion:
    return Completion(tokens, ended, len(tokens), 0.1, Counters(1, 1, 0))


def test_equal_texts_do_not_differ(target: Any):
    assert text_difference(target, PROMPT, reply(7, 8), reply(7, 8)) is None
    assert text_difference(target, PROMPT, reply(7, ended=True), reply(7, ended=True)) is None


def test_the_first_difference_is_weighed_by_the_targets_own_logits(target: Any):
    found = text_difference(target, PROMPT, reply(7, 9, 1), reply(7, 8, 1))
    ids = torch.tensor([[3, 4, 5, 7]])
    logits = target.logits(target.last_hidden(ids)[:, -1]).float()[0]
    assert (found.prompt, found.position, found.token, found.best) == ("p", 1, 9, 8)
    assert found.gap == pytest.approx(abs(float(logits[8] - logits[9])))


def test_a_text_that_ended_differs_from_one_that_goes_on(target: Any):
    found = text_difference(target, PROMPT, reply(7, ended=True), reply(7, 8))
    logits = target.logits(target.last_hidden(torch.tensor([[3, 4, 5, 7]]))[:, -1]).float()[0]
    ending = max(float(logits[token]) for token in target.eos_token_ids)
    assert found.position == 1 and found.gap == pytest.approx(abs(float(logits[8]) - ending))


def test_a_text_that_was_cut_off_elsewhere_is_a_fault(target: Any):
    with pytest.raises(DataError, match="goes on where the other was cut off"):
        text_difference(target, PROMPT, reply(7), reply(7, 8))


@pytest.mark.parametrize(
    ("gaps", "drafts", "result"),
    [
        ([], 1, "pass"),
        ([0.25], 1, "pass"),  # one of twenty, at a near-tie
        ([0.26], 1, "fail"),
        ([0.1, 0.1], 1, "fail"),
        ([], 0, "inconclusive"),
    ],
)
def test_nearly_all_texts_must_be_equal_and_the_others_part_at_near_ties(
    gaps: list[float], drafts: int, result: str, monkeypatch: pytest.MonkeyPatch
):
    prompts = [PROMPT.model_copy(update={"id": str(number)}) for number in range(20)]

    def difference(target: Any, prompt: PreparedPrompt, drafted: Completion, plain: Completion) -> Difference | None:
        number = int(prompt.id)
        if number >= len(gaps):
            return None
        return Difference(prompt=prompt.id, position=0, token=1, best=2, gap=gaps[number])

    monkeypatch.setattr(texts, "text_difference", difference)
    replies = [Completion((7,), False, 1, 0.1, Counters(drafts, drafts, 0))] * 20
    found = texts.compare_texts(None, prompts, replies, replies)  # type: ignore[arg-type]
    assert (found.result, found.n, found.drafts) == (result, 20, 20 * drafts)
    assert [one.gap for one in found.differences] == gaps
