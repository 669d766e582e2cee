"""Does every dialect draft what the trained drafter drafts, and would the comparison notice if it did not?

Aggregate acceptance hides shifted taps, a wrong RoPE base and a wrong mask token (package.md), so drafts are compared
block by block, on real contexts; and drafters with exactly these faults are put through the same comparison, which has
to refuse them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dspark.drafters.backbone import Rotary
from dspark.drafters.base import Drafter
from dspark.errors import GateError
from dspark.export.blocks import Drafts, Floats, ProbeBlocks, draft
from dspark.export.report import CONFIDENCE_TOLERANCE, LOGIT_TOLERANCE, TIE, Comparison, ParityReport, judge_controls


def compare(reference: Drafts, other: Drafts, described: str) -> Comparison:
    """Compare drafts block by block, each block up to the first token at which they part.

    Args:
        reference: with logits.
        described: what the reference is.
    """
    parts = other.tokens != reference.tokens  # [blocks, gamma]
    gamma = parts.shape[1]
    first = np.where(parts.any(1), parts.argmax(1), gamma)  # position of the first difference, gamma if none
    parted = [(block, int(slot)) for block, slot in enumerate(first) if slot < gamma]
    ties = [at for at in parted if reference.lead(*at, int(other.tokens[at])) < TIE]
    differing = [at for at in parted if at not in ties]
    # The confidence at the parting position still rests on equal tokens before it.
    shared = np.arange(gamma) <= first[:, None]
    confidence = _confidence_difference(reference.confidence, other.confidence, shared)
    logits = None
    if other.logits:
        pairs = zip(reference.logits, _same_columns(reference, other), shared, strict=True)
        logits = max(_largest(np.abs(mine - theirs)[rows]) for mine, theirs, rows in pairs)
    equal = not differing and confidence <= CONFIDENCE_TOLERANCE and (logits is None or logits <= LOGIT_TOLERANCE)
    return Comparison(
        compared=(
            "draft_ids",
            *(("confidence_logits",) if reference.confidence is not None else ()),
            *(("draft_logits",) if other.logits else ()),
        ),
        reference=described,
        blocks=len(first),
        tokens=parts.size,
        differing_blocks=len(differing),
        near_ties=len(ties),
        max_confidence_difference=confidence,
        max_logit_difference=logits,
        logit_tolerance=None if logits is None else LOGIT_TOLERANCE,
        verdict="equal" if equal else "different",
        first_difference=_first_difference(reference, other, differing),
    )


def negative_controls(drafter: Drafter, blocks: ProbeBlocks, reference: Drafts) -> dict[str, Comparison]:
    """Drafters that are wrong in one way each, put through the comparison.

    Args:
        drafter: the reference, in float32.
    """
    config = drafter.config
    wrong_mask = (config.mask_token_id + 1) % config.vocab_size
    wrong_theta = {**config.rope, "rope_theta": float(config.rope["rope_theta"]) / 10}
    width = config.hidden_size
    # With one tap there is no neighbour to take for it; its channels are shifted instead.
    shift = width if len(config.taps) > 1 else 1
    faulty = {"taps shifted by one": draft(drafter, blocks, lambda features: features.roll(shift, dims=-1))}
    if config.kind == "eagle3":
        # What stands at a position is its features and the token after it; readers have taken the one at it.
        shifted = tuple(np.roll(row, 1) for row in blocks.tokens)
        faulty["tokens shifted by one"] = draft(drafter, replace(blocks, tokens=shifted))
    elif config.gamma > 1:  # a block of one is its anchor: there is no mask token in it
        faulty[f"mask token {wrong_mask}"] = draft(_variant(drafter, mask_token_id=wrong_mask), blocks)
    faulty["RoPE theta / 10"] = draft(_variant(drafter, rope=wrong_theta), blocks)
    if "partial_rotary_factor" in config.rope:
        whole = {**config.rope, "partial_rotary_factor": 1.0}
        faulty["RoPE on whole heads"] = draft(_variant(drafter, rope=whole), blocks)
    return {name: compare(reference, drafts, "the drafter itself") for name, drafts in faulty.items()}


def judge(report: ParityReport) -> None:
    """Refuse an export that is not the drafter, or a comparison that could not tell.

    Raises:
        GateError: a dialect differs, or a faulty drafter passes.
    """
    for name, result in report.dialects.items():
        if result.verdict != "equal":
            where = result.first_difference or "tokens are equal"
            raise GateError(
                f"export {name}: {result.differing_blocks} of {result.blocks} blocks differ from torch ({where}), "
                f"confidences by up to {result.max_confidence_difference:.2g}",
                "this is a fault of the exporter; report it with parity.json",
            )
    judge_controls(report.negative_controls, "export")


def _variant(drafter: Drafter, **changes: Any) -> Drafter:
    variant = copy.deepcopy(drafter)
    variant.config = drafter.config.model_copy(update=changes)
    variant.rotary = Rotary(variant.config)
    return variant


def rounded(
    drafter: Drafter,
    dtype: torch.dtype,
    *,
    keep: Callable[[str], bool] = lambda name: False,
    head: bool = False,
) -> Drafter:
    """A float32 copy whose trained weights have passed through `dtype`, as those of a stored checkpoint have.

    Args:
        keep: names of the weights that have not.
        head: whether the rows of the target's head have: they lie in some files of reduced vocabularies.
    """
    copied = copy.deepcopy(drafter).float().eval()
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            if not keep(name):
                parameter.copy_(parameter.to(dtype))
        if head:
            copied.head = copied.head.to(dtype).float()
    return copied


def _largest(values: Floats) -> float:
    largest = float(values.max(initial=0.0))
    return largest if np.isfinite(largest) else float(np.finfo(np.float32).max)


def _confidence_difference(reference: Floats | None, other: Floats | None, shared: NDArray[np.bool_]) -> float:
    """The largest difference of a logit; without a head on either side there is none, on one side it is infinite."""
    if reference is None and other is None:
        return 0.0
    if reference is None or other is None:
        return _largest(np.array([np.inf]))
    return _largest(np.abs(other - reference)[shared])


def _same_columns(reference: Drafts, other: Drafts) -> tuple[Floats, ...]:
    """Logits of `other` for the tokens that the reference has columns for; the union has one for every token."""
    if reference.token_ids is None or other.token_ids is not None:
        return other.logits
    return tuple(rows[:, reference.token_ids] for rows in other.logits)


def _first_difference(reference: Drafts, other: Drafts, differing: list[tuple[int, int]]) -> str | None:
    if not differing:
        return None
    block, slot = differing[0]
    return (
        f"block {block}, position {slot + 1}: token {other.tokens[block, slot]} "
        f"instead of {reference.tokens[block, slot]}"
    )
