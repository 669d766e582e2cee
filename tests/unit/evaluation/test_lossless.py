from __future__ import annotations

import dataclasses

import pytest
import torch

from dspark.decoding.drafting import TorchProposer
from dspark.decoding.loop import decode
from dspark.decoding.records import Decoded
from dspark.errors import SettingsError
from dspark.evaluation import lossless
from dspark.evaluation.lossless import batch_noise, check_greedy
from dspark.evaluation.results import GreedyLossless, LosslessReport, SampledLossless
from dspark.evaluation.tiny import tiny_drafter, tiny_target
from dspark.targets.loading import Target

PROMPTS = [[3, 4, 5], [7] * 9, [2, 9, 30, 4, 5], [11, 12, 13, 14, 15, 16]]
IDS = ["a", "b", "c", "d"]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(40, spread=0.3)


@pytest.fixture(scope="module")
def decoded(target: Target) -> list[Decoded]:
    return decode(target, TorchProposer(tiny_drafter(target, 3)), PROMPTS, max_new_tokens=12)


def swapped(one: Decoded, position: int, token: int) -> Decoded:
    tokens = list(one.token_ids)
    tokens[position] = token
    return dataclasses.replace(one, token_ids=tokens)


def test_what_the_loop_emits_is_what_one_plain_pass_would_emit(target: Target, decoded: list[Decoded]):
    report = check_greedy(target, PROMPTS, IDS, decoded)
    assert report.result == "pass" and not report.violations
    assert report.n == 4 and report.tokens == sum(len(one.token_ids) for one in decoded)
    assert report.drafts == sum(int(one.cycles.verified.sum()) for one in decoded) > 0
    assert report.dtype == "float32"
    assert 0 < report.noise < 1e-4 and report.epsilon == pytest.approx(4 * report.noise)


def test_a_token_that_the_target_would_not_say_is_found(target: Target, decoded: list[Decoded]):
    """The gap is worked out from a forward pass of the text before it."""
    wrong = (decoded[1].token_ids[4] + 1) % 40
    report = check_greedy(target, PROMPTS, IDS, [decoded[0], swapped(decoded[1], 4, wrong), *decoded[2:]])
    assert report.result == "fail"
    first = report.violations[0]
    before = PROMPTS[1] + decoded[1].token_ids[:4]
    logits = target.logits(target.last_hidden(torch.tensor([before])))[0, -1]
    assert (first.prompt, first.position, first.token) == ("b", 4, wrong)
    assert first.best == decoded[1].token_ids[4] == int(logits.argmax())
    assert first.gap == pytest.approx(float(logits.max() - logits[wrong]), abs=1e-4)


def test_a_tie_is_listed_and_no_failure():
    """Two tokens share one row of the head: the one that the plain pass does not name first is as good."""
    target = tiny_target(40, spread=0.3)
    plain = decode(target, TorchProposer(tiny_drafter(target, 3)), PROMPTS[:1], max_new_tokens=3)[0]
    said = plain.token_ids[2]
    with torch.no_grad():
        target.head[39] = target.head[said]
    before = torch.tensor([PROMPTS[0] + plain.token_ids[:2]])
    best = int(target.logits(target.last_hidden(before))[0, -1].argmax())
    other = ({39, said} - {best}).pop()
    report = check_greedy(target, PROMPTS[:1], IDS[:1], [swapped(plain, 2, other)])
    assert report.result == "pass"
    assert [(one.prompt, one.position, one.token, one.best, one.gap) for one in report.near_ties] == [
        ("a", 2, other, best, 0.0)
    ]
    assert report.near_tie_prompts == 1


def test_the_allowance_is_four_times_the_noise_and_never_more_than_a_thousandth(
    target: Target, decoded: list[Decoded], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lossless, "batch_noise", lambda *_: 1e-4)
    assert check_greedy(target, PROMPTS, IDS, decoded).epsilon == pytest.approx(4e-4)
    monkeypatch.setattr(lossless, "batch_noise", lambda *_: 1.0)
    assert check_greedy(target, PROMPTS, IDS, decoded).epsilon == 1e-3


def test_a_check_without_drafts_proves_nothing(target: Target):
    plain = decode(target, None, PROMPTS, max_new_tokens=12)
    assert check_greedy(target, PROMPTS, IDS, plain).result == "inconclusive"
    assert batch_noise(target, [], []) == 0


def test_half_precision_and_sampled_texts_are_refused(target: Target, decoded: list[Decoded]):
    with pytest.raises(SettingsError, match="checked in float32"):
        check_greedy(tiny_target(40, dtype=torch.bfloat16), PROMPTS, IDS, decoded)
    sampled = [dataclasses.replace(one, temperature=1.0) for one in decoded]
    with pytest.raises(SettingsError, match="temperature 0"):
        check_greedy(target, PROMPTS, IDS, sampled)


def test_the_report_is_as_good_as_its_worse_half(target: Target, decoded: list[Decoded]):
    greedy = check_greedy(target, PROMPTS, IDS, decoded)
    sampled = SampledLossless(result="pass", temperature=1, tolerance=0, largest_difference=0, cases=())

    def overall(first: str, second: str) -> str:
        return LosslessReport.of(
            GreedyLossless.model_validate({**dict(greedy), "result": first}),
            SampledLossless.model_validate({**dict(sampled), "result": second}),
        ).result

    assert overall("pass", "pass") == "pass"
    assert overall("pass", "inconclusive") == "inconclusive"
    assert overall("fail", "inconclusive") == "fail"
