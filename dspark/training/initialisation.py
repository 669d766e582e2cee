"""Where training starts: with a Markov head that already knows which token follows which.

The head's bias is B(u, v) = W2[v] W1[u]. Counting the train responses gives the smoothed conditional

    p(v | u) = (n(u, v) + kappa p(v)) / (n(u) + kappa),    log p(v | u) = log p(v) + R(u, v) + (a constant of u),

with R(u, v) = log(1 + n(u, v) / (kappa p(v))), zero wherever v never followed u. Channel 0 takes log p(v), the others
the best approximation of R of that rank, pairs weighted by how often they matter. The base logits start small beside
it. The backbone then learns what the last token does not tell, instead of first learning frequencies. Heads with a gate
or a memory start with the same bias: the gate half open everywhere, the memory not yet heard. Without a head (DFlash)
there is nothing to put the counts into: only the base logits start small.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.heads import MarkovHead
from dspark.training.sequences import TrainingSequence

# Of the base logits. Left at norm weights of 1, h is near the input's embedding, and a head tied to it gives that token
# a logit in the seventies: tens of steps are spent on unlearning it.
LOGIT_DEVIATION = 0.3
SMOOTHING = 10.0  # kappa, in observations
UNSEEN = 0.1  # observations of a draft token that no response holds
OVERSAMPLING, ITERATIONS = 16, 3  # of the randomised singular value decomposition


@torch.no_grad()
def initialise(
    drafter: DSparkDrafter, sequences: Sequence[TrainingSequence], columns: Tensor | None, *, seed: int
) -> None:
    """Prepare a new drafter, on the CPU, for training on `sequences`.

    Args:
        columns: column of the draft logits of every target id, int64 [V], -1 outside; None: the whole vocabulary.
        seed: of the randomised decomposition.
    """
    soften(drafter.norm.weight, drafter.head)
    if drafter.config.markov_type == "none":
        return
    previous, following = bigrams(sequences, columns)
    w1, w2 = drafter.markov_head.markov_w1.weight, drafter.markov_head.markov_w2.weight
    frequencies = torch.bincount(following, minlength=len(w2)).double() + UNSEEN
    probability = frequencies / frequencies.sum()
    w1[:, 0] = 1
    w2[:, 0] = (probability.log() - probability.log().mean()).float()
    rank = min(w1.shape[1] - 1, int(torch.bincount(previous).count_nonzero()), len(w2))
    w2[:, 1:] = 0  # channels that the counts don't fill start silent; their W1 is random, so they can learn
    if rank:
        w1[:, 1 : rank + 1], w2[:, 1 : rank + 1] = _low_rank(previous, following, probability, len(w1), rank, seed)
    _open(drafter.markov_head)


@torch.no_grad()
def soften(norm: Tensor, head: Tensor) -> None:
    """Make logits start small: by the weight of the norm before the LM head, [d], in place.

    Args:
        head: [Vd, d].
    """
    # A state of unit root mean square times a row of the head has the row's norm as its deviation.
    norm.fill_(min(1.0, LOGIT_DEVIATION / float(head.float().norm(dim=-1).mean())))


def _open(head: MarkovHead) -> None:
    """Make a gated or rnn head say what W2 W1[u] says: nothing else of its input counts yet."""
    w1, w2 = head.markov_w1.weight, head.markov_w2.weight
    if head.kind == "gated":
        head.gate_proj.weight.zero_()
        w2.mul_(2)  # the gate stands at a half
    elif head.kind == "rnn":
        r = w1.shape[1]
        output = head.joint_proj.weight[2 * r :]
        output.zero_()
        output[:, r : 2 * r] = torch.eye(r)
        # z = tanh(W1[u]) within +-1/2, where tanh is near its steepest, and W2 makes up for the scale.
        scale = 2 * w1.abs().amax(0)
        w1.copy_(torch.atanh(w1 / scale))
        w2.mul_(scale)


def bigrams(sequences: Sequence[TrainingSequence], columns: Tensor | None) -> tuple[Tensor, Tensor]:
    """Neighbouring response tokens: the first's target id and the second's draft column, int64 [n] each."""
    previous = torch.cat([row.token_ids[row.prompt_length : -1] for row in sequences])
    following = torch.cat([row.token_ids[row.prompt_length + 1 :] for row in sequences])
    if columns is None:
        return previous, following
    following = columns[following]
    return previous[following >= 0], following[following >= 0]


def _low_rank(
    previous: Tensor, following: Tensor, probability: Tensor, vocabulary: int, rank: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Factors of R, [V, rank] and [Vd, rank], with the error at (u, v) weighted by sqrt(n(u) p(v))."""
    width = len(probability)
    pairs, counts = torch.unique(previous * width + following, return_counts=True)
    rows, cols = pairs // width, pairs % width
    residual = torch.log1p(counts.double() / (SMOOTHING * probability[cols])).float()
    row_weight = torch.bincount(previous, minlength=vocabulary).clamp(min=1).float().sqrt()
    col_weight = probability.float().sqrt()
    weighted = torch.sparse_coo_tensor(
        torch.stack([rows, cols]),
        residual * row_weight[rows] * col_weight[cols],
        (vocabulary, width),
        check_invariants=True,
    ).coalesce()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wanted = min(rank + OVERSAMPLING, vocabulary, width)
        left, values, right = torch.svd_lowrank(weighted, q=wanted, niter=ITERATIONS)
    share = values[:rank].sqrt()
    first = left[:, :rank] * share / row_weight.unsqueeze(1)
    second = right[:, :rank] * share / col_weight.unsqueeze(1)
    # Only their product is given; equal sizes let one learning rate suit both.
    balance = (second.square().mean() / first[rows.unique_consecutive()].square().mean()).pow(0.25)
    return first * balance, second / balance
