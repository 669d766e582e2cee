"""An engine's texts with drafts against its texts without: equal, but for near-ties that fall either way."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dspark.corpus.prompts import PreparedPrompt
from dspark.engines.client import Completion
from dspark.errors import DataError
from dspark.evaluation.entry import ENGINE_TEXTS, LosslessSummary
from dspark.evaluation.results import Difference, Result
from dspark.targets.loading import Target

# Steps of a drafted block and of a single token run other kernels on quantised weights, so that near-ties may fall
# either way: a difference of logits, in float32, up to which a text may part from plain decoding's.
NEAR_TIE = 0.25
FEWEST_EQUAL = 0.95  # share of texts


def compare_texts(
    target: Target, prompts: Sequence[PreparedPrompt], drafted: Sequence[Completion], plain: Sequence[Completion]
) -> LosslessSummary:
    """Texts with drafts against texts without: all but a few equal, and no difference beyond a near-tie."""
    differences = tuple(
        found
        for prompt, one, other in zip(prompts, drafted, plain, strict=True)
        if (found := text_difference(target, prompt, one, other)) is not None
    )
    drafts = sum(one.counters.drafted for one in drafted)
    good = len(differences) <= (1 - FEWEST_EQUAL) * len(prompts) and all(one.gap <= NEAR_TIE for one in differences)
    result: Result = "inconclusive" if not drafts else "pass" if good else "fail"
    return LosslessSummary(
        method=ENGINE_TEXTS,
        result=result,
        n=len(prompts),
        drafts=drafts,
        differences=differences,
    )


@torch.inference_mode()
def text_difference(
    target: Target, prompt: PreparedPrompt, drafted: Completion, plain: Completion
) -> Difference | None:
    """Where a text first parts from plain decoding's, with the target's own difference of logits there; None if never.

    Raises:
        DataError: a reply is longer than the other one and neither was ended by a token.
    """
    ended = sorted(target.eos_token_ids)
    one, other = ([*reply.token_ids, *(ended[:1] if reply.ended else [])] for reply in (drafted, plain))
    shared = next((place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    if shared is None:
        if len(one) != len(other):
            raise DataError(f"prompt {prompt.id}: one reply goes on where the other was cut off", "this is a fault")
        return None
    ids = torch.tensor([[*prompt.token_ids, *one[:shared]]], device=target.device)
    logits = target.logits(target.last_hidden(ids)[:, -1]).float()[0]
    token, best = one[shared], other[shared]
    # Any token that ends a reply may be the one that did.
    alike = [ended if either in target.eos_token_ids else [either] for either in (best, token)]
    gap = abs(float(logits[alike[0]].max() - logits[alike[1]].max()))
    return Difference(prompt=prompt.id, position=shared, token=token, best=best, gap=gap)
