"""The sequential loop as llama.cpp runs it, in torch: what it should draft, verify and count for a prompt.

With R tokens still to say llama.cpp verifies at most R - 1 drafts, since the target adds one of its own; the last token
is not drafted for, and that is no step. An end-of-sequence token ends a reply but not its block: the drafts behind it
are counted to the block's end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dspark.decoding.draws import CounterDraws
from dspark.decoding.loop import Batch
from dspark.decoding.policies import Fixed
from dspark.decoding.proposers import torch_proposer
from dspark.drafters.base import Drafter
from dspark.engines.replay import ExpectedRequest
from dspark.targets.loading import Target


@torch.inference_mode()
def expected_request(target: Target, drafter: Drafter, prompt: Sequence[int], max_new_tokens: int) -> ExpectedRequest:
    """Decode a prompt greedily with whole blocks, and cut them at the limit as llama.cpp does.

    An end-of-sequence token ends nothing here, so that the caller cuts between blocks (`until`).
    """
    batch = Batch(
        target,
        torch_proposer(drafter),
        [prompt],
        [0],
        max_new_tokens=max_new_tokens,
        policy=Fixed(),
        temperature=0.0,
        draws=CounterDraws([0]),
        eos_token_ids=frozenset(),
    )
    batch.prefill()
    while batch.active:
        batch.cycle()
    decoded = batch.finished()[0]
    blocks, offered, accepted = {}, {}, {}
    said = 1  # by the prefill
    cycles = decoded.cycles
    for drafted, right, committed in zip(cycles.drafted, cycles.accepted, cycles.committed, strict=True):
        count = min(cycles.gamma, max_new_tokens - said - 1)
        if count > 0:
            position = len(prompt) + said - 1
            blocks[position] = tuple(int(token) for token in drafted)
            offered[position] = count
            accepted[position] = min(int(right), count)
        said += int(committed)
    return ExpectedRequest(tuple(decoded.token_ids), blocks, offered, accepted)
