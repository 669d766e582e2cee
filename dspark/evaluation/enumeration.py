"""Exact enumeration of everything that the decoding loop can draw on a tiny vocabulary.

The real loop runs with `EnumeratingDraws`, which follows a script of outcomes instead of chance. Past the end of its
script a request takes the first possible outcome and every other one becomes a new script, so that each path of draws
is walked exactly once, with its exact probability. Many scripts run as the rows of one batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.decoding.draws import Draws, Rows
from dspark.decoding.prefixes import Counts
from dspark.targets.loading import Target

Tokens = tuple[int, ...]
Law = dict[Tokens, float]  # probability of each sequence
Run = Callable[["EnumeratingDraws", int], Sequence[Sequence[int]]]


class EnumeratingDraws(Draws):
    """Draws that follow scripts, one per request, and note where the paths branch.

    Attributes:
        weights: probability of the path that each request has taken.
        branches: the scripts of the paths not taken.
    """

    def __init__(self, scripts: Sequence[Tokens]) -> None:
        self._scripts = scripts
        self._paths: list[list[int]] = [[] for _ in scripts]
        self.weights = [1.0] * len(scripts)
        self.branches: list[Tokens] = []

    def categorical(self, probs: Tensor, requests: Rows) -> Tensor:
        """See `Draws`: one outcome per column of positive probability."""
        rows = probs.double().cpu().numpy()
        drawn = [self._choose(int(request), row / row.sum()) for request, row in zip(requests, rows, strict=True)]
        return torch.tensor(drawn, device=probs.device)

    def accept(self, probs: Tensor, lengths: Counts, requests: Rows) -> Counts:
        """See `Draws`: one outcome per number of accepted tokens."""
        rows = probs.double().cpu().numpy()
        accepted = []
        for request, length, row in zip(requests, lengths.tolist(), rows, strict=True):
            survival = np.concatenate(([1.0], np.cumprod(row[:length]), [0.0]))
            # Nothing to verify is nothing to draw, whatever the other rows of the batch verify.
            accepted.append(self._choose(int(request), survival[:-1] - survival[1:]) if length else 0)
        return np.array(accepted, np.int64)

    def _choose(self, request: int, probs: NDArray[np.float64]) -> int:
        """The outcome of the request's next draw, of outcomes with probabilities [n]."""
        script, path = self._scripts[request], self._paths[request]
        if len(path) < len(script):
            outcome = script[len(path)]
        else:
            outcome, *others = np.flatnonzero(probs).tolist()
            self.branches += [(*path, other) for other in others]
        self.weights[request] *= float(probs[outcome])
        path.append(outcome)
        return outcome


def enumerate_law(run: Run, batch_size: int = 512) -> tuple[Law, int]:
    """The exact law of what a decoding loop emits.

    Args:
        run: decodes n requests with the draws it is given, `run(draws, n)`, and returns what each emitted. Rows must
            not influence each other, unless `batch_size` is 1.
        batch_size: scripts per run.
    Returns:
        the law, and how many paths it was summed over.
    """
    law: Law = {}
    pending: list[Tokens] = [()]
    paths = 0
    while pending:
        scripts, pending = pending[-batch_size:], pending[:-batch_size]
        draws = EnumeratingDraws(scripts)
        for emitted, weight in zip(run(draws, len(scripts)), draws.weights, strict=True):
            law[tuple(emitted)] = law.get(tuple(emitted), 0.0) + weight
        paths += len(scripts)
        pending += draws.branches
    return law, paths


@torch.inference_mode()
def target_law(target: Target, prompt: Sequence[int], tokens: int, temperature: float) -> Law:
    """The law of the first `tokens` tokens in closed form: the product of the target's conditional probabilities.

    One forward pass without a cache over every prefix; sequences stop at an end of sequence.
    """
    vocabulary = target.record.vocab_physical
    law: Law = {(): 1.0}
    for _ in range(tokens):
        open_prefixes = [prefix for prefix in law if not (prefix and prefix[-1] in target.eos_token_ids)]
        ids = torch.tensor([[*prompt, *prefix] for prefix in open_prefixes], device=target.device)
        last_hidden = target.last_hidden(ids)[:, -1]
        probs = torch.softmax(target.logits(last_hidden).double() / temperature, -1).tolist()
        for prefix, row in zip(open_prefixes, probs, strict=True):
            weight = law.pop(prefix)
            law |= {(*prefix, token): weight * row[token] for token in range(vocabulary)}
    return law


def largest_difference(first: Law, second: Law) -> float:
    """The largest absolute difference of probability over all sequences of either law."""
    return max(abs(first.get(key, 0.0) - second.get(key, 0.0)) for key in itertools.chain(first, second))
