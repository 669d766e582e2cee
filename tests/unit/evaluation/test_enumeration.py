"""The whole loop, enumerated; and wrong loops, which the enumeration must catch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark.decoding import acceptance, loop
from dspark.decoding.drafting import Proposal, TorchProposer
from dspark.decoding.draws import CounterDraws
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


def no_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejected token is replaced from p instead of what q left over."""
    monkeypatch.setattr(acceptance, "residual", lambda target, drafter, token_ids=None: target)


def _proposals(monkeypatch: pytest.MonkeyPatch, change: Callable[[Proposal], Proposal]) -> None:
    real = TorchProposer.propose
    monkeypatch.setattr(TorchProposer, "propose", lambda *arguments: change(real(*arguments)))


def not_drawn_from_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ratio divides by another distribution than the tokens were drawn from."""
    _proposals(monkeypatch, lambda one: dataclasses.replace(one, probs=one.probs.roll(1, 2)))


def half_precision_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn in float32, divided by in bfloat16: DeepSpec's mistake, the other way round."""
    _proposals(monkeypatch, lambda one: dataclasses.replace(one, probs=one.probs.bfloat16().double()))


def temperature_of_the_drafter_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are drawn at a temperature that the ratio knows nothing of."""

    def cooler(one: Proposal) -> Proposal:
        probs = one.probs.sqrt()
        return dataclasses.replace(one, probs=probs / probs.sum(-1, keepdim=True))

    _proposals(monkeypatch, cooler)


def temperature_of_the_target_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification forgets the temperature."""
    real = loop.distribution
    monkeypatch.setattr(loop, "distribution", lambda logits, temperature, *rest: real(logits, 1.0, *rest))


def inverted_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """q / p instead of p / q."""
    real = loop.accept_sampled

    def inverted(probs: Tensor, proposal: Proposal | None, *rest: Any) -> Any:
        if proposal is None:
            return real(probs, proposal, *rest)
        swapped = dataclasses.replace(proposal, probs=probs[:, :-1])
        accepted, _ = real(torch.cat([proposal.probs, probs[:, -1:]], 1), swapped, *rest)
        rows = torch.arange(len(accepted))
        return accepted, rest[1].categorical(probs[rows, torch.from_numpy(accepted)], rest[2])

    monkeypatch.setattr(loop, "accept_sampled", inverted)


def bonus_from_the_wrong_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token after the block is drawn from the view before its last token."""
    real = loop.accept_sampled

    def shifted(probs: Tensor, proposal: Proposal | None, *rest: Any) -> Any:
        return real(torch.cat([probs[:, :-1], probs[:, -2:-1]], 1) if proposal else probs, proposal, *rest)

    monkeypatch.setattr(loop, "accept_sampled", shifted)


def rejected_context_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rolling back is forgotten: the target goes on after the rejected tokens."""
    real = loop.SlotCache.advance

    def advance(cache: Any, counts: np.ndarray) -> None:
        real(cache, counts if counts.max() > 2 else np.full_like(counts, 2))

    monkeypatch.setattr(loop.SlotCache, "advance", advance)


@pytest.mark.parametrize(
    "mutate",
    [
        no_residual,
        not_drawn_from_q,
        half_precision_draws,
        temperature_of_the_drafter_only,
        temperature_of_the_target_only,
        inverted_ratio,
        bonus_from_the_wrong_place,
        rejected_context_kept,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_a_wrong_loop_is_caught(mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch):
    mutate(monkeypatch)
    visible = 1e-5 if mutate is half_precision_draws else VISIBLE
    # A block of one, so that three tokens show what follows a block that was accepted whole.
    case = enumerate_case("llama", "fixed", gamma=1, temperature=0.5)
    assert case.largest_difference > visible


class Retrospective:
    """Searches the whole curve for the best prefix, with the confidences behind it: not lossless (appendix A)."""

    name, drafts = "retrospective", True

    def lengths(self, confidence_logits: Logits) -> np.ndarray:
        survival = prefix_survival(confidence_logits, np.ones(2))
        theta = np.concatenate([[1.0], (1 + np.cumsum(survival[0])) * np.array([0.5, 0.45])])
        return np.array([int(np.argmax(theta))])


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
    [(Retrospective(), 0.85), (None, 0.70), (Fixed(), 0.70)],
    ids=["retrospective", "early stop", "fixed"],
)
def test_appendix_a(policy: Any, expected: float, monkeypatch: pytest.MonkeyPatch):
    """SPS = 1, .5, .45: looking back gives token 0 with .85 instead of .70; early stop and whole blocks give .70."""
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


def _chi_square(draws_of: Callable[[range], Any]) -> float:
    """Of the first two tokens of 3000 sampled texts against the target's law, 8 degrees of freedom at most."""
    target = tiny_target(3, eos_token_ids=(2,))
    proposer = TorchProposer(tiny_drafter(target, 2))
    seeds = range(3000)
    done = decode(target, proposer, [[0, 1, 0]] * 3000, max_new_tokens=3, temperature=1.0,
                  draws=draws_of(seeds), batch_size=1000)  # fmt: skip
    texts = [tuple(one.token_ids) for one in done]
    law = target_law(target, [0, 1, 0], 3, 1.0)
    return sum((texts.count(text) - 3000 * p) ** 2 / (3000 * p) for text, p in law.items())


class ReusedNoise(CounterDraws):
    """The number that rejected a token is used again for the token that replaces it."""

    def accept(self, probs: Tensor, lengths: np.ndarray, requests: np.ndarray) -> np.ndarray:
        accepted = super().accept(probs, lengths, requests)
        self._numbers[requests] -= (lengths - accepted).astype(np.uint64)
        return accepted


def test_counter_draws_sample_from_the_target_and_reused_noise_does_not():
    """The law has 13 texts, 12 degrees of freedom: chance stays below 40 but once in ten thousand."""
    assert _chi_square(CounterDraws) < 40
    assert _chi_square(ReusedNoise) > 100


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
    assert any(policy == "fixed" and tokens >= 4 for _, policy, tokens, _ in CASES)


def test_a_path_that_is_not_possible_weighs_nothing():
    draws = EnumeratingDraws([(1,)])
    assert draws.categorical(torch.tensor([[1.0, 0.0]]), np.arange(1)).item() == 1
    assert draws.weights == [0.0]


@pytest.mark.parametrize("draft_token_ids", [None, (1, 3)])
def test_a_drafter_without_heads_changes_nothing(draft_token_ids: tuple[int, ...] | None):
    """DFlash: every slot of a block is drawn by itself, so that its q is another one; the law is the target's."""
    case = enumerate_case("llama", "fixed", vocab=4, draft_token_ids=draft_token_ids, tokens=2, heads=False)
    assert case.largest_difference < EXACT and case.drafts
