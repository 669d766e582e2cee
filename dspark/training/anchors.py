"""Where blocks start and which of their slots are supervised.

An anchor is a response token whose successor is a response token too, so the last prompt token never is one: at
inference the first response token comes from the target's prefill (deepspec.md, section 2.1).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
Positions = NDArray[np.int64]


def response_mask(length: int, prompt_length: int) -> Mask:
    """Loss mask of one turn: True on response positions, bool [length]."""
    return np.arange(length) >= prompt_length


def anchor_candidates(loss_mask: Mask) -> Positions:
    """Positions p with loss_mask[p] and loss_mask[p + 1], ascending."""
    return np.flatnonzero(loss_mask[:-1] & loss_mask[1:]).astype(np.int64)


def draw_anchors(loss_mask: Mask, count: int, key: tuple[int, ...]) -> Positions:
    """Draw up to `count` different anchors uniformly, ascending.

    Args:
        loss_mask: bool [S].
        key: what the draw depends on, such as (seed, step, sequence); equal keys, equal anchors, on any machine and in
            any order, so that a resumed or distributed run draws the same.
    """
    candidates = anchor_candidates(loss_mask)
    if len(candidates) <= count:
        return candidates
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
    return np.sort(generator.choice(candidates, count, replace=False))


def spaced_anchors(loss_mask: Mask, count: int) -> Positions:
    """Up to `count` candidates at equal distances, ascending: the same ones at every evaluation."""
    candidates = anchor_candidates(loss_mask)
    if len(candidates) <= count:
        return candidates
    return candidates[np.linspace(0, len(candidates) - 1, count).round().astype(np.int64)]


def supervised_slots(loss_mask: Mask, anchors: Positions, gamma: int) -> Mask:
    """Slots that have a label: slot j of anchor p iff p+1 .. p+1+j are all response tokens, bool [N, gamma].

    A block that runs into the end of its turn or of the sequence is cut there.
    """
    positions = anchors[:, None] + 1 + np.arange(gamma)
    inside = positions < len(loss_mask)
    labelled = inside & loss_mask[np.where(inside, positions, 0)]
    return np.logical_and.accumulate(labelled, axis=1)
