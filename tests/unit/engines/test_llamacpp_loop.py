"""What llama.cpp should do with a prompt: decoded, and replayed on a reply that is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark.engines.counters import Counters
from dspark.engines.llamacpp_loop import expected_request
from dspark.engines.replay import ExpectedRequest, replay
from dspark.evaluation.tiny import tiny_drafter, tiny_target

PROMPTS = [[3, 4, 5], [7, 7, 8, 9, 2, 13], [20]]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A target that repeats itself, so that a random drafter is right now and then."""
    target = tiny_target(24, family=request.param, spread=0.4, seed=3)
    return target, tiny_drafter(target, 4, seed=1)


@pytest.mark.parametrize("limit", [2, 3, 9, 40])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_replay_of_the_loops_own_reply_is_the_loop(pair: tuple[Any, Any], prompt: list[int], limit: int) -> None:
    target, drafter = pair
    expected = expected_request(target, drafter, prompt, limit)
    assert replay(target, drafter, prompt, expected.token_ids, limit, ended=False) == expected


def test_some_drafts_are_accepted_in_these_cases(pair: tuple[Any, Any]) -> None:
    """Else the test above would compare nothing but rejections."""
    target, drafter = pair
    counters = [expected_request(target, drafter, prompt, 40).counters for prompt in PROMPTS]
    assert sum(one.accepted for one in counters) > 3
    assert sum(one.accepted for one in counters) < sum(one.drafted for one in counters)


@pytest.mark.parametrize("length", [1, 2, 5, 11])
def test_a_reply_that_was_ended_is_counted_to_the_end_of_its_last_block(pair: tuple[Any, Any], length: int) -> None:
    """What follows the ending token is what the target would have said: the loop that nothing ends knows it."""
    target, drafter = pair
    for prompt in PROMPTS:
        whole = expected_request(target, drafter, prompt, 40)
        ended = replay(target, drafter, prompt, whole.token_ids[:length], 40, ended=True)
        until = whole.until(len(prompt) + length)
        assert (ended.blocks, ended.offered, ended.accepted) == (until.blocks, until.offered, until.accepted)


def test_fewer_drafts_a_block_are_what_a_shorter_drafter_does(pair: tuple[Any, Any]) -> None:
    """By hand on the drafts of whole blocks: two are verified, and the walk goes on behind what was accepted."""
    target, drafter = pair
    prompt = PROMPTS[0]
    reply = expected_request(target, drafter, prompt, 30).token_ids
    found = replay(target, drafter, prompt, reply, 30, ended=False, n_max=2)
    assert set(found.offered.values()) <= {1, 2}
    said = 1
    for position, block in found.blocks.items():
        assert position == len(prompt) + said - 1
        offered = min(2, 30 - said - 1)
        right = [*(block[place] == reply[said + place] for place in range(offered)), False].index(False)
        assert (found.offered[position], found.accepted[position]) == (offered, right)
        said += right + 1
    assert said >= 29


def test_another_reply_than_the_targets_is_replayed_as_it_stands(pair: tuple[Any, Any]) -> None:
    """Drafts follow the reply's own tokens: with a random one they are hardly ever accepted."""
    target, drafter = pair
    generator = torch.Generator().manual_seed(0)
    reply = torch.randint(2, 24, (40,), generator=generator).tolist()
    found = replay(target, drafter, PROMPTS[1], reply, 40, ended=False)
    assert found.token_ids == tuple(reply)
    assert found.counters.accepted < found.counters.drafted / 4


def test_counters_add_up() -> None:
    request = ExpectedRequest((1,) * 9, {2: (1, 2), 5: (3, 4), 6: (5, 6)}, {2: 2, 5: 2, 6: 1}, {2: 2, 5: 0, 6: 1})
    assert request.counters == Counters(3, 5, 3, (2, 1))
    assert request.until(6).counters == Counters(2, 4, 2, (1, 1))
    assert request.until(2).counters == Counters(0, 0, 0, ())
