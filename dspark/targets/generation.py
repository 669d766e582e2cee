"""Plain generation: a batch of prompts in, the target's own continuations out.

What a row says depends on the prompts of its batch, the sampling and the seed, not on when other rows finish: each
row keeps its own column of the random numbers when finished rows are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from dspark.config.models import Sampling
from dspark.errors import DataError
from dspark.targets.cache import ColumnCache
from dspark.targets.loading import Target
from dspark.targets.sampling import draw

PREFILL_TOKENS = 8192  # padded prompt tokens per forward pass, which bounds the memory of long prompts
_DROP_SHARE = 1 / 8  # finished rows are dropped once they are this share of the batch: they cost like the others


@dataclass
class Continuation:
    """What the target said after one prompt."""

    token_ids: list[int] = field(default_factory=list)  # the end-of-sequence token included
    finish_reason: Literal["stop", "length"] | None = None  # None only while it is being made


@dataclass
class _Row:
    number: int  # of its prompt in the batch
    budget: int  # tokens asked for
    limit: int  # tokens there is room for
    said: Continuation = field(default_factory=Continuation)

    def say(self, token: int, eos_token_ids: frozenset[int]) -> int:
        """Append a token; returns how much of the budget that settles: one, or after the last all that is left."""
        self.said.token_ids.append(token)
        if token in eos_token_ids:
            self.said.finish_reason = "stop"
        elif len(self.said.token_ids) == self.limit:
            self.said.finish_reason = "length"
        return 1 if self.said.finish_reason is None else 1 + self.budget - len(self.said.token_ids)


@torch.no_grad()
def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    on_step: Callable[[int], None] = lambda settled: None,
    names: Sequence[str] | None = None,
) -> list[Continuation]:
    """Continue a batch of prompts until each reaches an end-of-sequence token or its limit.

    Args:
        prompts: token ids; all of them make one batch.
        max_new_tokens: limit per prompt; a prompt near the target's `max_position` gets fewer.
        seed: of all draws of this batch.
        on_step: called after every step with the number of tokens it settled, drawn or no longer to come, of
            `max_new_tokens` per prompt; may raise to stop.
        names: of the prompts, for messages; None: their places in the batch.
    Raises:
        DataError: a prompt that is empty or leaves no room for a token, or logits that are NaN or infinite.
    """
    room = target.record.max_position
    for number, prompt in enumerate(prompts):
        if not 0 < len(prompt) < room:
            raise DataError(f"prompt {number} of the batch has {len(prompt)} tokens; the target takes 1 to {room - 1}")
    limits = [min(max_new_tokens, room - len(prompt)) for prompt in prompts]
    everyone = [_Row(number, max_new_tokens, limit) for number, limit in enumerate(limits)]
    rows = everyone
    generator = torch.Generator().manual_seed(seed)
    cache, visible, last_hidden = _prefill(target, prompts, max(row.limit for row in rows))
    positions = torch.tensor([len(prompt) for prompt in prompts], device=target.device)
    while True:
        uniforms = torch.rand(len(prompts), generator=generator, dtype=torch.float64)
        uniforms = uniforms[[row.number for row in rows]].to(target.device)
        logits = target.logits(last_hidden)
        _refuse_non_finite(logits, target, rows, names)
        tokens = draw(logits, sampling, uniforms)
        settled = 0
        for row, token in zip(rows, tokens.tolist(), strict=True):
            if row.said.finish_reason is None:
                settled += row.say(token, target.eos_token_ids)
        on_step(settled)
        kept = [index for index, row in enumerate(rows) if row.said.finish_reason is None]
        if not kept:
            return [row.said for row in everyone]
        if len(rows) - len(kept) >= _DROP_SHARE * len(rows):
            rows = [rows[index] for index in kept]
            chosen = torch.tensor(kept, device=target.device)
            cache.keep(chosen)
            visible, positions, tokens = visible[chosen], positions[chosen], tokens[chosen]
        hidden = target.last_hidden(
            tokens[:, None],
            attention_mask=visible[:, None, None, : cache.get_seq_length() + 1],
            position_ids=positions[:, None],
            cache=cache,
        )
        cache.advance(1)
        positions = positions + 1
        last_hidden = hidden[:, 0]


def _refuse_non_finite(logits: Tensor, target: Target, rows: Sequence[_Row], names: Sequence[str] | None) -> None:
    """Refuse logits that no token can be drawn from: NaN anywhere in a row, or its largest infinite."""
    # A masked token's -inf draws nothing and is fine; NaN is handed on by the maximum.
    broken = (~logits.amax(dim=-1).isfinite()).nonzero()[:, 0].tolist()
    row = next((rows[index] for index in broken if rows[index].said.finish_reason is None), None)
    if row is None:
        return
    prompt = f"prompt {names[row.number]!r}" if names is not None else f"prompt {row.number} of the batch"
    raise DataError(
        f"NaN or infinity in the logits of target {target.record.name!r} after {prompt} and "
        f"{len(row.said.token_ids)} tokens of its answer (computed in {target.dtype_name})",
        "set the target's dtype to bfloat16 or float32; if it is, the model's weights do not work",
    )


def _prefill(target: Target, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[ColumnCache, Tensor, Tensor]:
    """Run the prompts; what all of them begin with (a system prompt) is run once.

    Returns:
        the cache; which of its columns each row may see, bool [B, capacity]; the last hidden states, [B, d].
    """
    device, layers, count = target.device, target.record.num_layers, len(prompts)
    shared = _common_prefix(prompts)
    width = max(len(prompt) for prompt in prompts) - shared
    cache = ColumnCache(layers, count, shared + width + new_tokens)
    if shared:
        single = ColumnCache(layers, 1, shared)
        prefix = torch.tensor([list(prompts[0][:shared])], device=device)
        target.last_hidden(
            prefix, attention_mask=_causal(shared, 0, device), position_ids=_range(shared, device), cache=single
        )
        single.advance(shared)
        cache.copy_prefix(single)
    # The rest of the prompts, padded on the left: all of them end in the same column.
    ids = torch.zeros(count, width, dtype=torch.int64)
    visible = torch.ones(count, shared + width + new_tokens, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        own = prompt[shared:]
        ids[row, width - len(own) :] = torch.tensor(own)
        visible[row, shared : shared + width - len(own)] = False
    ids, visible = ids.to(device), visible.to(device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    positions = (torch.arange(width, device=device) + lengths[:, None] - width).clamp(min=0)
    # A padding token sees itself, lest its softmax be over nothing.
    causal = _causal(width, shared, device)
    itself = torch.zeros_like(causal)
    itself[..., shared:] = torch.eye(width, dtype=torch.bool, device=device)
    last = []
    step = max(1, PREFILL_TOKENS // width)
    for start in range(0, count, step):
        chosen = slice(start, min(start + step, count))
        cache.look_at(chosen)
        mask = (causal & visible[chosen, None, None, : shared + width]) | itself
        hidden = target.last_hidden(ids[chosen], attention_mask=mask, position_ids=positions[chosen], cache=cache)
        last.append(hidden[:, -1])
    cache.look_at(slice(0, count))
    cache.advance(width)
    return cache, visible, torch.cat(last)


def _common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Length of what all prompts begin with, leaving each at least one token of its own."""
    first, most = min(map(list, prompts)), max(map(list, prompts))
    limit = min(len(prompt) for prompt in prompts) - 1
    length = 0
    while length < limit and first[length] == most[length]:
        length += 1
    return length


def _causal(queries: int, past: int, device: torch.device) -> Tensor:
    """[1, 1, queries, past + queries], True where visible."""
    mask = torch.ones(queries, past + queries, dtype=torch.bool, device=device).tril(diagonal=past)
    return mask[None, None]


def _range(length: int, device: torch.device) -> Tensor:
    return torch.arange(length, device=device)[None]
