"""Confidences and outcomes of a running SGLang server, as records that calibration fits temperatures to.

The server must run in mode `cap-accept`, which verifies whole blocks and only then cuts what it accepts, with its
requests dumped and no temperatures of its own (engine-formats.md, 1.2 and 1.8). So the outcome of every draft is known,
whatever the scheduler would verify. `static` has no confidence head; `compact` does not verify what it leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dspark.calibration.records import Records
from dspark.engines.sglang_client import SGLangClient
from dspark.errors import DataError, PreflightError

MODE = "cap-accept"
HOW = (
    "start it with SGLANG_RAGGED_VERIFY_MODE=cap-accept SGLANG_DSPARK_DEBUG_DUMP=core,reqs and without "
    "--speculative-dspark-confidence-sts-path"
)
# Confidences come rounded to four digits, so that what is shown as 0 or 1 is taken for half of the last one.
_LEAST = 0.5e-4


def confidence_records(client: SGLangClient, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Records:
    """Let the server continue prompts greedily, and read what it drafted with which confidence.

    Args:
        client: a server in `cap-accept`; others may use it, their blocks are recorded as well.
        prompts: token ids.
        max_new_tokens: of each reply.
    Returns:
        one block a step; the last block of each request, which may go beyond its end, is left out.
    Raises:
        PreflightError: the server does not record what is needed.
        DataError: no prompts, or no block was recorded.
        ServiceError: it does not answer.
    """
    _require_collecting(client)
    marks = client.marks()
    for prompt in prompts:
        client.complete(prompt, max_new_tokens)
    return parse_records([(number, step) for number, rank in enumerate(client.steps_since(marks)) for step in rank])


def parse_records(steps: Sequence[tuple[int, Mapping[str, Any]]]) -> Records:
    """The records in dumped steps.

    Args:
        steps: with the number of the rank that each is of, in order.
    Raises:
        DataError: there is no block with confidences in them.
    """
    blocks: dict[str, list[tuple[list[float], int]]] = {}
    for rank, step in steps:
        for request in step.get("reqs") or ():
            if request.get("confidence") is None:
                continue
            # The cut takes accepted drafts away again: without it they would have been accepted.
            accepted = int(request["correct_drafts"]) + int(request["cap_trim"])
            name = request.get("rid") or f"rank {rank}, slot {request['req_pool_index']}"
            blocks.setdefault(str(name), []).append((request["confidence"], accepted))
    whole = [(name, *block) for name, one in blocks.items() for block in one[:-1]]
    if not whole:
        raise DataError("SGLang recorded no block with confidences", HOW)
    confidences = np.clip(np.array([confidence for _, confidence, _ in whole], float), _LEAST, 1 - _LEAST)
    counts = np.array([count for _, _, count in whole])
    return Records(
        logits=np.log(confidences / (1 - confidences)),
        accepted=np.arange(confidences.shape[1]) < counts[:, None],
        conversation=[name for name, _, _ in whole],
        temperature=0.0,
        label="greedy_match",
    )


def _require_collecting(client: SGLangClient) -> None:
    information = client.information()
    if information.get("speculative_dspark_confidence_sts_path"):
        raise PreflightError(f"SGLang at {client.address} scales its confidences already", HOW)
    dumps = [state.get("dspark_info_record") or {} for state in information["internal_states"]]
    for dump in dumps:
        if dump.get("mode") != MODE or "reqs" not in dump.get("components", ()):
            raise PreflightError(
                f"SGLang at {client.address} runs in mode {dump.get('mode')!r} and records "
                f"{', '.join(dump.get('components', ())) or 'nothing'}",
                HOW,
            )
