"""Certify the drafter that a running server speculates with: its own counters against the loop in torch."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from dspark.drafters.base import Drafter
from dspark.engines.client import Client, Completion
from dspark.engines.replay import replay
from dspark.errors import DataError, ServiceError
from dspark.evaluation.counters import (
    SHORTENED,
    TOLERANCE,
    Asked,
    Verdict,
    compare_counters,
    judge_counters,
    replay_all,
)
from dspark.evaluation.decoding import that_fit
from dspark.evaluation.entry import Agreement
from dspark.evaluation.results import Model
from dspark.io.progress import Progress
from dspark.measured import Measured, ratio_of_sums
from dspark.targets.loading import Target

_REPLIES_TO_TELL = 3  # how many drafts of a block the server verifies


class Position(Model):
    """Tokens accepted at one place of the blocks."""

    engine: int
    offline: int


class ServerCertificate(Model):
    """What `dspark certify` writes."""

    schema_: Literal["dspark/server-certificate/1"] = Field(default="dspark/server-certificate/1", alias="schema")
    engine: str
    target: str
    target_digest: str
    served_target: str  # the file that the server says it serves
    drafter: str
    drafter_sha256: str
    measured_at: str  # ISO 8601, UTC
    prompts: int
    left_out: int = 0  # of those that were chosen: too long for the server with their reply
    max_new_tokens: int
    n_max: int  # drafts of a block that the server verifies at most, from its counters
    gamma: int
    shortened: int = 0  # prompts of which the server chose to verify less than whole blocks
    verdict: Verdict
    reason: str | None = None  # why it does not agree
    tau: Agreement
    accepted_by_position: tuple[Position, ...]
    tokens_per_second: Measured  # of one request after the other, prefill and transport included


def certify_server(
    client: Client,
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    drafter_file: Path,
    drafter_sha256: str,
    max_new_tokens: int = 96,
    tolerance: float = TOLERANCE,
    seed: int = 0,
    progress: Progress | None = None,
) -> ServerCertificate:
    """Ask every prompt once, greedily, and compare the counters with a replay.

    Args:
        client: the server; no one else may use it meanwhile, as most count for everybody together.
        target: the weights that the server has, as near as they can be had here.
        drafter: the one that the server has.
        prompts: token ids; those that do not fit with their reply are left out, and counted.
        drafter_file, drafter_sha256: named in the certificate.
        max_new_tokens: of each reply.
        tolerance: of the relative difference of tau.
    Raises:
        DataError: no prompts, or too few that fit.
        ServiceError: the server does not answer, does not speculate, or serves others at the same time.
    """
    if not prompts:
        raise DataError("there are no prompts to certify on")
    progress = progress or Progress()
    served = client.served()
    if served.gamma is not None and served.gamma != drafter.config.gamma:
        raise DataError(
            f"{served.engine} at {client.address} drafts blocks of {served.gamma}, {drafter_file.name} has gamma "
            f"{drafter.config.gamma}",
            "name the drafter that the server runs with, or start it with the drafter's own block size",
        )
    rooms = (client.room, target.record.max_position)
    prompts, left_out = that_fit(prompts, len, max_new_tokens, rooms)
    if left_out:
        progress.note(f"{left_out} prompts are too long for {min(room for room in rooms if room)} positions: left out")
    progress.start("ask the server", len(prompts), unit="prompts")
    replies = []
    for prompt in prompts:
        reply = client.complete(prompt, max_new_tokens)
        _refuse_other_traffic(client, drafter, reply)
        replies.append(reply)
        progress.advance()
    if not any(one.counters.steps for one in replies):
        raise ServiceError(
            f"{served.engine} at {client.address} drafted nothing for {len(prompts)} prompts", client.how_to_draft
        )
    cut = client.cuts_last_block
    n_max = _served_n_max(target, drafter, prompts, replies, max_new_tokens, cut=cut)
    asked = replay_all(
        target, drafter, prompts, replies, max_new_tokens=max_new_tokens, n_max=n_max, cut=cut, progress=progress
    )
    tau = compare_counters(asked, tolerance=tolerance, seed=seed)
    shortened = sum(reply.shortened for reply in replies)
    verdict, reason = judge_counters(tau) if not shortened else ("inconclusive", SHORTENED)
    return ServerCertificate(
        engine=served.engine,
        target=target.record.name,
        target_digest=target.record.digest,
        served_target=served.target,
        drafter=drafter_file.name,
        drafter_sha256=drafter_sha256,
        measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        prompts=len(prompts),
        left_out=left_out,
        max_new_tokens=max_new_tokens,
        n_max=n_max,
        gamma=drafter.config.gamma,
        shortened=shortened,
        verdict=verdict,
        reason=reason,
        tau=tau,
        accepted_by_position=_by_position(asked),
        tokens_per_second=_speed(replies, seed),
    )


def _refuse_other_traffic(client: Client, drafter: Drafter, reply: Completion) -> None:
    """A reply's steps and accepted tokens are its tokens, but for those behind an ending one."""
    counted = reply.counters.steps + reply.counters.accepted
    if counted > reply.predicted + drafter.config.gamma:
        raise ServiceError(
            f"{client.name} at {client.address} counted {counted} tokens for a reply of {reply.predicted}: "
            "others use it at the same time",
            "certify on a server without other traffic",
        )


def _served_n_max(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    replies: Sequence[Completion],
    max_new_tokens: int,
    *,
    cut: bool,
) -> int:
    """The number of drafts per block that explains what was verified for the longest replies.

    Never fewer than the last place at which a draft was accepted.
    """
    longest = sorted(range(len(replies)), key=lambda number: -len(replies[number].token_ids))[:_REPLIES_TO_TELL]
    least = max((len(one.counters.per_position) for one in replies), default=0)

    def gap(n_max: int) -> int:
        total = 0
        for number in longest:
            ids, ended = replies[number].token_ids, replies[number].ended
            found = replay(target, drafter, prompts[number], ids, max_new_tokens, ended=ended, n_max=n_max, cut=cut)
            total += abs(found.counters.drafted - replies[number].counters.drafted)
        return total

    return min(range(min(max(least, 1), drafter.config.gamma), drafter.config.gamma + 1), key=gap)


def _by_position(asked: Sequence[Asked]) -> tuple[Position, ...]:
    sides = [[one.reply.counters for one in asked], [one.expected.counters for one in asked]]
    length = max((len(one.per_position) for side in sides for one in side), default=0)
    engine, offline = (
        [sum(sum(one.per_position[place : place + 1]) for one in side) for place in range(length)] for side in sides
    )
    return tuple(Position(engine=one, offline=other) for one, other in zip(engine, offline, strict=True))


def _speed(replies: Sequence[Completion], seed: int) -> Measured:
    tokens = np.array([one.predicted for one in replies], float)
    found = ratio_of_sums(tokens, np.array([one.seconds for one in replies], float), seed=seed)
    if found is None:
        raise ServiceError("the server answered in no time at all", "this is a fault of dspark: please report it")
    return found
