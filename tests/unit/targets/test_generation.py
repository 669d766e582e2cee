from __future__ import annotations

import pytest
import torch

from dspark.config.models import Sampling
from dspark.errors import DataError
from dspark.targets import generation
from dspark.targets.generation import generate

GREEDY = Sampling(temperature=0)
HOT = Sampling(temperature=1.5, top_p=0.95)
PROMPTS = [[1, 10, 20, 30], [1, 10, 20, 31, 40, 41, 42, 43, 44], [1, 10, 99], [1, 10, 20, 30, 50, 60]]


def naive(target, prompt, count):
    """Greedy continuation of one prompt by one full forward pass per token, without cache, batch or padding."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in target.eos_token_ids:
            break
    return ids[len(prompt) :]


def run(target, prompts=PROMPTS, sampling=GREEDY, seed=0, count=12, **options):
    return generate(target, prompts, max_new_tokens=count, sampling=sampling, seed=seed, **options)


def test_greedy_generation_equals_one_forward_pass_per_token(target):
    said = run(target)
    assert [row.token_ids for row in said] == [naive(target, prompt, 12) for prompt in PROMPTS]


def test_prompts_without_a_common_beginning_are_no_special_case(target):
    prompts = [[5, 6, 7], [8, 9], [200]]
    assert [row.token_ids for row in run(target, prompts)] == [naive(target, prompt, 12) for prompt in prompts]


def test_one_prompt_that_begins_another_keeps_a_token_of_its_own(target):
    prompts = [[5, 6], [5, 6, 7], [5, 6]]
    assert [row.token_ids for row in run(target, prompts)] == [naive(target, prompt, 12) for prompt in prompts]


def test_long_prompts_are_run_in_groups(target, monkeypatch):
    expected = [row.token_ids for row in run(target)]
    monkeypatch.setattr(generation, "PREFILL_TOKENS", 10)
    assert [row.token_ids for row in run(target)] == expected


def with_ends(target, monkeypatch, share):
    """Make every fifth token an end of sequence, so that rows finish at different times."""
    monkeypatch.setattr(target, "eos_token_ids", frozenset(range(0, 280, 5)))
    monkeypatch.setattr(generation, "_DROP_SHARE", share)
    return run(target, PROMPTS * 4, HOT, seed=7, count=30)


def test_dropping_finished_rows_changes_no_token(target, monkeypatch):
    never = with_ends(target, monkeypatch, share=2.0)
    always = with_ends(target, monkeypatch, share=0.0)
    default = with_ends(target, monkeypatch, share=1 / 8)
    assert never == always == default
    assert len({len(row.token_ids) for row in never}) > 3


def test_a_row_ends_with_its_end_token_or_at_its_limit(target, monkeypatch):
    rows = with_ends(target, monkeypatch, share=1 / 8)
    for row in rows:
        ends = [token % 5 == 0 for token in row.token_ids]
        assert not any(ends[:-1])
        assert row.finish_reason == ("stop" if ends[-1] else "length")
        assert ends[-1] or len(row.token_ids) == 30


def test_an_end_token_on_the_last_place_counts_as_stop(target, monkeypatch):
    first = run(target, count=1)[0].token_ids[0]
    monkeypatch.setattr(target, "eos_token_ids", frozenset({first}))
    assert run(target, count=1)[0].finish_reason == "stop"


def test_equal_seeds_draw_equal_tokens_and_others_do_not(target):
    assert run(target, sampling=HOT, seed=3) == run(target, sampling=HOT, seed=3)
    assert run(target, sampling=HOT, seed=3) != run(target, sampling=HOT, seed=4)


def test_equal_prompts_of_a_batch_are_drawn_apart(target):
    said = run(target, [PROMPTS[0]] * 6, HOT)
    assert len({tuple(row.token_ids) for row in said}) > 1


def test_nobody_outgrows_the_targets_positions(target):
    """max_position is 128: a prompt of 125 tokens leaves room for 3."""
    said = run(target, [[7] * 125, [7] * 20], count=10)
    assert [len(row.token_ids) for row in said if row.finish_reason == "length"][:1] in ([3], [10])
    assert len(said[0].token_ids) <= 3
    for prompt in ([], [7] * 128):
        with pytest.raises(DataError, match="1 to 127"):
            run(target, [prompt])


def test_every_step_reports_the_tokens_it_settled_and_may_stop_the_work(target):
    """A step settles one token of each running prompt, and of one that ends all that it will not say any more."""
    counts = []
    said = run(target, on_step=counts.append, count=9)
    assert sum(counts) == 9 * len(PROMPTS)
    lengths = [len(row.token_ids) for row in said]
    for step, settled in enumerate(counts, 1):
        running, ending = sum(length >= step for length in lengths), lengths.count(step)
        assert settled == running + ending * (9 - step)
    assert len(counts) == max(lengths)

    def stop(settled):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(target, on_step=stop)


def spoiled(target, monkeypatch, step, value, row):
    """The target with one logit of a row replaced at a step, counted from 0."""
    logits, calls = target.logits, iter(range(1000))

    def answer(hidden):
        found = logits(hidden)
        if next(calls) == step:
            found[row, 17] = value
        return found

    monkeypatch.setattr(target, "logits", answer)
    return target


@pytest.mark.parametrize("sampling", [GREEDY, HOT])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("names", [None, ["a", "b", "c", "d"]])
def test_logits_that_are_no_numbers_are_refused_with_the_prompt(family, monkeypatch, sampling, value, names):
    target = spoiled(family("qwen3"), monkeypatch, step=2, value=value, row=1)
    said = "prompt 'b'" if names else "prompt 1 of the batch"
    with pytest.raises(DataError, match=f"target 'qwen3' after {said} and 2 tokens"):
        monkeypatch.setattr(target, "eos_token_ids", frozenset())
        run(target, sampling=sampling, names=names)


def test_a_token_that_can_never_be_drawn_is_no_fault(family, monkeypatch):
    """A logit of minus infinity is how models mask a token."""
    target = spoiled(family("qwen3"), monkeypatch, step=0, value=float("-inf"), row=0)
    assert all(row.token_ids for row in run(target))
