"""A chi-square over sampled texts: how often it cries wolf, and how surely it finds each wrong rule."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import wrong_rules
from torch import Tensor

from dspark.decoding.drafting import Proposal, TorchProposer
from dspark.decoding.draws import CounterDraws
from dspark.decoding.loop import decode
from dspark.decoding.policies import Policy, ScheduledDelayed, parse_policy
from dspark.decoding.records import Decoded
from dspark.decoding.truncation import Truncation
from dspark.errors import SettingsError
from dspark.evaluation.sampled_law import CELLS, ChiSquare, critical_value, places
from dspark.evaluation.tiny import tiny_drafter, tiny_target
from dspark.scheduling.cost import CostCurve
from dspark.scheduling.delayed import DelayedPrefixScheduler
from dspark.scheduling.prefix import PrefixScheduler
from dspark.targets.loading import Target

PROMPT = [3, 4, 5]
TEXTS, NEW_TOKENS = 4000, 6


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(24, spread=0.3)


def policy(name: str) -> Policy:
    curve = CostCurve(
        sample_batch_tokens=(1, 1500, 2000, 2500), sample_steps_per_second=(1.0, 0.85, 0.7, 0.5), max_batch_tokens=3000
    )
    return parse_policy(name, scheduler=PrefixScheduler(curve, 2))


def sampled(target: Target, name: str = "fixed", **options: Any) -> list[Decoded]:
    proposer = TorchProposer(tiny_drafter(target, 2))
    return decode(target, proposer, [PROMPT] * TEXTS, max_new_tokens=NEW_TOKENS, temperature=0.8,
                  policy=policy(name), batch_size=1000, **options)  # fmt: skip


def check(target: Target, decoded: list[Decoded]) -> ChiSquare:
    return ChiSquare.of(np.concatenate(places(target, [PROMPT] * len(decoded), decoded)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [("fixed", {}), ("scheduled-delayed", {}), ("threshold(0.5)", {"truncation": Truncation(8, 0.9)})],
)
def test_right_texts_fall_anywhere(target: Target, name: str, options: dict[str, Any]):
    """Right rules pass 999 times in 1000."""
    decoded = sampled(target, name, **options)
    assert sum(int(one.cycles.verified.sum()) for one in decoded) > len(decoded)
    assert not check(target, decoded).rejects()


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutate",
    [
        wrong_rules.no_residual,
        wrong_rules.not_drawn_from_q,
        wrong_rules.temperature_of_the_drafter_only,
        wrong_rules.temperature_of_the_target_only,
        wrong_rules.inverted_ratio,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_wrong_rules_are_rejected_99_times_in_100(target: Target, mutate: Any, monkeypatch: pytest.MonkeyPatch):
    """At a false alarm of 1 in 1000, by as many texts."""
    with monkeypatch.context() as patch:
        mutate(patch)
        decoded = sampled(target)
    found = check(target, decoded)
    assert found.rejects() and found.power() > 0.99


def test_the_power_is_how_often_a_law_as_far_off_is_rejected():
    """Two cells of .46 and .54: the noncentrality of 2000 tokens is 2000 * (.04^2 / .5) * 2 = 12.8. Simulated 200,000
    times."""
    counts = np.random.default_rng(0).multinomial(2000, [0.46, 0.54], size=200_000)
    statistics = ((counts - 1000) ** 2 / 1000).sum(axis=1)
    rejected = float((statistics > critical_value(2)).mean())
    assert ChiSquare(2000, 2, 1 + 12.8).power() == pytest.approx(rejected, abs=0.01)
    assert ChiSquare(2000, 2, 1.0).power() == pytest.approx(1e-3)


def test_chance_is_rejected_once_in_a_thousand_times():
    """100,000 checks of 1500 uniform places each: 100 are expected, with a standard deviation of 10."""
    counts = np.random.default_rng(0).multinomial(1500, np.full(CELLS, 1 / CELLS), size=100_000)
    statistics = ((counts - 1500 / CELLS) ** 2).sum(axis=1) / (1500 / CELLS)
    assert critical_value(CELLS) == pytest.approx(37.697, abs=1e-3)  # from a table, 15 degrees of freedom
    assert abs((statistics > critical_value(CELLS)).sum() - 100) < 40


def test_a_statistic_by_hand():
    """Seven of ten places in the first of two cells: (7 - 5)^2 / 5 + (3 - 5)^2 / 5 = 1.6; with one degree of freedom
    that is the square of a normal number."""
    check = ChiSquare.of(np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.45, 0.49, 0.5, 0.7, 0.9]), cells=2)
    assert (check.tokens, check.statistic, check.impossible) == (10, pytest.approx(1.6), 0)
    assert check.p_value == pytest.approx(math.erfc(math.sqrt(1.6 / 2))) and not check.rejects()


@pytest.mark.parametrize("count", [0, 10, 79])
def test_few_tokens_are_refused(count: int):
    with pytest.raises(SettingsError, match=f"{count} tokens are too few for 16 cells, at least 80 are needed"):
        ChiSquare.of(np.linspace(0, 0.99, count))
    assert ChiSquare.of(np.linspace(0, 0.99, 80)).tokens == 80


def test_as_few_tokens_as_are_taken_keep_the_false_alarm():
    """100,000 checks of 80 uniform places each; 100 are expected, and no more than half as many again."""
    counts = np.random.default_rng(0).multinomial(80, np.full(CELLS, 1 / CELLS), size=100_000)
    statistics = ((counts - 5) ** 2).sum(axis=1) / 5
    assert (statistics > critical_value(CELLS)).sum() < 150


def test_one_token_that_cannot_be_said_is_proof_however_few_there_are():
    found = ChiSquare.of(np.array([0.2, 1.0, 0.7]))
    assert (found.tokens, found.impossible, found.p_value) == (2, 1, 0.0) and found.rejects()
    many = ChiSquare.of(np.append(np.linspace(0, 0.999, 800), 1.0))
    assert (many.tokens, many.impossible) == (800, 1) and many.statistic < 1 and many.rejects()


@pytest.mark.parametrize("label", [{"top_k": 2}, {"top_p": 0.5}, {"top_k": 12, "top_p": 0.5}])
def test_text_that_was_not_cut_as_it_says_is_rejected(target: Target, label: dict[str, Any]):
    decoded = decode(target, None, [PROMPT] * 40, max_new_tokens=NEW_TOKENS, temperature=0.8)
    assert not check(target, decoded).rejects()
    found = check(target, [replace(one, **label) for one in decoded])
    assert found.impossible > 20 and found.rejects()
    cut = decode(target, None, [PROMPT] * 40, max_new_tokens=NEW_TOKENS, temperature=0.8,
                 truncation=Truncation(**label))  # fmt: skip
    right = check(target, cut)
    assert right.impossible == 0 and not right.rejects()


def test_a_token_at_the_border_may_be_said(monkeypatch: pytest.MonkeyPatch):
    """p = (.4, .3, .3): which of the last two is among two is a matter of rounding, and so is whether the second is
    within a nucleus of .4, which the first holds. .35 it holds for sure."""
    target = tiny_target(3)
    target.eos_token_ids = frozenset()
    logits = torch.log(torch.tensor([0.4, 0.3, 0.3]))
    monkeypatch.setattr(target, "logits", lambda hidden: logits.expand(*hidden.shape[:-1], 3))
    decoded = decode(target, None, [[0]] * 20, max_new_tokens=8, temperature=1.0)
    assert {token for one in decoded for token in one.token_ids} == {0, 1, 2}

    def impossible(**label: Any) -> set[int]:
        labelled = [replace(one, **label) for one in decoded]
        found = zip(labelled, places(target, [[0]] * 20, labelled), strict=True)
        return {token for one, at in found for token, place in zip(one.token_ids, at, strict=True) if place == 1}

    assert impossible(top_k=2) == impossible(top_p=0.4) == set()
    assert impossible(top_k=1) == impossible(top_p=0.35) == {1, 2}


def test_a_place_is_the_mass_of_what_is_likelier_and_a_part_of_its_own(monkeypatch: pytest.MonkeyPatch):
    """p = (.2, .5, .3) everywhere: token 1 lies below .5, token 2 below .8, token 0 above."""
    target = tiny_target(3)
    target.eos_token_ids = frozenset()
    logits = torch.log(torch.tensor([0.2, 0.5, 0.3]))
    monkeypatch.setattr(target, "logits", lambda hidden: logits.expand(*hidden.shape[:-1], 3))
    decoded = decode(target, None, [[0]] * 20, max_new_tokens=8, temperature=1.0)
    ends = {1: (0.0, 0.5), 2: (0.5, 0.8), 0: (0.8, 1.0)}
    for one, found in zip(decoded, places(target, [[0]] * 20, decoded), strict=True):
        for token, place in zip(one.token_ids, found, strict=True):
            assert ends[token][0] - 1e-6 <= place <= ends[token][1] + 1e-6


def test_text_without_a_law_and_half_precision_are_refused(target: Target):
    greedy = decode(target, None, [PROMPT], max_new_tokens=3)
    with pytest.raises(SettingsError, match="temperature above 0"):
        places(target, [PROMPT], greedy)
    with pytest.raises(SettingsError, match="checked in float32"):
        places(tiny_target(24, dtype=torch.bfloat16), [PROMPT], greedy)


# ---------------------------------------------------------------- noise of drafts that were cut


class Forewarned:
    """q = (.5, .5); c = .8, .9, .9, and the fourth is .9 where the third draft is 0, and 0 where it is 1.

    Args:
        keep: draw the draft of a place in the text with the same noise again as long as nothing stands there.
    """

    gamma = 4

    def __init__(self, requests: int, keep: bool) -> None:
        self.keeps = keep
        self.noise = np.random.default_rng(7).random((requests, 64))
        self.chance = np.random.default_rng(8)

    def begin(self, batch: int, max_length: int) -> None:
        self.lengths = np.zeros(batch, np.int64)

    def extend(self, features: Tensor, counts: np.ndarray, token_ids: Tensor) -> None:
        self.lengths = self.lengths + counts

    def keep(self, rows: Any) -> None:
        self.lengths = self.lengths[list(rows)]

    def join(self, features: Tensor, counts: np.ndarray, token_ids: Tensor) -> None:
        self.lengths = np.concatenate([self.lengths, counts])

    def propose(self, anchors: Tensor, temperature: float, draws: Any, requests: np.ndarray) -> Proposal:
        ahead = self.lengths[:, None] + 1 + np.arange(4)
        noise = self.noise[requests[:, None], ahead] if self.keeps else self.chance.random(ahead.shape)
        tokens = torch.from_numpy((noise >= 0.5).astype(np.int64))
        stated = torch.tensor([0.8, 0.9, 0.9, 0.9], dtype=torch.float64).repeat(len(anchors), 1)
        stated[:, 3] = torch.where(tokens[:, 2] == 0, 0.9, 1e-9)
        q = torch.full((len(anchors), 4, 2), 0.5, dtype=torch.float64)
        return Proposal(tokens, torch.logit(stated), probs=q, indices=tokens)


class EachAlone:
    """The delayed scheduler over every request by itself."""

    name, drafts = "scheduled-delayed", True

    def begin(self) -> None:
        self._policies: dict[int, ScheduledDelayed] = {}

    def step(self, confidence_logits: np.ndarray, requests: np.ndarray) -> np.ndarray:
        return np.concatenate([self._of(one).lengths(row[None])
                               for row, one in zip(confidence_logits, requests.tolist(), strict=True)])  # fmt: skip

    def lengths(self, confidence_logits: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def _of(self, request: int) -> ScheduledDelayed:
        # Survival .8, .72, .65 and .58: 1, .9, .91, .95 and 1.05 tokens per second, or .89 if the fourth draft is lost.
        # So two steps later a whole block is verified, or nothing.
        curve = CostCurve(
            sample_batch_tokens=(1, 2, 3, 4, 5),
            sample_steps_per_second=(1.0, 0.5, 0.36, 0.3, 0.28),
            max_batch_tokens=5,
        )
        return self._policies.setdefault(request, ScheduledDelayed(DelayedPrefixScheduler(curve, 4)))


@pytest.mark.parametrize(("keep", "exact"), [(False, True), (True, False)], ids=["fresh noise", "noise used again"])
def test_noise_of_cut_drafts_is_not_to_be_used_again(keep: bool, exact: bool, monkeypatch: pytest.MonkeyPatch):
    """The third draft decides how much is verified two steps later. Used again, its noise is what is verified then.

    So it is behind two steps of one token each, whatever they were, that the first token bends towards what was drawn:
    p = (.7, .3) at every place, and the share of 0 is looked at within five standard deviations.
    """
    target = tiny_target(3, dtype=torch.float64)
    target.eos_token_ids = frozenset()
    logits = torch.log(torch.tensor([0.7, 0.3], dtype=torch.float64))
    monkeypatch.setattr(target, "logits", lambda hidden: logits.expand(*hidden.shape[:-1], 2))
    count = 1500
    decoded = decode(target, Forewarned(count, keep), [[0]] * count, max_new_tokens=12, policy=EachAlone(),
                     temperature=1.0, draws=CounterDraws(range(count)), batch_size=count)  # fmt: skip
    first = []
    for one in decoded:
        committed = one.cycles.committed.tolist()
        for cycle in range(2, len(committed)):
            if committed[cycle - 2] == committed[cycle - 1] == 1:
                first.append(one.token_ids[1 + sum(committed[:cycle])])
    share, deviation = float(np.mean(np.array(first) == 0)), (0.21 / len(first)) ** 0.5
    assert len(first) > 1000 and (abs(share - 0.7) < 5 * deviation) == exact
