"""The three losses of DSpark (section 3.3; deepspec.md, section 2.2), in chunks of slots and without keeping logits.

    objective = a_ce * sum w CE / sum w  +  a_l1 * sum w ||p_d - p_t||_1 / sum w  +  a_conf * sum w BCE / sum w

with w = exp(-j / decay) at slot j. p_d is the drafter's distribution with teacher-forced previous tokens, p_t the
target's at the position before the label, both at temperature 1. The confidence target 1 - L1 / 2 is detached; the
gradient of its BCE flows into the backbone.

No more than one chunk of [slots, vocabulary] is alive at a time, in float32, and none is kept for the backward pass:
the gradient of a chunk is formed while its probabilities are at hand.

With a reduced draft vocabulary p_t stays exact: its logsumexp over the *whole* vocabulary was stored with the features.
The mass that the drafter cannot reach counts in full as L1; a label outside the draft vocabulary has no cross entropy.

Labels are hard, the response's tokens, as published. Soft ones are p_t itself, CE = -sum p_t log p_d over draft tokens:
a few hundred thousand tokens then teach what the target nearly said, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dspark.targets.capping import soft_cap_
from dspark.training.logits import DraftLogits
from dspark.training.products import Multiplier

ROWS = 256  # slots at a time: what there is of tables over the vocabulary
CACHED = 1 << 20  # logits at a time that a CPU makes losses and gradients of: they stay in its cache between passes


@dataclass(frozen=True)
class SlotTargets:
    """What M supervised slots are trained towards.

    Attributes:
        labels: columns of the draft logits, int64 [M]; -1: the label is outside the draft vocabulary.
        target_hidden: the target's final-normed hidden states at the label's position - 1, [M, d].
        logsumexp: over the target's whole vocabulary at those positions, float32 [M].
        slots: j, int64 [M].
    """

    labels: Tensor
    target_hidden: Tensor
    logsumexp: Tensor
    slots: Tensor

    def weights(self, decay: float) -> Tensor:
        """w = exp(-j / decay), float32 [M]."""
        return torch.exp(-self.slots.float() / decay)

    def to(self, device: torch.device) -> SlotTargets:
        """The same on another device."""
        return SlotTargets(
            self.labels.to(device), self.target_hidden.to(device), self.logsumexp.to(device), self.slots.to(device)
        )


@dataclass(frozen=True)
class SlotLosses:
    """What was found per slot, without gradient.

    Attributes:
        cross_entropy: float32 [M]; 0 where a hard label is outside the draft vocabulary.
        l1: ||p_d - p_t||_1, float32 [M], in [0, 2].
        confidence: BCE of the confidence against c*, float32 [M]; 0 where no confidence was asked for.
        best: the most probable draft column, int64 [M]; None in training, where nobody asks.
    """

    cross_entropy: Tensor
    l1: Tensor
    confidence: Tensor
    best: Tensor | None


def distribution_losses(
    hidden: Tensor,
    markov: Tensor,
    markov_w2: Tensor,
    head: Tensor,
    targets: SlotTargets,
    *,
    cross_entropy_weights: Tensor,
    l1_weights: Tensor,
    low_precision: bool,
    soft_labels: bool = False,
    cap: float | None = None,
    confidence_logits: Tensor | None = None,
    confidence_weights: Tensor | None = None,
) -> tuple[Tensor, SlotLosses]:
    """Cross entropy and L1 of slots, and what their confidences lose against the acceptance that L1 implies.

    Args:
        hidden: h, [M, d].
        markov: what W2 turns into the bias, [M, r].
        markov_w2: W2, [Vd, r].
        head: LM head rows of the draft vocabulary, frozen, [Vd, d].
        cross_entropy_weights, l1_weights: float32 [M], denominators included.
        low_precision: multiply in bfloat16; softmaxes and sums are float32 always.
        soft_labels: take cross entropy against the target's distribution instead of the label.
        cap: soft cap of logits, the target's and, before the Markov bias, the drafter's; None: there is none.
        confidence_logits, confidence_weights: [M] each, float32 weights with their denominator; None: there is no
            confidence head.
    Returns:
        the weighted sum of CE, L1 and BCE, differentiable in hidden, markov, markov_w2 and the confidence logits, and
        what was found per slot. Under `torch.no_grad` no gradient is formed.
    """
    training = torch.is_grad_enabled()
    with torch.autocast(hidden.device.type, enabled=False):
        objective, cross_entropy, l1, confidence, best = _Distribution.apply(
            hidden,
            markov,
            markov_w2,
            confidence_logits,
            head,
            targets,
            cross_entropy_weights,
            l1_weights,
            confidence_weights,
            low_precision,
            soft_labels,
            cap,
            training,
        )  # type: ignore[no-untyped-call]
    return objective, SlotLosses(cross_entropy, l1, confidence, None if training else best)


def confidence_target(l1: Tensor) -> Tensor:
    """c* = 1 - L1 / 2: the probability that the slot's token is accepted, clamped to [0, 1], detached."""
    return (1 - 0.5 * l1.detach()).clamp(0, 1)


def confidence_loss(logits: Tensor, l1: Tensor) -> Tensor:
    """BCE of confidence logits [M] against c*, per slot, float32 [M]."""
    return functional.binary_cross_entropy_with_logits(logits.float(), confidence_target(l1), reduction="none")


class _Distribution(torch.autograd.Function):
    """CE, L1 and BCE of chunks of slots; the gradient is formed while the chunk's probabilities are at hand.

    Both distributions sum to 1 over the whole vocabulary and p_d has no mass outside the draft vocabulary, so
    L1 = 2 sum max(p_d - p_t, 0) over draft tokens: what the drafter cannot reach is in it. With z the draft logits,
    i the indicator of p_d > p_t and q = sum i p_d

        d(a CE + b L1)/dz = a (p_d - onehot) + 2 b p_d (i - q),

    where soft labels put p_t for onehot and p_d times its mass within the draft vocabulary for p_d. With c
    the confidence logit, dBCE/dc = sigmoid(c) - c*.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        markov: Tensor,
        markov_w2: Tensor,
        confidence_logits: Tensor | None,
        head: Tensor,
        targets: SlotTargets,
        cross_entropy_weights: Tensor,
        l1_weights: Tensor,
        confidence_weights: Tensor | None,
        low_precision: bool,
        soft_labels: bool,
        cap: float | None,
        training: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        (count, width), device = hidden.shape, hidden.device
        multiply = Multiplier(low_precision, device)
        draft_logits = DraftLogits(hidden, markov, markov_w2, head, cap, multiply)
        wide_head, narrow_markov = multiply.wide(head), multiply.narrow(markov)
        cross_entropy = torch.empty(count, device=device)
        l1 = torch.empty(count, device=device)
        best = torch.empty(0 if training else count, dtype=torch.int64, device=device)
        d_joined = torch.empty(count, width + markov.shape[1], device=device) if training else None
        d_w2 = torch.zeros(markov_w2.shape, device=device) if training else None
        # Buffers for all chunks: fresh memory for every product would cost as much as the arithmetic.
        vocabulary = head.shape[0]
        buffers = [torch.empty(min(ROWS, count), vocabulary, device=device) for _ in range(2)]
        few = max(1, CACHED // vocabulary) if device.type == "cpu" else ROWS
        memory = torch.empty(min(few, ROWS, count), vocabulary, device=device)
        for start in range(0, count, ROWS):
            stop = min(start + ROWS, count)
            logits, target = (buffer[: stop - start] for buffer in buffers)
            draft_logits.write(slice(start, stop), logits)
            multiply.logits(multiply.wide(targets.target_hidden[start:stop]), wide_head, target)
            soft_cap_(target, cap)
            for first in range(start, stop, few):
                rows = slice(first, min(first + few, stop))
                own = slice(rows.start - start, rows.stop - start)
                draft = memory[: rows.stop - rows.start]
                weights = (cross_entropy_weights[rows], l1_weights[rows]) if training else None
                cross_entropy[rows], l1[rows] = _from_products(
                    logits[own], target[own], draft, targets.labels[rows], targets.logsumexp[rows], weights, soft_labels
                )
                if not training:
                    torch.argmax(draft, dim=-1, out=best[rows])
            if d_joined is not None and d_w2 is not None:
                narrow = multiply.narrow(logits)  # by now their gradient
                d_joined[start:stop] = draft_logits.back(logits, narrow)
                d_w2 += torch.mm(narrow.t(), narrow_markov[start:stop])
        confidence, d_confidence = torch.zeros(count, device=device), torch.empty(0)
        if confidence_logits is not None and confidence_weights is not None:
            asked = confidence_logits.float()
            confidence = confidence_loss(asked, l1)
            d_confidence = (torch.sigmoid(asked) - confidence_target(l1)) * confidence_weights
        if d_joined is not None and d_w2 is not None:
            ctx.save_for_backward(d_joined[:, :width], d_joined[:, width:], d_w2, d_confidence)
            last = None if confidence_logits is None else confidence_logits.dtype
            ctx.dtypes = (hidden.dtype, markov.dtype, markov_w2.dtype, last)
        ctx.mark_non_differentiable(cross_entropy, l1, confidence, best)
        objective = torch.dot(cross_entropy_weights, cross_entropy) + torch.dot(l1_weights, l1)
        if confidence_weights is not None:
            objective += torch.dot(confidence_weights, confidence)
        return objective, cross_entropy, l1, confidence, best

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_unused: Any) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        gradients = (None if dtype is None else (gradient * upstream).to(dtype) for gradient, dtype in pairs)
        return *gradients, *[None] * 9


def _from_products(
    logits: Tensor,
    target: Tensor,
    draft: Tensor,
    labels: Tensor,
    logsumexp: Tensor,
    weights: tuple[Tensor, Tensor] | None,
    soft_labels: bool,
) -> tuple[Tensor, Tensor]:
    """CE and L1 of n slots from the products of their states with the head.

    Args:
        logits: the draft's, [n, Vd]; overwritten, with weights by the gradient.
        target: the target's logits, [n, Vd]; overwritten by its distribution.
        draft: memory for the draft's distribution, [n, Vd].
        labels, logsumexp: see `SlotTargets`, [n].
        weights: of CE and L1, [n] each; None: no gradient is formed.
    """
    torch.softmax(logits, dim=-1, out=draft)
    target.sub_(logsumexp.unsqueeze(1)).exp_()
    inside = labels >= 0
    columns = labels.clamp(min=0).unsqueeze(1)
    mass = target.sum(-1) if soft_labels else inside.float()  # of the label within the draft vocabulary
    if soft_labels:
        expected = torch.linalg.vecdot(target, logits)
        cross_entropy = mass * torch.logsumexp(logits, dim=-1) - expected
    else:
        smallest = torch.finfo(draft.dtype).tiny  # a CE of 87 is as good as any larger one
        surprise = -draft.gather(1, columns).squeeze(1).clamp(min=smallest).log()
        cross_entropy = torch.where(inside, surprise, 0.0)
    above = torch.sub(draft, target, out=logits).relu_()
    l1 = above.sum(-1).mul_(2)
    if weights is None:
        return cross_entropy, l1
    a, twice_b = weights[0].unsqueeze(1), 2 * weights[1].unsqueeze(1)
    excess = above.sign_().mul_(draft)  # i p_d
    share = excess.sum(-1, keepdim=True)  # q
    gradient = excess.mul_(twice_b).addcmul_(draft, a * mass.unsqueeze(1) - twice_b * share)
    if soft_labels:
        gradient.addcmul_(target, -a)
    else:
        gradient.scatter_add_(1, columns, -a * mass.unsqueeze(1))
    return cross_entropy, l1
