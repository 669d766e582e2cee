from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dspark.decoding.drafting import TorchProposer
from dspark.decoding.draws import CounterDraws
from dspark.decoding.loop import Batch, decode
from dspark.decoding.policies import Fixed, NoDrafts, Threshold
from dspark.errors import DataError
from dspark.evaluation.tiny import tiny_drafter, tiny_target
from dspark.io.progress import Progress
from dspark.targets.loading import Target

PROMPTS = [[3, 4, 5], [7] * 9, [2, 9, 30, 4, 5], [5, 6], [11, 12, 13, 14, 15, 16], [8, 2]]


@pytest.fixture(scope="module")
def greedy_texts(llama: Target) -> list[list[int]]:
    """What the target says greedily: one plain forward pass per token, no cache, no batch."""
    texts = []
    for prompt in PROMPTS:
        text: list[int] = []
        while len(text) < 16 and 1 not in text:
            logits = llama.logits(llama.last_hidden(torch.tensor([prompt + text]))[0, -1])
            text.append(int(logits.argmax()))
        texts.append(text)
    assert any(text[-1] == 1 for text in texts) and any(len(text) == 16 for text in texts)
    return texts


def test_plain_decoding_says_what_the_target_says(llama: Target, greedy_texts: list[list[int]]):
    done = decode(llama, None, PROMPTS, max_new_tokens=16)
    assert [one.token_ids for one in done] == greedy_texts
    assert [one.finish_reason for one in done] == ["stop" if text[-1] == 1 else "length" for text in greedy_texts]
    assert [one.prompt_length for one in done] == [len(prompt) for prompt in PROMPTS]
    for one, text in zip(done, greedy_texts, strict=True):
        assert one.policy == "none" and one.cycles.gamma == 0
        assert one.cycles.committed.tolist() == [1] * (len(text) - 1)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_drafts_change_nothing_that_is_said_greedily(family: str, batch_size: int):
    target = tiny_target(40, family=family, spread=0.5)
    plain = decode(target, None, PROMPTS, max_new_tokens=16, batch_size=6)
    proposer = TorchProposer(tiny_drafter(target, 3))
    done = decode(target, proposer, PROMPTS, max_new_tokens=16, batch_size=batch_size)
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    assert sum(one.cycles.accepted.sum() for one in done) > 0


@pytest.mark.parametrize("batch_size", [1, 2, 6])
@pytest.mark.parametrize("policy", [Fixed(), Fixed(2), Threshold(0.5)])
def test_right_drafts_are_all_accepted(llama, scripted, greedy_texts, batch_size, policy):
    """A proposer that knows the text: every verified draft is accepted, up to the end of the text."""
    proposer = scripted(3, PROMPTS, greedy_texts)
    done = decode(llama, proposer, PROMPTS, max_new_tokens=16, policy=policy, batch_size=batch_size)
    width = 2 if policy.name == "fixed(2)" else 3
    for one, text in zip(done, greedy_texts, strict=True):
        assert one.token_ids == text
        assert one.cycles.verified.tolist() == [width] * len(one.cycles)
        assert len(one.cycles) == int(np.ceil((len(text) - 1) / (width + 1)))
        assert one.emitted.sum() == len(text) - 1
        inside = one.cycles.valid & ~one.cycles.survived
        assert not inside.any(), "a position of the text was called a rejection"


def test_wrong_drafts_cost_cycles_and_nothing_else(llama, scripted, greedy_texts):
    """Every third position of the script is wrong, so blocks are cut at different places in different rows."""
    spoiled = [[39 if i % 3 == 2 and token != 39 else token for i, token in enumerate(t)] for t in greedy_texts]

    class Spoiling(scripted):  # type: ignore[misc, valid-type]
        def propose(self, anchors, temperature, draws, requests):
            self.full = [[*p, *t] for p, t in zip(PROMPTS, greedy_texts, strict=True)]
            right = super().propose(anchors, temperature, draws, requests)
            self.full = [[*p, *t] for p, t in zip(PROMPTS, spoiled, strict=True)]
            for row, (request, length) in enumerate(zip(requests, self.lengths, strict=True)):
                block = self.full[request][length + 1 : length + 1 + self.gamma]
                right.tokens[row, : len(block)] = torch.tensor(block, dtype=torch.int64)
            return right

    done = decode(llama, Spoiling(3, PROMPTS, greedy_texts), PROMPTS, max_new_tokens=16, batch_size=6)
    assert [one.token_ids for one in done] == greedy_texts
    assert any(0 < count < 3 for one in done for count in one.cycles.accepted)


def test_a_policy_that_verifies_nothing_decodes_plainly_and_knows_nothing(llama, scripted, greedy_texts):
    proposer = scripted(3, PROMPTS, greedy_texts)
    proposer.confidence = -5.0
    done = decode(llama, proposer, PROMPTS, max_new_tokens=16, policy=Threshold(0.5))
    assert [one.token_ids for one in done] == greedy_texts
    assert all((one.cycles.verified == 0).all() and not one.cycles.valid.any() for one in done)


@pytest.mark.parametrize("drafts", [False, True])
def test_sampled_text_does_not_depend_on_the_batch(llama: Target, drafts: bool):
    proposer = TorchProposer(tiny_drafter(llama, 3)) if drafts else None
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "seeds": [5, 6, 7, 8, 9, 10]}
    together = decode(llama, proposer, PROMPTS, batch_size=6, **options)
    apart = decode(llama, proposer, PROMPTS, batch_size=1, **options)
    assert [one.token_ids for one in together] == [one.token_ids for one in apart]
    assert len({tuple(one.token_ids) for one in together}) == len(PROMPTS)


def test_seeds_decide_what_is_sampled(llama: Target):
    def said(seed: int) -> list[int]:
        return decode(llama, None, PROMPTS[:1], max_new_tokens=12, temperature=1.0, seeds=[seed])[0].token_ids

    assert said(3) == said(3) != said(4)


def test_a_bfloat16_target_decodes(llama: Target):
    target = tiny_target(40, spread=0.5, dtype=torch.bfloat16)
    done = decode(target, TorchProposer(tiny_drafter(target, 3)), PROMPTS, max_new_tokens=8, temperature=1.0)
    assert all(one.cycles.confidence_logits.dtype == np.float32 for one in done)


def test_seconds_are_of_the_batch_and_say_how_many_shared_them(llama: Target, scripted, greedy_texts):
    """One of the six texts ends with its first token, so five rows share the first cycle."""
    done = decode(llama, scripted(3, PROMPTS, greedy_texts), PROMPTS, max_new_tokens=16, batch_size=6)
    assert len({one.prefill_seconds for one in done}) == 1
    cycles = [one.cycles for one in done if len(one.cycles)]
    assert {(c.verify_seconds[0], c.draft_seconds[0], c.rows[0]) for c in cycles} == {
        (cycles[0].verify_seconds[0], cycles[0].draft_seconds[0], 5)
    }
    assert (done[0].cycle_seconds > 0).all()
    assert all(1 <= c.rows[-1] <= 5 for c in cycles)


def test_the_proposer_gets_room_for_prompt_text_and_a_block_beyond_the_limit(llama, scripted, greedy_texts):
    proposer = scripted(3, PROMPTS, greedy_texts)
    decode(llama, proposer, PROMPTS, max_new_tokens=16, batch_size=2)
    assert proposer.began == [(2, 9 + 19)]


def test_progress_counts_finished_requests(llama: Target):
    class Counting(Progress):
        total = 0

        def advance(self, count: int = 1, **fields: Any) -> None:
            assert count >= 0
            self.total += count

    progress = Counting()
    decode(llama, None, PROMPTS, max_new_tokens=5, batch_size=4, progress=progress)
    assert progress.total == len(PROMPTS)


def test_nothing_to_decode_is_nothing_decoded(llama: Target):
    assert decode(llama, None, [], max_new_tokens=5) == []


def test_one_new_token_needs_no_cycle(llama: Target, scripted, greedy_texts):
    done = decode(llama, scripted(3, PROMPTS, greedy_texts), PROMPTS, max_new_tokens=1)
    assert [one.token_ids for one in done] == [text[:1] for text in greedy_texts]
    assert all(len(one.cycles) == 0 for one in done)


def test_prompts_that_cannot_be_decoded_are_named(llama: Target):
    with pytest.raises(DataError, match="prompt 1 is empty"):
        decode(llama, None, [[3], []], max_new_tokens=4)
    with pytest.raises(DataError, match=r"prompt 1 has 120 tokens; with 19 more it would pass the target's 128"):
        decode(llama, TorchProposer(tiny_drafter(llama, 3)), [[3], [4] * 120], max_new_tokens=16)


def test_a_policy_that_drafts_needs_a_proposer(llama: Target):
    with pytest.raises(ValueError, match="policy fixed needs a proposer"):
        decode(llama, None, PROMPTS, max_new_tokens=4, policy=Fixed())


def test_policy_none_leaves_a_proposer_alone(llama: Target, scripted, greedy_texts):
    proposer = scripted(3, PROMPTS, greedy_texts)
    done = decode(llama, proposer, PROMPTS, max_new_tokens=16, policy=NoDrafts())
    assert [one.token_ids for one in done] == greedy_texts
    assert proposer.began == []


def test_a_batch_can_be_driven_cycle_by_cycle(llama: Target, scripted, greedy_texts):
    """As the profiler does: the policy may change between cycles."""
    proposer = scripted(3, PROMPTS, greedy_texts)
    batch = Batch(llama, proposer, PROMPTS, range(6), max_new_tokens=16, policy=Fixed(), temperature=0.0,
                  draws=CounterDraws(range(6)))  # fmt: skip
    batch.prefill()
    done = batch.finished()
    assert batch.active == 5 and {request: one.token_ids for request, one in done.items()} == {4: [1]}
    assert batch.finished() == {}
    for policy in (Fixed(1), Fixed(3)):
        batch.policy = policy
        batch.cycle()
    while batch.active:
        batch.cycle()
    done |= batch.finished()
    assert [done[request].token_ids for request in range(6)] == greedy_texts
    assert done[0].cycles.verified[:2].tolist() == [1, 3]
