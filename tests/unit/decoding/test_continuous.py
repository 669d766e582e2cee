"""Requests that join and leave between cycles say what they say alone, whoever else is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark.config.models import DrafterSettings, MarkovSettings
from dspark.decoding import loop
from dspark.decoding.drafting import Proposer
from dspark.decoding.draws import CounterDraws
from dspark.decoding.loop import ContinuousBatch, decode
from dspark.decoding.policies import Policy, parse_policy
from dspark.decoding.proposers import torch_proposer
from dspark.decoding.records import Decoded
from dspark.decoding.truncation import WHOLE, Truncation
from dspark.drafters.config import DrafterConfig
from dspark.drafters.kinds import build_drafter
from dspark.errors import DataError
from dspark.evaluation.tiny import tiny_drafter, tiny_target
from dspark.scheduling.cost import CostCurve
from dspark.scheduling.prefix import PrefixScheduler
from dspark.targets.loading import Target

PROMPTS = [[3, 4, 5], [7] * 9, [2, 9, 30, 4, 5], [5, 6], [11, 12, 13, 14, 15, 16], [8, 2]]
NEW_TOKENS = 10
POSITIONS = 9 + NEW_TOKENS + 3
SEEDS = range(50, 50 + len(PROMPTS))


def policy(name: str) -> Policy:
    # Steep enough for schedulers to leave out some of three drafts each, with a random drafter's confidences.
    curve = CostCurve(
        sample_batch_tokens=tuple(range(1, 13)),
        sample_steps_per_second=tuple(1 / (1 + 0.16 * tokens) for tokens in range(1, 13)),
        max_batch_tokens=24,
    )
    return parse_policy(name, scheduler=PrefixScheduler(curve, 3))


def eagle3(target: Target) -> Proposer:
    heads = {"markov": MarkovSettings(type="none"), "confidence": False}
    config = DrafterConfig.of(target.record, DrafterSettings(kind="eagle3", gamma=3, layers=1, **heads))
    drafter = build_drafter(config, target.embedding, target.head, seed=1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return torch_proposer(drafter.to(target.dtype))


DRAFTERS: dict[str, Callable[[Target], Proposer | None]] = {
    "none": lambda target: None,
    "dspark": lambda target: torch_proposer(tiny_drafter(target, 3)),
    "eagle3": eagle3,
}


def served(
    target: Target,
    proposer: Proposer | None,
    chosen: Policy,
    arrivals: Sequence[int],
    limits: Sequence[int],
    slots: int,
    **options: Any,
) -> dict[int, Decoded]:
    """Requests join when the cycle of their arrival has come and a slot is free, in the order of their arrivals."""
    batch = ContinuousBatch(
        target, proposer, slots=slots, positions=POSITIONS, policy=chosen, draws=CounterDraws(SEEDS), **options
    )
    waiting = sorted(range(len(arrivals)), key=lambda request: arrivals[request])
    results: dict[int, Decoded] = {}
    cycle = 0
    while waiting or batch.active:
        joining = [request for request in waiting if arrivals[request] <= cycle][: batch.free]
        if joining:
            waiting = [request for request in waiting if request not in joining]
            batch.join([PROMPTS[one] for one in joining], joining, [limits[one] for one in joining])
        elif batch.active:
            batch.cycle()
        cycle += not joining
        results |= batch.finished()
    return results


def alone(target: Target, proposer: Proposer | None, chosen: Policy, **options: Any) -> list[list[int]]:
    done = decode(
        target, proposer, PROMPTS, max_new_tokens=NEW_TOKENS, policy=chosen, seeds=SEEDS, batch_size=1, **options
    )
    return [one.token_ids for one in done]


GREEDY = [("none", "none"), ("dspark", "fixed"), ("dspark", "threshold(0.5)"), ("dspark", "scheduled"),
          ("dspark", "scheduled-delayed"), ("eagle3", "fixed(2)")]  # fmt: skip
CASES = [(*case, 0.0, WHOLE) for case in GREEDY]
# How much a scheduler verifies, and so how many numbers a request draws, depends on the others: equal in law only.
CASES += [("none", "none", 1.0, WHOLE), ("dspark", "fixed", 1.0, WHOLE), ("dspark", "threshold(0.5)", 0.8, WHOLE),
          ("eagle3", "fixed", 1.0, WHOLE), ("dspark", "fixed", 1.0, Truncation(8, 0.9)),
          ("eagle3", "fixed", 1.0, Truncation(0, 0.8))]  # fmt: skip


@pytest.mark.parametrize(("drafter", "name", "temperature", "truncation"), CASES)
def test_what_a_request_says_depends_on_nobody_else(llama: Target, drafter, name, temperature, truncation):
    """Random arrivals, limits and numbers of slots against every request alone; a limit only cuts the text."""
    proposer, chosen = DRAFTERS[drafter](llama), policy(name)
    options = {"temperature": temperature, "truncation": truncation}
    texts = alone(llama, proposer, chosen, **options)

    @settings(max_examples=4, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(st.integers(0, 12), min_size=len(PROMPTS), max_size=len(PROMPTS)),
        st.lists(st.integers(1, NEW_TOKENS), min_size=len(PROMPTS), max_size=len(PROMPTS)),
        st.integers(1, 4),
    )
    def check(arrivals: list[int], limits: list[int], slots: int) -> None:
        done = served(llama, proposer, chosen, arrivals, limits, slots, **options)
        assert {request: one.token_ids for request, one in done.items()} == {
            request: text[: limits[request]] for request, text in enumerate(texts)
        }

    check()


@pytest.mark.parametrize("name", ["scheduled", "scheduled-delayed"])
def test_beside_others_a_scheduler_changes_draws_but_no_greedy_text(llama: Target, name: str):
    """How many drafts a request verifies, and so which numbers it uses for what, depends on the others: at temperature
    1 some text is another one, of the same law, as is enumerated elsewhere (test_enumeration.py)."""
    proposer, arrivals, limits = DRAFTERS["dspark"](llama), [0] * len(PROMPTS), [NEW_TOKENS] * len(PROMPTS)
    equal = {}
    for temperature in (0.0, 1.0):
        options = {"temperature": temperature}
        beside = served(llama, proposer, policy(name), arrivals, limits, len(PROMPTS), **options)
        by_itself = alone(llama, proposer, policy(name), **options)
        equal[temperature] = [beside[request].token_ids == text for request, text in enumerate(by_itself)]
    assert all(equal[0.0]) and not all(equal[1.0])


def endless() -> Target:
    """A target whose texts are as long as they may be."""
    target = tiny_target(40, spread=0.5)
    target.eos_token_ids = frozenset()
    return target


def test_slots_are_refilled_while_others_go_on():
    """Two slots, six requests: the others have 1, 1, 2, 1 and 1 cycles in turn, the first one has 9."""
    done = served(endless(), None, policy("none"), [0] * 6, [10, 2, 2, 3, 2, 2], 2, temperature=0.0)
    assert done[0].cycles.rows.tolist() == [2] * 6 + [1] * 3


def test_decode_refills_its_batch():
    """Texts of 2 and 14 tokens: in batches from begin to end, the short ones would wait for the long ones."""
    target, seen = endless(), []

    class Watched(ContinuousBatch):
        def join(self, prompts: Any, requests: Any, max_new_tokens: Any) -> float:
            return super().join(prompts, requests, [2 if request % 2 else 14 for request in requests])

        def cycle(self) -> Any:
            seen.append(self.active)
            return super().cycle()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "ContinuousBatch", Watched)
        decode(target, None, PROMPTS, max_new_tokens=14, batch_size=3)
    assert sum(seen) == 3 * 13 + 3 * 1
    assert len(seen) < 2 * 13, "two batches of three, each as long as its longest text"


def test_memory_is_allocated_once(llama: Target):
    proposer = torch_proposer(tiny_drafter(llama, 3))
    batch = ContinuousBatch(llama, proposer, slots=2, positions=POSITIONS, policy=policy("fixed"), temperature=0.0,
                            draws=CounterDraws(SEEDS))  # fmt: skip
    places = set()
    for request, prompt in enumerate(PROMPTS):
        batch.join([prompt], [request], 5)
        while batch.active:
            batch.cycle()
        layer, context = batch._cache.layers[0], proposer._context  # type: ignore[attr-defined]
        places.add((layer.keys.data_ptr(), context.keys[0].data_ptr()))
        assert layer.keys.shape[0] == context.keys[0].shape[0] == 2
    assert len(places) == 1


def test_who_does_not_fit_is_refused(llama: Target):
    batch = ContinuousBatch(llama, None, slots=2, positions=10, policy=policy("none"), temperature=0.0,
                            draws=CounterDraws(SEEDS))  # fmt: skip
    with pytest.raises(DataError, match=r"prompt 4 has 6 tokens; with 5 more it would pass a slot's 10 positions"):
        batch.join([PROMPTS[4]], [4], 5)
    with pytest.raises(DataError, match="prompt 7 is empty"):
        batch.join([[]], [7], 5)
    with pytest.raises(ValueError, match="no slots for 3 rows beside 0 of 2"):
        batch.join([[3], [4], [5]], [0, 1, 2], 5)
    batch.join([[3]], [0], 5)
    with pytest.raises(ValueError, match="no slots for 2 rows beside 1 of 2"):
        batch.join([[3], [4]], [1, 2], 5)
    assert batch.active == 1 and batch.free == 1


def test_the_end_of_a_text_inside_an_accepted_block_frees_the_slot(scripted):
    """Blocks of three right drafts, of which the second ends the text: what was accepted behind it is dropped."""
    target = endless()
    texts = [one.token_ids for one in decode(target, None, PROMPTS, max_new_tokens=NEW_TOKENS)]
    chosen = next(request for request, text in enumerate(texts) if text[2] not in text[:2])
    batch = ContinuousBatch(
        target,
        scripted(3, PROMPTS, texts),
        slots=1,
        positions=POSITIONS,
        policy=policy("fixed"),
        temperature=0.0,
        draws=CounterDraws(SEEDS),
        eos_token_ids=frozenset({texts[chosen][2]}),
    )
    batch.join([PROMPTS[chosen]], [chosen], NEW_TOKENS)
    batch.cycle()
    done = batch.finished()[chosen]
    assert batch.free == 1 and done.token_ids == texts[chosen][:3] and done.finish_reason == "stop"
    assert done.cycles.accepted.tolist() == [2] and done.cycles.known.tolist() == [2]


# ---------------------------------------------------------------- mutants


def draws_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise belongs to the row instead of the request: who sits elsewhere says something else."""
    real = CounterDraws.uniform
    monkeypatch.setattr(CounterDraws, "uniform", lambda draws, rows, counts: real(draws, np.arange(len(rows)), counts))


def leftovers_of_the_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is not emptied for who comes next."""
    real = loop.SlotCache.join

    def join(cache: Any, count: int) -> None:
        real(cache, count)
        cache.lengths[-count:] = 1

    monkeypatch.setattr(loop.SlotCache, "join", join)


def rows_stay_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing moves when a row leaves: the last one goes on after another one's context."""

    def keep(cache: Any, rows: Sequence[int]) -> None:
        cache.lengths = cache.lengths[list(rows)]

    monkeypatch.setattr(loop.SlotCache, "keep", keep)


@pytest.mark.parametrize("mutate", [draws_by_row, leftovers_of_the_last_request, rows_stay_where_they_were],
                         ids=lambda mutate: mutate.__name__)  # fmt: skip
def test_a_wrong_batch_is_caught(llama: Target, mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch):
    proposer, chosen = DRAFTERS["dspark"](llama), policy("fixed")
    texts = alone(llama, proposer, chosen, temperature=1.0)
    mutate(monkeypatch)
    limits = [9, 2, 6, 3, 8, 9]
    done = served(llama, proposer, chosen, [0, 0, 1, 1, 2, 3], limits, 3, temperature=1.0)
    expected = [text[:limit] for text, limit in zip(texts, limits, strict=True)]
    assert [done[request].token_ids for request in range(6)] != expected
