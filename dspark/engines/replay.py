"""The sequential loop replayed in torch on an engine's reply: what the engine should have drafted and counted.

The engine decided what is said, so that nothing hangs on how near-ties fall. Engines differ at a reply's end: llama.cpp
cuts the last block to what may still be said, SGLang and vLLM verify and count it to its end and throw away what is
behind the limit. Behind a token that ends the reply all three count on, to the end of its block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dspark.drafters.base import Drafter
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.kinds import require_dspark
from dspark.engines.counters import Counters, without_zeros_at_the_end
from dspark.targets.loading import Target

ANCHORS_AT_ONCE = 32  # their draft logits are held together


@dataclass(frozen=True)
class ExpectedRequest:
    """What an engine should do with one prompt.

    Attributes:
        token_ids: the reply up to its limit, whatever ends it.
        blocks: drafted tokens, [gamma], by the position of their anchor.
        offered: how many of them are verified, by the same position.
        accepted: how many of these are accepted, by the same position.
        confidences: raw confidence logits, [gamma], by the same position; empty where nobody asked for them or none are
            stated.
    """

    token_ids: tuple[int, ...]
    blocks: dict[int, tuple[int, ...]]
    offered: dict[int, int]
    accepted: dict[int, int]
    confidences: dict[int, tuple[float, ...]] = field(default_factory=dict, compare=False)

    def until(self, end: int) -> ExpectedRequest:
        """The same for a reply that ended before position `end`: blocks with anchors before it."""
        kept = [position for position in self.blocks if position < end]
        return ExpectedRequest(
            self.token_ids,
            {position: self.blocks[position] for position in kept},
            {position: self.offered[position] for position in kept},
            {position: self.accepted[position] for position in kept},
            {position: self.confidences[position] for position in kept if position in self.confidences},
        )

    @property
    def counters(self) -> Counters:
        """What it should count."""
        accepted = list(self.accepted.values())
        places = range(max(accepted, default=0))
        counts = tuple(sum(count > place for count in accepted) for place in places)
        return Counters(len(self.blocks), sum(self.offered.values()), sum(accepted), without_zeros_at_the_end(counts))


@torch.inference_mode()
def replay(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    reply: Sequence[int],
    max_new_tokens: int,
    *,
    ended: bool,
    n_max: int | None = None,
    cut: bool = True,
) -> ExpectedRequest:
    """What the loop does where the target's reply is known.

    Args:
        reply: the engine's, without the token that ended it.
        max_new_tokens: its limit.
        ended: whether an end-of-sequence token ended it; else it must be as long as the limit.
        n_max: drafts of a block that are verified at most; None: all.
        cut: whether the last block is cut to what the reply may still hold, less the target's own token.
    """
    gamma = drafter.config.gamma
    known = [*prompt, *reply]
    drafted, stated = _drafts(target, require_dspark(drafter, "replaying replies"), known, len(prompt))
    # The block that goes beyond the reply is counted to its end, against what the target would go on to say.
    spoken = [*reply, *_continuation(target, known, gamma + 1 if ended or not cut else 0)]
    last = len(reply) if ended else max_new_tokens - 1  # a step begins while the reply may go on
    blocks, offered, accepted, confidences = {}, {}, {}, {}
    said = 1  # by the prefill
    while said <= last:
        count = min(n_max or gamma, gamma)
        if cut:
            count = min(count, max_new_tokens - said - 1)
        if count <= 0:
            break
        block = drafted[said - 1]
        right = 0
        while right < count and said + right < len(spoken) and block[right] == spoken[said + right]:
            right += 1
        position = len(prompt) + said - 1
        blocks[position], offered[position], accepted[position] = tuple(block), count, right
        if stated:
            confidences[position] = tuple(stated[said - 1])
        said += right + 1
    return ExpectedRequest(tuple(reply), blocks, offered, accepted, confidences)


def _drafts(
    target: Target, drafter: DSparkDrafter, tokens: Sequence[int], start: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy drafts of a block at every position from `start` on, and their confidence logits, from one pass.

    Without a confidence head there are no logits at all.
    """
    ids = torch.tensor([tokens], device=target.device)
    context = drafter.project(target.hidden(ids).taps.to(drafter.dtype))
    length = ids.shape[1]
    positions = torch.arange(length, device=target.device)
    slots = torch.arange(drafter.config.gamma, device=target.device)
    found: list[list[int]] = []
    stated: list[list[float]] = []
    for anchors in torch.split(positions[start:], ANCHORS_AT_ONCE):
        previous = ids[0, anchors]
        hidden = drafter.block_hidden(
            drafter.block_inputs(previous.unsqueeze(0)),
            context,
            positions.unsqueeze(0),
            (anchors.unsqueeze(-1) + slots).unsqueeze(0),
            (positions < anchors.unsqueeze(-1)).unsqueeze(0),
        )[0]
        base, chain = drafter.base_logits(hidden), drafter.chain()
        chosen, before = [], []
        for slot in range(drafter.config.gamma):
            before.append(previous)
            logits = base[:, slot] + chain.bias(previous, hidden[:, slot])
            previous = drafter.to_target_ids(logits.argmax(-1))
            chosen.append(previous)
        found += torch.stack(chosen, dim=1).tolist()
        confidence = drafter.confidence_logits(hidden, torch.stack(before, dim=1))
        if confidence is not None:
            stated += confidence.float().tolist()
    return found, stated


def _continuation(target: Target, tokens: Sequence[int], count: int) -> list[int]:
    """The next `count` greedy tokens, one pass each: they are few."""
    ids = torch.tensor([tokens], device=target.device)
    for _ in range(count):
        following = target.logits(target.last_hidden(ids)[:, -1]).float().argmax(-1)
        ids = torch.cat([ids, following.unsqueeze(1)], dim=1)
    return [int(token) for token in ids[0, len(tokens) :]]
