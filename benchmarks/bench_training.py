"""A training step's parts: derivatives written by hand against autograd on the plain formula."""

import torch
from pairs import ratio, report
from torch import Tensor

from dspark.drafters import fused
from dspark.drafters.backbone import RMSNorm, rotate
from dspark.training.losses import SlotTargets, distribution_losses

SLOTS, WIDTH, RANK, VOCAB = 1344, 576, 64, 8192  # a step of the demo's build
BATCH, LENGTH, HEADS, HEAD_WIDTH = 8, 168, 9, 64


def losses() -> None:
    head, target_hidden = torch.randn(VOCAB, WIDTH) * 0.05, torch.randn(SLOTS, WIDTH)
    hidden, markov = torch.randn(SLOTS, WIDTH, requires_grad=True), torch.randn(SLOTS, RANK, requires_grad=True)
    w2 = torch.zeros(VOCAB, RANK, requires_grad=True)
    labels, weights = torch.randint(0, VOCAB, (SLOTS,)), torch.rand(SLOTS) / SLOTS
    targets = SlotTargets(labels, target_hidden, torch.logsumexp(target_hidden @ head.T, -1), torch.zeros(SLOTS))

    def ours() -> None:
        objective, _ = distribution_losses(
            hidden,
            markov,
            w2,
            head,
            targets,
            cross_entropy_weights=weights,
            l1_weights=weights,
            low_precision=False,
        )
        objective.backward()

    def plain() -> None:
        draft = torch.log_softmax(hidden @ head.T + markov @ w2.T, -1)
        target = (target_hidden @ head.T - targets.logsumexp[:, None]).exp()
        l1 = (draft.exp() - target).abs().sum(-1)
        objective = (weights * (-draft.gather(1, labels[:, None]).squeeze(1) + l1)).sum()
        objective.backward()

    report("cross entropy and L1 of a step, forward and backward", ratio(ours, plain, pairs=7, seconds=0.3))


def norms() -> None:
    x = torch.randn(SLOTS, WIDTH, requires_grad=True)
    norm = RMSNorm(WIDTH, 1e-6)
    upstream = torch.randn(SLOTS, WIDTH)

    def plain() -> Tensor:
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)) * norm.weight

    report(
        "RMS norm of a step's slots, forward and backward",
        ratio(lambda: norm(x).backward(upstream), lambda: plain().backward(upstream)),
    )


def heads() -> None:
    x = torch.randn(BATCH, LENGTH, HEADS, HEAD_WIDTH, requires_grad=True)
    weight = torch.ones(HEAD_WIDTH, requires_grad=True)
    angles = torch.rand(BATCH, LENGTH, HEAD_WIDTH // 2)
    cos, sin = angles.cos(), angles.sin()
    upstream = torch.randn(BATCH, HEADS, LENGTH, HEAD_WIDTH)

    def plain() -> Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
        return rotate(normed.transpose(1, 2), cos.unsqueeze(1), sin.unsqueeze(1))

    report(
        "norm and rotation of a step's heads, forward and backward",
        ratio(
            lambda: fused.norm_rotate(x, weight, 1e-6, cos, sin).backward(upstream),
            lambda: plain().backward(upstream),
        ),
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    losses()
    norms()
    heads()
