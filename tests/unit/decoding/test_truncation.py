"""Top-k and top-p on both sides of the acceptance rule: what may be drawn, and the law that comes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.config.models import Sampling
from dspark.decoding import acceptance, drafting, loop
from dspark.decoding.acceptance import distribution
from dspark.decoding.drafting import TorchProposer
from dspark.decoding.history import History
from dspark.decoding.loop import decode
from dspark.decoding.policies import Policy, parse_policy
from dspark.decoding.records import RecordSet, calibration_records, read_records, write_records
from dspark.decoding.truncation import WHOLE, Truncation
from dspark.errors import DataError, SettingsError
from dspark.evaluation.enumeration import EnumeratingDraws, Law, enumerate_law, largest_difference
from dspark.evaluation.tiny import tiny_drafter, tiny_target
from dspark.targets.loading import Target
from dspark.targets.sampling import draw

EXACT, VISIBLE = 1e-12, 1e-3


def by_hand(probs: list[float], top_k: int, top_p: float) -> list[float]:
    """The most likely tokens one by one, until there are `top_k`, or those of before hold `top_p` of the mass of k."""
    ranked = sorted(range(len(probs)), key=lambda token: -probs[token])[: top_k or len(probs)]
    mass, held, kept = sum(probs[token] for token in ranked), 0.0, []
    for token in ranked:
        if held >= top_p * mass and kept:
            break
        kept.append(token)
        held += probs[token]
    return [probs[token] / held if token in kept else 0.0 for token in range(len(probs))]


@settings(max_examples=60, derandomize=True)
@given(
    st.lists(st.floats(0.001, 1), min_size=2, max_size=90, unique=True),
    st.integers(0, 100),
    st.floats(0.05, 1),
)
def test_what_remains_is_what_counting_by_hand_leaves(weights: list[float], top_k: int, top_p: float):
    probs = torch.tensor(weights, dtype=torch.float64)
    probs /= probs.sum()
    expected = by_hand(probs.tolist(), top_k, top_p)
    both = Truncation(top_k, top_p).of(torch.stack([probs, probs.flip(0)])[None])
    np.testing.assert_allclose(both[0, 0].numpy(), expected, atol=1e-14)
    np.testing.assert_allclose(both[0, 1].flip(0).numpy(), expected, atol=1e-14)


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.6), (7, 0.5), (0, 0.97)])
def test_the_loop_draws_from_what_the_generator_of_responses_draws_from(top_k: int, top_p: float):
    """The same support and law as `targets.sampling.draw`, asked on a grid of 20 000 uniform numbers.

    The last row is flat, so that its nucleus is wider than what is looked at first.
    """
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(2)) * torch.tensor([[3.0], [1.5], [0.1]])
    probs = distribution(logits, 0.8, torch.float64, Truncation(top_k, top_p))
    assert torch.allclose(probs.sum(-1), torch.ones(3, dtype=torch.float64))
    grid = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    for row in range(3):
        drawn = draw(logits[row].expand(len(grid), -1), Sampling(temperature=0.8, top_k=top_k, top_p=top_p), grid)
        shares = torch.bincount(drawn, minlength=200) / len(grid)
        assert set(shares.nonzero()[:, 0].tolist()) == set(probs[row].nonzero()[:, 0].tolist())
        np.testing.assert_allclose(shares.numpy(), probs[row].numpy(), atol=2e-4)


def test_limits_out_of_range_are_refused_and_no_limit_changes_nothing():
    probs = torch.softmax(torch.randn(2, 9, generator=torch.Generator().manual_seed(0)), -1)
    assert WHOLE.of(probs) is probs and WHOLE.whole and not Truncation(0, 0.5).whole
    assert Truncation(9).of(probs) is probs and Truncation(50).of(probs) is probs
    for wrong in ({"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}):
        with pytest.raises(SettingsError, match=r"sets no limit|must be"):
            Truncation(**wrong)


# ---------------------------------------------------------------- the law


def cut_law(target: Target, prompt: list[int], tokens: int, temperature: float, top_k: int, top_p: float) -> Law:
    """Products of the target's conditional probabilities, each cut by hand."""
    law: Law = {(): 1.0}
    for _ in range(tokens):
        longer: Law = {}
        for prefix, weight in law.items():
            if prefix and prefix[-1] in target.eos_token_ids:
                longer[prefix] = weight
                continue
            logits = target.logits(target.last_hidden(torch.tensor([[*prompt, *prefix]]))[0, -1]).double()
            cut = by_hand(torch.softmax(logits / temperature, -1).tolist(), top_k, top_p)
            longer |= {(*prefix, token): weight * share for token, share in enumerate(cut) if share}
        law = longer
    return law


def difference(
    truncation: Truncation, policy: Policy, *, tokens: int = 3, draft_ids: tuple[int, ...] | None = None, gamma: int = 2
) -> float:
    """Between what the loop says and the cut law, over all texts."""
    target = tiny_target(4, eos_token_ids=(3,), dtype=torch.float64)
    proposer = TorchProposer(tiny_drafter(target, gamma, draft_token_ids=draft_ids), torch.float64)
    prompt = [0, 1, 0, 2]
    drafts = 0

    def run(draws: EnumeratingDraws, requests: int) -> list[list[int]]:
        nonlocal drafts
        done = decode(target, proposer, [prompt] * requests, max_new_tokens=tokens, policy=policy, temperature=0.9,
                      truncation=truncation, draws=draws, precision=torch.float64, batch_size=requests)  # fmt: skip
        drafts += sum(int(one.cycles.verified.sum()) for one in done)
        assert {(one.top_k, one.top_p) for one in done} == {(truncation.top_k, truncation.top_p)}
        return [one.token_ids for one in done]

    law, _ = enumerate_law(run)
    assert drafts, "nothing was verified"
    return largest_difference(law, cut_law(target, prompt, tokens, 0.9, truncation.top_k, truncation.top_p))


@pytest.mark.parametrize(
    ("truncation", "policy", "draft_ids"),
    [
        (Truncation(2), "fixed", None),
        (Truncation(0, 0.7), "fixed", None),
        (Truncation(3, 0.8), "threshold(0.5)", None),
        (Truncation(2, 0.9), "fixed(1)", None),
        (Truncation(0, 0.75), "fixed", (0, 2)),
    ],
)
def test_the_law_is_the_cut_targets(truncation: Truncation, policy: str, draft_ids: tuple[int, ...] | None):
    assert difference(truncation, parse_policy(policy), draft_ids=draft_ids) < EXACT


def of_the_drafter_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification forgets the truncation."""
    real = loop.distribution
    monkeypatch.setattr(loop, "distribution", lambda *arguments: real(*arguments[:3]))


def cut_after_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are drawn from whole distributions, and the ratio divides by cut ones."""
    real = TorchProposer.propose

    def propose(self: Any, anchors: Any, temperature: float, draws: Any, requests: Any, truncation: Any) -> Any:
        whole = real(self, anchors, temperature, draws, requests)
        cut = truncation.of(whole.probs)
        return dataclasses.replace(whole, probs=torch.where(cut > 0, cut, whole.probs))

    monkeypatch.setattr(TorchProposer, "propose", propose)


def residual_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rejected draft is replaced from is worked out from a drafter that was not cut."""
    kept: list[torch.Tensor] = []
    real, rule = drafting.distribution, acceptance.residual

    def remembered(logits: Any, temperature: float, precision: Any, truncation: Any) -> Any:
        kept.append(real(logits, temperature, precision))
        return real(logits, temperature, precision, truncation)

    def residual(target: Any, drafter: Any, token_ids: Any = None) -> Any:
        return rule(target, kept[-1] if kept[-1].shape == drafter.shape else drafter, token_ids)

    monkeypatch.setattr(drafting, "distribution", remembered)
    monkeypatch.setattr(acceptance, "residual", residual)


@pytest.mark.parametrize("mutate", [of_the_drafter_only, cut_after_drawing, residual_of_the_whole],
                         ids=lambda mutate: mutate.__name__)  # fmt: skip
def test_a_truncation_on_one_side_is_caught(mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch):
    # Blocks of one, so that the last draft is the one that is replaced.
    case = Truncation(2), parse_policy("fixed")
    assert difference(*case, gamma=1) < EXACT
    mutate(monkeypatch)
    assert difference(*case, gamma=1) > VISIBLE


# ---------------------------------------------------------------- what is written down


def test_records_say_how_they_were_cut_and_are_not_mixed_with_others(tmp_path):
    def decoded(truncation: Truncation) -> Any:
        one = History(5, 2, 20, frozenset({1}), 1.0, "fixed", truncation)
        one.begin(7, 0.1)
        one.add([8, 9], 2, 1, 1, np.zeros(2, np.float32), loop.Timing(0.1, 0.2, 1))
        return one.result()

    cut, whole = decoded(Truncation(20, 0.9)), decoded(WHOLE)
    write_records(tmp_path / "cut", RecordSet(("a",), ("math",), (cut,)))
    write_records(tmp_path / "whole", RecordSet(("a",), ("math",), (whole,)))
    found = read_records(tmp_path / "cut").decoded[0]
    assert (found.top_k, found.top_p) == (20, 0.9)
    assert (read_records(tmp_path / "whole").decoded[0].top_k, whole.top_p) == (0, 1.0)
    arrays = calibration_records([cut])
    assert (arrays.top_k, arrays.top_p, arrays.temperature) == (20, 0.9, 1.0)
    with pytest.raises(DataError, match="must share sampling"):
        RecordSet(("a", "b"), ("math", "math"), (cut, whole))
    with pytest.raises(DataError, match="must come from one"):
        calibration_records([cut, whole])


def test_no_arg_max_is_cut_off():
    target = tiny_target(40, spread=0.5)
    proposer = TorchProposer(tiny_drafter(target, 3))
    plain = decode(target, proposer, [[3, 4, 5]], max_new_tokens=8)
    cut = decode(target, proposer, [[3, 4, 5]], max_new_tokens=8, truncation=Truncation(1, 0.1))
    assert cut[0].token_ids == plain[0].token_ids and (cut[0].top_k, cut[0].top_p) == (0, 1.0)
