"""The block-wise losses against plain formulas on whole probability tables, gradients included."""

import math

import pytest
import torch
from torch.nn import functional

from dspark.training import losses
from dspark.training.losses import (
    SlotTargets,
    confidence_loss,
    confidence_target,
    distribution_losses,
)
from dspark.training.products import Multiplier

SLOTS, WIDTH, RANK, VOCAB = 11, 8, 3, 30


@pytest.fixture
def parts():
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "hidden": random(SLOTS, WIDTH).requires_grad_(),
        "markov": random(SLOTS, RANK).requires_grad_(),
        "w2": random(VOCAB, RANK).requires_grad_(),
        "head": random(VOCAB, WIDTH),
        "target_hidden": random(SLOTS, WIDTH),
        "labels": torch.randint(0, VOCAB, (SLOTS,), generator=generator),
        "ce": torch.rand(SLOTS, generator=generator),
        "l1": torch.rand(SLOTS, generator=generator),
    }


def capped(logits, cap):
    return logits if cap is None else cap * torch.tanh(logits / cap)


def plain(parts, ids=None, soft=False, cap=None):
    """CE and L1 over the whole vocabulary; with `ids`, tokens outside get probability zero from the drafter."""
    logits = capped(parts["hidden"] @ parts["head"].T, cap) + parts["markov"] @ parts["w2"].T
    if ids is not None:
        outside = torch.ones(VOCAB, dtype=torch.bool)
        outside[ids] = False
        logits = logits.masked_fill(outside, -math.inf)
    draft = torch.softmax(logits, -1)
    target = torch.softmax(capped(parts["target_hidden"] @ parts["head"].T, cap), -1)
    l1 = (draft - target).abs().sum(-1)
    if soft:
        inside = slice(None) if ids is None else ids
        ce = -(target[:, inside] * torch.log_softmax(logits, -1)[:, inside]).sum(-1)
        return ce, l1, torch.ones(SLOTS, dtype=torch.bool)
    reachable = torch.ones(SLOTS, dtype=torch.bool) if ids is None else torch.isin(parts["labels"], ids)
    labels = torch.where(reachable, parts["labels"], 0 if ids is None else int(ids[0]))
    ce = functional.cross_entropy(logits, labels, reduction="none")
    return torch.where(reachable, ce, 0.0), l1, reachable


def fused(parts, ids=None, low_precision=False, soft=False, cap=None, **confidence):
    normaliser = torch.logsumexp(capped(parts["target_hidden"] @ parts["head"].T, cap), -1)
    labels, head, w2 = parts["labels"], parts["head"], parts["w2"]
    if ids is not None:
        columns = torch.full((VOCAB,), -1)
        columns[ids] = torch.arange(len(ids))
        labels, head, w2 = columns[labels], head[ids], w2[ids]
    targets = SlotTargets(labels, parts["target_hidden"], normaliser, torch.zeros(SLOTS, dtype=torch.int64))
    return distribution_losses(
        parts["hidden"],
        parts["markov"],
        w2,
        head,
        targets,
        cross_entropy_weights=parts["ce"],
        l1_weights=parts["l1"],
        low_precision=low_precision,
        soft_labels=soft,
        cap=cap,
        **confidence,
    )


def gradients(objective, parts):
    return torch.autograd.grad(objective, [parts["hidden"], parts["markov"], parts["w2"]])


@pytest.mark.parametrize("ids", [None, torch.tensor([0, 2, 3, 7, 8, 11, 12, 20, 21, 29])])
@pytest.mark.parametrize("rows", [4, 256])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_losses_and_gradients_equal_the_plain_formulas(parts, monkeypatch, ids, rows, soft, cap):
    """With a reduced vocabulary the plain side still has the whole one: -inf logits outside, exact target mass.

    A soft cap is on the base logits of both sides; the Markov bias comes behind it.
    """
    monkeypatch.setattr(losses, "ROWS", rows)
    monkeypatch.setattr(losses, "CACHED", 3 * VOCAB)
    ce, l1, reachable = plain(parts, ids, soft, cap)
    if ids is not None and not soft:
        assert 0 < int(reachable.sum()) < SLOTS
    expected = (parts["ce"] * ce + parts["l1"] * l1).sum()
    objective, found = fused(parts, ids, soft=soft, cap=cap)
    assert torch.allclose(found.cross_entropy, ce, atol=1e-5)
    assert torch.allclose(found.l1, l1, atol=1e-5)
    assert torch.allclose(objective, expected, atol=1e-5)
    for one, two in zip(gradients(3 * objective, parts), gradients(3 * expected, parts), strict=True):
        assert torch.allclose(one, two, atol=1e-5)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_without_a_sequential_head_the_base_logits_are_all_there_is(parts, cap):
    parts |= {"markov": torch.zeros(SLOTS, 0).requires_grad_(), "w2": torch.zeros(VOCAB, 0).requires_grad_()}
    ce, l1, _ = plain(parts, cap=cap)
    expected = (parts["ce"] * ce + parts["l1"] * l1).sum()
    objective, found = fused(parts, cap=cap)
    assert torch.allclose(found.cross_entropy, ce, atol=1e-5) and torch.allclose(found.l1, l1, atol=1e-5)
    (ours,) = torch.autograd.grad(objective, [parts["hidden"]])
    (theirs,) = torch.autograd.grad(expected, [parts["hidden"]])
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_l1_over_draft_tokens_plus_the_mass_out_of_reach_is_what_is_computed(parts):
    """The formula of the definition: sum over draft tokens |p_d - p_t| + (1 - sum p_t(draft))."""
    ids = torch.tensor([1, 4, 9, 16, 25])
    logits = parts["hidden"] @ parts["head"][ids].T + parts["markov"] @ parts["w2"][ids].T
    target = torch.softmax(parts["target_hidden"] @ parts["head"].T, -1)[:, ids]
    expected = (torch.softmax(logits, -1) - target).abs().sum(-1) + 1 - target.sum(-1)
    assert torch.allclose(fused(parts, ids)[1].l1, expected, atol=1e-5)


def test_the_two_token_case_in_closed_form():
    """Draft logits (0, log 3): p_d = (1/4, 3/4). Target logits (log 3, 0): p_t = (3/4, 1/4). Label 0.

    CE = log 4, L1 = 1, c* = 1/2. With z = z_1 - z_0: dCE/dz_1 = p_1 = 3/4; L1 = 2 (p_1 - 1/4), so
    dL1/dz_1 = 2 p_1 p_0 = 3/8.
    """
    head = torch.eye(2)
    hidden = torch.tensor([[0.0, math.log(3)]], requires_grad=True)
    none = torch.zeros(1, 1), torch.zeros(2, 1)
    known = torch.tensor([[math.log(3), 0.0]])
    targets = SlotTargets(torch.tensor([0]), known, torch.tensor([math.log(4)]), torch.tensor([0]))
    for ce, l1, gradient in [(1.0, 0.0, 3 / 4), (0.0, 1.0, 3 / 8), (0.1, 0.9, 0.075 + 0.3375)]:
        objective, found = distribution_losses(
            hidden,
            *none,
            head,
            targets,
            cross_entropy_weights=torch.tensor([ce]),
            l1_weights=torch.tensor([l1]),
            low_precision=False,
        )
        assert found.cross_entropy.tolist() == pytest.approx([math.log(4)])
        assert found.l1.tolist() == pytest.approx([1.0])
        assert objective.item() == pytest.approx(ce * math.log(4) + l1)
        (found_gradient,) = torch.autograd.grad(objective, hidden)
        assert found_gradient[0].tolist() == pytest.approx([-gradient, gradient])


def test_soft_labels_of_the_two_token_case_in_closed_form():
    """p_d = (1/4, 3/4), p_t = (3/4, 1/4): CE = 3/4 log 4 + 1/4 log 4/3, dCE/dz_1 = p_d1 - p_t1 = 1/2.

    With token 1 outside the draft vocabulary p_d is 1 at token 0: nothing is left to learn.
    """
    hidden = torch.tensor([[0.0, math.log(3)]], requires_grad=True)
    known = torch.tensor([[math.log(3), 0.0]])
    targets = SlotTargets(torch.tensor([-1]), known, torch.tensor([math.log(4)]), torch.tensor([0]))

    def soft(head):
        objective, found = distribution_losses(
            hidden,
            torch.zeros(1, 1),
            torch.zeros(len(head), 1),
            head,
            targets,
            cross_entropy_weights=torch.ones(1),
            l1_weights=torch.zeros(1),
            low_precision=False,
            soft_labels=True,
        )
        (gradient,) = torch.autograd.grad(objective, hidden)
        return found.cross_entropy.item(), gradient[0].tolist()

    ce, gradient = soft(torch.eye(2))
    assert ce == pytest.approx(0.75 * math.log(4) + 0.25 * math.log(4 / 3))
    assert gradient == pytest.approx([-0.5, 0.5])
    ce, gradient = soft(torch.eye(2)[:1])
    assert ce == pytest.approx(0.0, abs=1e-6) and gradient == pytest.approx([0.0, 0.0], abs=1e-6)


def test_evaluation_finds_the_most_probable_column_and_forms_no_gradient(parts):
    with torch.no_grad():
        objective, found = fused(parts)
    logits = parts["hidden"] @ parts["head"].T + parts["markov"] @ parts["w2"].T
    assert torch.equal(found.best, logits.argmax(-1))
    assert not objective.requires_grad
    assert fused(parts)[1].best is None


def test_bfloat16_rounds_factors_not_logits(parts):
    """Relative error of a factor is 2^-9; the gradient of the whole stays within a few percent."""
    exact, rough = fused(parts), fused(parts, low_precision=True)
    assert torch.allclose(exact[1].l1, rough[1].l1, atol=0.1)
    for one, two in zip(gradients(exact[0], parts), gradients(rough[0], parts), strict=True):
        assert (one - two).norm() < 0.05 * one.norm()
    states, rows = torch.full((1, 1), 3.0), torch.tensor([[1.0078125], [1.0]])  # bfloat16 can write all three
    product = Multiplier(True, torch.device("cpu")).logits(states, rows)
    assert product.tolist() == [[3.0234375, 3.0]]  # 3.0234375 has no bfloat16
    assert torch.backends.mkldnn.matmul.fp32_precision != "bf16"


def test_confidence_is_taught_the_analytic_acceptance():
    """c* = 1 - L1/2: 0.75 at L1 = 0.5. BCE at logit 0 is log 2 whatever c*, its slope is 1/2 - c*."""
    l1 = torch.tensor([0.5, 0.0, 2.0, 2.1], requires_grad=True)
    assert confidence_target(l1).tolist() == [0.75, 1.0, 0.0, 0.0]
    logits = torch.zeros(4, requires_grad=True)
    loss = confidence_loss(logits, l1)
    assert loss.tolist() == pytest.approx([math.log(2)] * 4)
    loss.sum().backward()
    assert logits.grad.tolist() == pytest.approx([-0.25, -0.5, 0.5, 0.5])
    assert l1.grad is None  # the target is detached


@pytest.mark.parametrize("rows", [4, 256])
def test_the_confidence_is_taught_in_the_same_pass(parts, monkeypatch, rows):
    """BCE against the acceptance that the slot's own L1 implies, detached: none of it reaches the logits' factors."""
    monkeypatch.setattr(losses, "ROWS", rows)
    confidence = torch.randn(SLOTS, generator=torch.Generator().manual_seed(4)).requires_grad_()
    weights = torch.rand(SLOTS, generator=torch.Generator().manual_seed(5))
    ce, l1, _ = plain(parts)
    bce = functional.binary_cross_entropy_with_logits(confidence, (1 - l1 / 2).detach(), reduction="none")
    expected = (parts["ce"] * ce + parts["l1"] * l1 + weights * bce).sum()
    objective, found = fused(parts, confidence_logits=confidence, confidence_weights=weights)
    assert torch.allclose(found.confidence, bce, atol=1e-5)
    assert torch.allclose(objective, expected, atol=1e-5)
    inputs = [parts["hidden"], parts["markov"], parts["w2"], confidence]
    ours, theirs = torch.autograd.grad(2 * objective, inputs), torch.autograd.grad(2 * expected, inputs)
    for one, two in zip(ours, theirs, strict=True):
        assert torch.allclose(one, two, atol=1e-5)
    assert torch.equal(fused(parts)[1].confidence, torch.zeros(SLOTS))


def test_weights_fall_by_e_to_the_minus_quarter_per_slot():
    targets = SlotTargets(torch.zeros(3), torch.zeros(3), torch.zeros(3), torch.tensor([0, 1, 6]))
    assert targets.weights(4.0).tolist() == pytest.approx([1.0, 0.7788008, 0.2231302])
