"""The whole loop, enumerated; and wrong loops, which the enumeration must catch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import wrong_rules
from torch import Tensor

from dspark.config.models import MarkovType
from dspark.decoding.drafting import Proposal, TorchProposer
from dspark.decoding.loop import decode
from dspark.decoding.policies import Fixed, Logits
from dspark.evaluation import lossless
from dspark.evaluation.enumeration import EnumeratingDraws, enumerate_law, largest_difference, target_law
from dspark.evaluation.lossless import CASES, check_sampled, enumerate_case
from dspark.evaluation.tiny import tiny_drafter, tiny_target
from dspark.scheduling.survival import prefix_survival

EXACT = 1e-12
VISIBLE = 1e-3


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("policy", ["none", "fixed", "fixed(1)", "threshold(0.5)"])
def test_the_law_of_the_first_tokens_is_the_targets(family: str, policy: str):
    case = enumerate_case(family, policy)
    assert case.largest_difference < EXACT
    assert case.paths > 10
    assert (case.drafts > 0) == (policy != "none")


def test_a_reduced_draft_vocabulary_changes_nothing():
    case = enumerate_case("llama", "fixed", vocab=4, draft_token_ids=(1, 3), tokens=2)
    assert case.largest_difference < EXACT and case.draft_vocab == 2


def test_a_temperature_on_both_sides_changes_nothing():
    assert enumerate_case("llama", "fixed", temperature=0.5, tokens=2).largest_difference < EXACT


def test_the_scheduler_with_early_stop_changes_nothing():
    case = enumerate_case("llama", "scheduled")
    assert case.largest_difference < EXACT and case.drafts


def test_the_delayed_scheduler_changes_nothing():
    """Five tokens: at least four steps where no draft is accepted, sized by nothing, nothing, and the first two."""
    case = enumerate_case("llama", "scheduled-delayed", vocab=2, tokens=5)
    assert case.largest_difference < EXACT and case.drafts


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fixed", "threshold(0.1)", "scheduled", "scheduled-delayed"])
@pytest.mark.parametrize("markov", ["gated", "rnn"])
def test_every_sequential_head_keeps_the_law_under_every_policy(markov: MarkovType, policy: str):
    case = enumerate_case("qwen3", policy, markov=markov, vocab=2, tokens=4, seed=2)
    assert case.largest_difference < EXACT and case.drafts


def test_two_requests_under_one_scheduler_keep_their_joint_law():
    """Each request's confidences decide what of the other is verified, so their joint law is enumerated.

    Both requests draw from one script; the law must be the product of the target's, since requests are independent.
    """
    target = tiny_target(2, eos_token_ids=(1,), dtype=torch.float64)
    proposer = TorchProposer(tiny_drafter(target, 2), torch.float64)
    policy = lossless.parse_policy("scheduled", scheduler=_scheduler())
    prompts = [[0, 0], [0, 0, 0]]
    lengths = set()

    class OneScript(EnumeratingDraws):
        def _choose(self, request: int, probs: np.ndarray) -> int:
            return super()._choose(0, probs)

    def run(draws: EnumeratingDraws, requests: int) -> list[list[int]]:
        done = decode(target, proposer, prompts, max_new_tokens=2, policy=policy, temperature=1.0,
                      draws=OneScriptOf(draws), precision=torch.float64)  # fmt: skip
        lengths.update(int(k) for one in done for k in one.cycles.verified)
        return [[*done[0].token_ids, 9, *done[1].token_ids]]

    def OneScriptOf(draws: EnumeratingDraws) -> EnumeratingDraws:
        draws.__class__ = OneScript
        return draws

    law, _ = enumerate_law(run, batch_size=1)
    first, second = (target_law(target, prompt, 2, 1.0) for prompt in prompts)
    product = {(*a, 9, *b): p * q for a, p in first.items() for b, q in second.items()}
    assert largest_difference(law, product) < EXACT
    assert len(lengths) > 1, "the scheduler verified the same number everywhere: nothing was tested"


def _scheduler(sps: tuple[float, ...] = (1.0, 0.65, 0.55, 0.5, 0.45, 0.4)) -> Any:
    from dspark.scheduling.cost import CostCurve
    from dspark.scheduling.prefix import PrefixScheduler

    tokens = tuple(range(1, len(sps) + 1))
    curve = CostCurve(sample_batch_tokens=tokens, sample_steps_per_second=sps, max_batch_tokens=len(sps))
    return PrefixScheduler(curve, 2)


# ---------------------------------------------------------------- mutants


@pytest.mark.parametrize(
    "mutate",
    [
        wrong_rules.no_residual,
        wrong_rules.not_drawn_from_q,
        wrong_rules.half_precision_ratio,
        wrong_rules.drawn_in_half_precision,
        wrong_rules.temperature_of_the_drafter_only,
        wrong_rules.temperature_of_the_target_only,
        wrong_rules.inverted_ratio,
        wrong_rules.bonus_from_the_wrong_place,
        wrong_rules.rejected_context_kept,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_a_wrong_loop_is_caught(mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch):
    mutate(monkeypatch)
    visible = 1e-5 if "half_precision" in mutate.__name__ else VISIBLE
    # A block of one, so that three tokens show what follows a block that was accepted whole.
    case = enumerate_case("llama", "fixed", gamma=1, temperature=0.5)
    assert case.largest_difference > visible


@pytest.mark.parametrize("policy", ["threshold(0.5)", "scheduled"])
def test_a_confidence_that_knows_its_own_token_is_caught(policy: str, monkeypatch: pytest.MonkeyPatch):
    wrong_rules.confidence_of_the_token_itself(monkeypatch)
    case = enumerate_case("llama", policy, gamma=1)
    assert case.largest_difference > VISIBLE and case.drafts


class Retrospective:
    """Searches the whole curve for the best prefix, with the confidences behind it: not lossless (appendix A)."""

    name, drafts = "retrospective", True

    def lengths(self, confidence_logits: Logits) -> np.ndarray:
        survival = prefix_survival(confidence_logits, np.ones(2))
        theta = np.concatenate([[1.0], (1 + np.cumsum(survival[0])) * np.array([0.5, 0.45])])
        return np.array([int(np.argmax(theta))])


class Refilled:
    """Stops early, and fills the step up to the next captured size with later tokens where those turn out to pay."""

    name, drafts = "refilled", True

    def lengths(self, confidence_logits: Logits) -> np.ndarray:
        survival = prefix_survival(confidence_logits, np.ones(2))
        stopped = _scheduler((1.0, 0.5, 0.45)).plan(survival)
        filled = (1 + survival.sum()) * 0.45
        return np.array([2]) if filled > stopped.tokens_per_second else stopped.lengths


class AppendixA:
    """p = (.7, .3), q = (.5, .5) everywhere; c_1 = .8; c_2 = .9 after token 0 and 0 after token 1."""

    gamma = 2

    def begin(self, batch: int, max_length: int) -> None: ...
    def extend(self, features: Tensor, counts: np.ndarray, token_ids: Tensor) -> None: ...
    def join(self, features: Tensor, counts: np.ndarray, token_ids: Tensor) -> None: ...
    def keep(self, rows: Any) -> None: ...

    def propose(self, anchors: Tensor, temperature: float, draws: Any, requests: np.ndarray) -> Proposal:
        q = torch.full((len(anchors), 2, 2), 0.5, dtype=torch.float64)
        tokens = torch.stack([draws.categorical(q[:, slot], requests) for slot in range(2)], 1)
        second = torch.where(tokens[:, :1] == 0, np.log(9.0), -100.0)
        logits = torch.cat([torch.full((len(anchors), 1), np.log(4.0)), second], 1)
        return Proposal(tokens, logits, probs=q, indices=tokens)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(Retrospective(), 0.85), (Refilled(), 0.85), (None, 0.70), (Fixed(), 0.70)],
    ids=["retrospective", "refilled", "early stop", "fixed"],
)
def test_appendix_a(policy: Any, expected: float, monkeypatch: pytest.MonkeyPatch):
    """SPS = 1, .5, .45: looking back gives token 0 with .85 instead of .70, and so does going on after the stop."""
    policy = policy or lossless.parse_policy("scheduled", scheduler=_scheduler((1.0, 0.5, 0.45)))
    target = tiny_target(3, eos_token_ids=(2,), dtype=torch.float64)
    logits = torch.log(torch.tensor([0.7, 0.3], dtype=torch.float64))
    monkeypatch.setattr(target, "logits", lambda hidden: logits.expand(*hidden.shape[:-1], 2))

    def run(draws: EnumeratingDraws, requests: int) -> list[list[int]]:
        done = decode(target, AppendixA(), [[0]] * requests, max_new_tokens=2, policy=policy, temperature=1.0,
                      draws=draws, precision=torch.float64)  # fmt: skip
        return [one.token_ids for one in done]

    law, _ = enumerate_law(run, batch_size=1)
    assert sum(p for text, p in law.items() if text[1] == 0) == pytest.approx(expected, abs=1e-12)


def _chi_square() -> float:
    """Of the first three tokens of 3000 sampled texts against the target's law."""
    target = tiny_target(3, eos_token_ids=(2,))
    proposer = TorchProposer(tiny_drafter(target, 2))
    done = decode(target, proposer, [[0, 1, 0]] * 3000, max_new_tokens=3, temperature=1.0, batch_size=1000)
    texts = [tuple(one.token_ids) for one in done]
    law = target_law(target, [0, 1, 0], 3, 1.0)
    return sum((texts.count(text) - 3000 * p) ** 2 / (3000 * p) for text, p in law.items())


def test_counter_draws_sample_from_the_target_and_reused_noise_does_not(monkeypatch: pytest.MonkeyPatch):
    """The law has 13 texts, 12 degrees of freedom: chance stays below 40 but once in ten thousand."""
    assert _chi_square() < 40
    wrong_rules.reused_noise(monkeypatch)
    assert _chi_square() > 100


# ---------------------------------------------------------------- the report


def test_the_report_passes_only_if_drafts_were_seen(monkeypatch: pytest.MonkeyPatch):
    case = enumerate_case("llama", "fixed", tokens=2)
    monkeypatch.setattr(lossless, "enumerate_case", lambda *_, **__: case)
    report = check_sampled()
    assert report.result == "pass" and len(report.cases) == len(CASES)
    blind = case.model_copy(update={"drafts": 0})
    monkeypatch.setattr(lossless, "enumerate_case", lambda *_, **__: blind)
    assert check_sampled().result == "inconclusive"
    wrong = case.model_copy(update={"largest_difference": 1e-6})
    monkeypatch.setattr(lossless, "enumerate_case", lambda *_, **__: wrong)
    assert check_sampled().result == "fail"


def test_the_cases_show_the_bonus_token():
    assert any(policy == "fixed" and tokens >= 4 for _, policy, tokens, *_ in CASES)


def test_a_path_that_is_not_possible_weighs_nothing():
    draws = EnumeratingDraws([(1,)])
    assert draws.categorical(torch.tensor([[1.0, 0.0]]), np.arange(1)).item() == 1
    assert draws.weights == [0.0]


@pytest.mark.parametrize("draft_token_ids", [None, (1, 3)])
def test_a_drafter_without_heads_changes_nothing(draft_token_ids: tuple[int, ...] | None):
    """DFlash: every slot of a block is drawn by itself, so that its q is another one; the law is the target's."""
    case = enumerate_case("llama", "fixed", vocab=4, draft_token_ids=draft_token_ids, tokens=2, markov="none")
    assert case.largest_difference < EXACT and case.drafts
