"""Certify a server that runs elsewhere on one serving profile: SGLang or vLLM, beside the same without a drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dspark.config.models import EvaluationSettings, ServingProfile
from dspark.corpus.prompts import PreparedPrompt
from dspark.decoding.policies import Fixed, NoDrafts
from dspark.drafters.base import Drafter
from dspark.engines.client import AttachedServers, Client
from dspark.errors import DataError
from dspark.evaluation.entry import CertificateEntry
from dspark.evaluation.rounds import NONE, Arm
from dspark.evaluation.served import Questions, certify_servers
from dspark.io.progress import Progress
from dspark.targets.loading import Target


def certify_attached(
    profile: ServingProfile,
    fingerprint: Mapping[str, Any],
    client: Client,
    plain: Client,
    target: Target,
    drafter: Drafter,
    prompts: Sequence[PreparedPrompt],
    settings: EvaluationSettings,
    *,
    prompts_per_domain: int,
    progress: Progress | None = None,
) -> CertificateEntry:
    """Measure acceptance, agreement with the loop, equality of texts and load points by the servers' own protocol.

    Args:
        profile: its concurrencies.
        fingerprint: of the server with the drafter (`profiling.fingerprint`).
        client: the server that drafts; no one else may use it meanwhile.
        plain: the same target without a drafter, on the same kind of machine.
        target: in float32, for the replay.
        drafter: as the package holds it, in float32.
        prompts: of the eval split.
        settings: lengths and rounds.
        prompts_per_domain: to decode, at most.
        progress: shows the decoding and the rounds.
    Raises:
        DataError: the server drafts blocks of another size, verified none, or the plain one drafts as well; too few
            prompts for a concurrency.
        ServiceError: a server does not answer.
    """
    gamma, found = drafter.config.gamma, client.served().gamma
    if found is not None and found != gamma:
        raise DataError(
            f"{client.name} at {client.address} drafts blocks of {found}, the drafter has gamma {gamma}",
            f"start it with the package's own files: bash engines/{client.name}/launch.sh",
        )
    arms = [Arm(NONE, None, NoDrafts()), Arm(Fixed().name, None, Fixed())]
    rooms = (client.room, plain.room, target.record.max_position)
    questions = Questions.of(profile, prompts, settings, prompts_per_domain, rooms)
    if plain.complete(questions.alone[0].token_ids, settings.max_new_tokens).counters.steps:
        raise DataError(
            f"{plain.name} at {plain.address} drafts: plain_url of serving profile {profile.name} is to be the same "
            "target without a drafter",
            "start a second server without the speculative arguments",
        )
    return certify_servers(
        AttachedServers({NONE: plain, Fixed().name: client}),
        arms,
        questions,
        profile,
        fingerprint,
        target,
        drafter,
        settings,
        cut=client.cuts_last_block,
        progress=progress,
    )
