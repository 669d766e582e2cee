"""Measure what steps of llama.cpp's server cost: a random drafter of the geometry, many shapes.

Nearly everything that a random drafter drafts is refused, so a reply's tokens come one by one, a step apart. At a
reply's end the engine cuts its blocks short, so each reply goes on for a block beyond the steps that are timed. Shapes
are measured forwards and backwards in turn, so that a machine that drifts slows all of them alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dspark.config.models import ServingProfile
from dspark.decoding.policies import Fixed, NoDrafts, Policy
from dspark.drafters.config import DrafterConfig
from dspark.engines.client import Drafting, Together
from dspark.engines.llamacpp import TIMES_SHOWN, LlamaCppSettings
from dspark.engines.llamacpp_load import Servers
from dspark.errors import SettingsError
from dspark.io.progress import Progress
from dspark.profiling.cost import CostReport, cost_row, curve_fields, draft_row
from dspark.targets.record import TargetRecord

BACKEND = "llamacpp"
_PASSES = 2
Shape = tuple[int, int, int]  # requests, context, verified drafts


def profile_llamacpp(
    record: TargetRecord,
    config: DrafterConfig,
    profile: ServingProfile,
    fingerprint: Mapping[str, Any],
    *,
    target_file: Path,
    drafter_file: Path,
    work: Path,
    seed: int = 0,
    progress: Progress | None = None,
) -> CostReport:
    """Step times over requests, verified tokens and contexts, as a client of the server sees them.

    Args:
        record: of the target.
        config: geometry of the drafter.
        profile: requests, contexts, warm-up and repeats (steps of each shape).
        fingerprint: of the machine and engine.
        target_file: the target as GGUF.
        drafter_file: a random drafter of the geometry as GGUF.
        work: folder for the engine's logs.
        seed: of the prompts.
        progress: advanced by one per shape and pass.
    Raises:
        SettingsError: fewer than two contexts, or one that does not fit into the target.
        ServiceError: the engine does not run, or dies.
    """
    if len(set(profile.contexts)) < 2:
        raise SettingsError(f"profile {profile.name}: contexts need two lengths or more, to tell their cost apart")
    steps = profile.warmup + -(-profile.repeats // _PASSES)
    room = max(profile.contexts) + steps + config.gamma + 3
    if room > record.max_position:
        raise SettingsError(
            f"profile {profile.name}: a context of {max(profile.contexts)} and {steps} steps need {room} positions, "
            f"the target has {record.max_position}",
            "lower contexts or repeats in the serving profile",
        )
    slots = max(profile.requests)
    settings = LlamaCppSettings(
        target_file,
        drafter_file,
        context=slots * room,
        slots=slots,
        threads=int(fingerprint["threads"]),
        memory="F32" if profile.dtype == "float32" else "F16",
        log_level=TIMES_SHOWN,
    )
    counts = sorted({0, 1, max(config.gamma // 2, 1), config.gamma})
    policies: dict[str, Policy] = {str(count): Fixed(count) if count else NoDrafts() for count in counts}
    shapes = [(requests, context, k) for requests in profile.requests for context in profile.contexts for k in counts]
    progress = progress or Progress()
    progress.start("profile steps", len(shapes) * _PASSES, unit="shapes")
    generator = np.random.default_rng(seed)
    gaps: dict[Shape, list[float]] = defaultdict(list)
    drafting: dict[Shape, list[float]] = defaultdict(list)
    with Servers(settings, policies, config.gamma, work) as servers:
        for number in range(_PASSES):
            for shape in shapes if number % 2 == 0 else reversed(shapes):
                requests, context, k = shape
                length = max(context - steps // 2, 1)
                prompts = generator.integers(0, record.vocab_logical, (requests, length)).tolist()
                done = servers.together(str(k), prompts, 1 + steps + k + 1, endless=True)
                gaps[shape] += _gaps(done, profile.warmup, steps)
                spent = done.drafting or Drafting()
                drafting[shape].append(spent.seconds / max(spent.calls, 1))
                progress.advance()
    rows = {
        (requests, context, k): cost_row(
            requests, requests * (1 + k), context, gaps[requests, context, k], drafting[requests, context, k]
        )
        for requests, context, k in shapes
    }
    drafted = tuple(row for (_, _, k), row in rows.items() if k)
    return CostReport(
        profile=profile.name,
        target=record.name,
        target_digest=record.digest,
        geometry=config.geometry,
        gamma=config.gamma,
        dtype=profile.dtype,
        threads=settings.threads,
        draft_backend=BACKEND,
        warmup=profile.warmup,
        repeats=profile.repeats,
        fingerprint=dict(fingerprint),
        rows=drafted,
        plain=tuple(row for (_, _, k), row in rows.items() if not k),
        drafting=tuple(
            draft_row(BACKEND, requests, context, drafting[requests, context, k])
            for requests, context, k in shapes
            if k == config.gamma
        ),
        **curve_fields(drafted, slots * (config.gamma + 1)),
    )


def _gaps(done: Together, warmup: int, steps: int) -> list[float]:
    """Seconds from token to token of all requests, but for the first steps and those behind the last one."""
    return [float(gap) for reply in done.replies for gap in np.diff(reply.seconds)[warmup:steps]]
