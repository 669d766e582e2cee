"""Confidences and outcomes of a running SGLang server, as records that calibration fits temperatures to.

The server must run in mode `cap-accept`, which verifies whole blocks and only then cuts what it accepts, with its
requests dumped and no temperatures of its own (engine-formats.md, 1.2 and 1.8). So the outcome of every draft is known,
whatever the scheduler would verify. `static` has no confidence head; `compact` does not verify what it leaves out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark.calibration.records import Records
from dspark.engines.client import Completion
from dspark.engines.sglang_client import SGLangClient
from dspark.errors import DataError, PreflightError
from dspark.io.progress import Progress

MODE = "cap-accept"
HOW = (
    "start it with SGLANG_RAGGED_VERIFY_MODE=cap-accept SGLANG_DSPARK_DEBUG_DUMP=core,reqs and without "
    "--speculative-dspark-confidence-sts-path"
)
# Confidences come rounded to four digits, so that what is shown as 0 or 1 is taken for half of the last one.
_LEAST = 0.5e-4


@dataclass(frozen=True)
class RecordedBlock:
    """A block that the server drafted and verified to its end.

    Attributes:
        position: of the anchor in the sequence, 0-based.
        drafted: token ids, [gamma].
        confidences: probabilities, as they are shown, [gamma].
        accepted: leading drafts that are the target's own choice, those that the cut took away among them.
    """

    position: int
    drafted: tuple[int, ...]
    confidences: tuple[float, ...]
    accepted: int


@dataclass(frozen=True)
class RecordedRequest:
    """A request with the blocks that the server recorded for it.

    Attributes:
        prompt: token ids.
        reply: what it said.
        blocks: in order; the server may have lost some.
        max_new_tokens: limit of the reply.
    """

    prompt: tuple[int, ...]
    reply: Completion
    blocks: tuple[RecordedBlock, ...]
    max_new_tokens: int


def record_requests(
    client: SGLangClient, prompts: Sequence[Sequence[int]], max_new_tokens: int, progress: Progress | None = None
) -> list[RecordedRequest]:
    """Let the server continue prompts greedily, one after the other, and read what it drafted with which confidence.

    Args:
        client: a server in `cap-accept`; others may use it, their blocks are left out.
        prompts: token ids.
        max_new_tokens: of each reply.
        progress: advanced by one per prompt; the caller starts the task.
    Raises:
        PreflightError: the server does not record what is needed.
        ServiceError: it does not answer.
    """
    require_collecting(client)
    marks = client.marks()
    replies = []
    for prompt in prompts:
        replies.append(client.complete(prompt, max_new_tokens))
        if progress is not None:
            progress.advance()
    blocks = parse_blocks([step for rank in client.steps_since(marks) for step in rank])
    return [
        RecordedRequest(tuple(prompt), reply, tuple(blocks.get(str(reply.request), ())), max_new_tokens)
        for prompt, reply in zip(prompts, replies, strict=True)
    ]


def parse_blocks(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[RecordedBlock]]:
    """The blocks with confidences in dumped steps, by the name of their request, in order."""
    blocks: dict[str, list[RecordedBlock]] = {}
    for step in steps:
        for one in step.get("reqs") or ():
            if one.get("confidence") is None:
                continue
            block = RecordedBlock(
                position=int(one["prefix_len"]),
                drafted=tuple(int(token) for token in one["draft_tokens"]),
                confidences=tuple(float(value) for value in one["confidence"]),
                # The cut takes accepted drafts away again: without it they would have been accepted.
                accepted=int(one["correct_drafts"]) + int(one["cap_trim"]),
            )
            blocks.setdefault(str(one.get("rid")), []).append(block)
    return blocks


def records_of(requests: Sequence[RecordedRequest], source: str, eos_token_ids: Collection[int]) -> Records:
    """What calibration takes: one row per block, positions past a drafted end of sequence or the limit unknown.

    The server verifies a block to its end, also what lies behind the token that ends the reply or behind its limit.

    Args:
        requests: greedy ones.
        source: who recorded them.
        eos_token_ids: tokens that end a reply. Where the server was told of further ones, positions behind them are
            left out only if the reply ended there, and what is known behind them are rejections alone.
    Raises:
        DataError: no block was recorded.
    """
    rows = [(number, one, block) for number, one in enumerate(requests) for block in one.blocks]
    if not rows:
        raise DataError(f"{source} recorded no block with confidences", HOW)
    shown = np.array([block.confidences for _, _, block in rows], float)
    stated = np.clip(shown, _LEAST, 1 - _LEAST)
    places = np.arange(stated.shape[1])
    known = [_known(one, block, eos_token_ids) for _, one, block in rows]
    return Records(
        logits=np.log(stated / (1 - stated)),
        accepted=places < np.array([block.accepted for _, _, block in rows])[:, None],
        valid=places < np.array(known)[:, None],
        conversation=[number for number, _, _ in rows],
        temperature=0.0,
        label="greedy_match",
        source=source,
    )


def _known(request: RecordedRequest, block: RecordedBlock, eos_token_ids: Collection[int]) -> int:
    """How many leading positions of a block have an outcome that counts, as in the loop (`decoding.history`)."""
    said = block.position - len(request.prompt) + 1
    within = request.reply.predicted - said
    # Neither the limit nor what was drafted depends on the outcome, so they hide it without a bias.
    ends = (place + 1 for place, token in enumerate(block.drafted) if token in eos_token_ids)
    known = min(next(ends, len(block.drafted)), request.max_new_tokens - said)
    # An accepted token ended the reply, one of ours or not: what was drafted behind it is neither right nor wrong.
    return min(known, within) if request.reply.ended and block.accepted >= within else known


def require_collecting(client: SGLangClient) -> None:
    """Refuse a server that does not record the outcome and the raw confidence of every draft.

    Raises:
        PreflightError: says what it does instead.
        ServiceError: it does not answer.
    """
    information = client.information()
    if information.get("speculative_dspark_confidence_sts_path"):
        raise PreflightError(f"SGLang at {client.address} scales its confidences already", HOW)
    dumps = [state.get("dspark_info_record") or {} for state in information["internal_states"]]
    for dump in dumps or [{}]:
        if dump.get("mode") != MODE or "reqs" not in dump.get("components", ()):
            raise PreflightError(
                f"SGLang at {client.address} runs in mode {dump.get('mode')!r} and records "
                f"{', '.join(dump.get('components', ())) or 'nothing'}",
                HOW,
            )
