"""Certify llama.cpp on one serving profile: the exported file in the engine's own server, with its own counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark.config.models import EvaluationSettings, ServingProfile
from dspark.corpus.prompts import PreparedPrompt
from dspark.drafters.base import Drafter
from dspark.engines.agreement import AgreementReport
from dspark.engines.llamacpp import TIMES_SHOWN, LlamaCppSettings
from dspark.engines.llamacpp_load import Servers
from dspark.evaluation.entry import CertificateEntry
from dspark.evaluation.served import Questions, certify_servers, served_arms
from dspark.io.progress import Progress
from dspark.targets.loading import Target


def certify_llamacpp(
    profile: ServingProfile,
    fingerprint: Mapping[str, Any],
    target: Target,
    drafter: Drafter,
    prompts: Sequence[PreparedPrompt],
    settings: EvaluationSettings,
    *,
    prompts_per_domain: int,
    target_file: Path,
    drafter_file: Path,
    export: AgreementReport,
    work: Path,
    progress: Progress | None = None,
) -> CertificateEntry:
    """Measure acceptance, agreement with the loop, equality of texts and load points in the engine itself.

    Args:
        profile: its threads, memory dtype, policies and concurrencies.
        fingerprint: of the machine and engine (`profiling.fingerprint`).
        target: in float32, for the replay.
        drafter: as the file holds it, in float32.
        prompts: of the eval split.
        settings: lengths and rounds.
        prompts_per_domain: to decode, at most.
        target_file, drafter_file: what the engine serves.
        export: what the export gate found.
        work: folder for the engine's logs.
        progress: shows the decoding and the rounds.
    Raises:
        DataError: too few prompts for a concurrency.
        ServiceError: the engine does not run, or dies.
    """
    gamma = drafter.config.gamma
    arms = served_arms(profile, gamma, confidence=drafter.config.confidence)
    questions = Questions.of(profile, prompts, settings, prompts_per_domain, [target.record.max_position])
    slots = max(profile.certify_concurrency)
    served = LlamaCppSettings(
        target_file,
        drafter_file,
        context=slots * questions.longest,
        slots=slots,
        threads=int(fingerprint["threads"]),
        memory="F32" if profile.dtype == "float32" else "F16",
        log_level=TIMES_SHOWN,
    )
    known = {**fingerprint, "quantisation": target.record.quantisation or served.memory}
    with Servers(served, {arm.name: arm.policy for arm in arms}, gamma, work) as servers:
        return certify_servers(
            servers,
            arms,
            questions,
            profile,
            known,
            target,
            drafter,
            settings,
            cut=True,
            export=export,
            progress=progress,
        )
