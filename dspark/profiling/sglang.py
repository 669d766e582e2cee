"""Measure what steps of a running SGLang server cost, as its own profiler does: by the records of its steps.

The server must run in its profiling mode (engine-formats.md, 1.2 and 1.7): acceptance is simulated as 1.0, so that each
step commits exactly the bonus token and the context grows alike for all requests, and every step is recorded with its
time. In mode `static` whole blocks are verified. In `compact` and `cap-accept` the budget of draft tokens is forced in
turn, so that requests and tokens vary apart, which a two-dimensional table needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from dspark.config.models import ServingProfile
from dspark.drafters.config import DrafterConfig
from dspark.engines.sglang_client import SGLangClient
from dspark.errors import DataError, PreflightError
from dspark.io.progress import Progress
from dspark.profiling.cost import CostReport, CostRow, cost_row, curve_fields, draft_row
from dspark.targets.record import TargetRecord

BACKEND = "sglang"
COMPONENTS = ("core", "step_cpu_time", "draft_gpu_time")
HOW = (
    "start it with SGLANG_DSPARK_DEBUG_DUMP=core,step_cpu_time,draft_gpu_time SGLANG_SIMULATE_ACC_LEN=1.0 "
    "SGLANG_RAGGED_VERIFY_MODE=compact (or static) and CUDA graphs"
)
FRACTIONS = (0.0, 0.5, 1.0)  # of all draft tokens, as a budget
_PASSES = 2
_SLACK = 4  # steps beyond the ones that are timed: the first and the last ones run with fewer requests
Shape = tuple[int, int, float | None]  # requests, context, share of the draft tokens that is verified; None: all


def profile_sglang(
    client: SGLangClient,
    record: TargetRecord,
    config: DrafterConfig,
    profile: ServingProfile,
    fingerprint: Mapping[str, Any],
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> CostReport:
    """Step times over requests, verified tokens and contexts, as the server itself records them.

    Args:
        client: a server in profiling mode; no one else may use it meanwhile.
        record: of the target.
        config: geometry of the drafter that the server runs with.
        profile: requests (of each data-parallel rank), contexts, warm-up and repeats.
        fingerprint: of the server that will serve.
        seed: of the prompts.
        progress: advanced by one per shape and pass.
    Raises:
        PreflightError: the server is not in profiling mode.
        DataError: it drafts blocks of another size, or its records lack steps of a shape.
        ServiceError: it does not answer.
    """
    mode, ranks = _profiling_mode(client, config.gamma)
    shares: Sequence[float | None] = (None,) if mode == "static" else FRACTIONS
    shapes = [(n, context, share) for n in profile.requests for context in profile.contexts for share in shares]
    steps = profile.warmup + -(-profile.repeats // _PASSES)
    progress = progress or Progress()
    progress.start("profile steps", len(shapes) * _PASSES, unit="shapes")
    generator = np.random.default_rng(seed)
    times: dict[Shape, list[tuple[float, float]]] = {shape: [] for shape in shapes}
    with _released(client, mode):
        for number in range(_PASSES):
            for shape in shapes if number % 2 == 0 else reversed(shapes):
                requests, context, _ = shape
                length = max(context - steps // 2, 1)
                prompts = generator.integers(0, record.vocab_logical, (requests * ranks, length)).tolist()
                times[shape] += _round(client, prompts, shape, config.gamma, ranks, profile.warmup, steps)
                progress.advance()
    rows = tuple(
        cost_row(requests, verified_tokens(requests, share, config.gamma), context, *zip(*found, strict=True))
        for (requests, context, share), found in times.items()
    )
    return CostReport(
        profile=profile.name,
        target=record.name,
        target_digest=record.digest,
        geometry=config.geometry,
        gamma=config.gamma,
        dtype=profile.dtype,
        threads=int(fingerprint["threads"]),
        draft_backend=BACKEND,
        warmup=profile.warmup,
        repeats=profile.repeats,
        fingerprint=dict(fingerprint),
        rows=rows,
        plain=(),
        drafting=tuple(
            draft_row(BACKEND, requests, context, [draft for _, draft in found])
            for (requests, context, share), found in times.items()
            if share in (None, 1.0)
        ),
        **_curve(rows, max(profile.requests) * (config.gamma + 1)),
    )


def _profiling_mode(client: SGLangClient, gamma: int) -> tuple[str, int]:
    """The server's way of verifying, and how many data-parallel ranks it has.

    Raises:
        PreflightError: it is not in profiling mode; says what is missing.
        DataError: it drafts blocks of another size.
    """
    found = client.served().gamma
    if found is not None and found != gamma:
        raise DataError(
            f"SGLang at {client.address} drafts blocks of {found}, the build's drafter has gamma {gamma}",
            "start it with a drafter of the build's geometry",
        )
    information = client.information()
    if information.get("disable_cuda_graph"):
        raise PreflightError(f"SGLang at {client.address} runs without CUDA graphs: its steps say nothing", HOW)
    dumps = [state.get("dspark_info_record") for state in information["internal_states"]]
    if not dumps or any(dump is None for dump in dumps):
        raise PreflightError(f"SGLang at {client.address} records no steps", HOW)
    for dump in dumps:
        if missing := sorted(set(COMPONENTS) - set(dump.get("components", ()))):
            raise PreflightError(f"SGLang at {client.address} does not record {', '.join(missing)}", HOW)
        if dump.get("simulate_acc_len") != 1.0:
            raise PreflightError(
                f"SGLang at {client.address} simulates an acceptance of {dump.get('simulate_acc_len')}, not 1.0: "
                "contexts would grow as texts are accepted",
                HOW,
            )
    modes = {str(dump.get("mode")) for dump in dumps}
    if len(modes) != 1 or not modes <= {"static", "compact", "cap-accept"}:
        raise PreflightError(f"SGLang at {client.address} verifies in mode {', '.join(sorted(modes))}", HOW)
    return modes.pop(), len(dumps)


@contextmanager
def _released(client: SGLangClient, mode: str) -> Iterator[None]:
    """Afterwards the server chooses its budgets itself again."""
    try:
        yield
    finally:
        if mode != "static":
            _force(client, None)


def _force(client: SGLangClient, share: float | None) -> None:
    """Let all ranks verify this share of the draft tokens; None: what they choose.

    Raises:
        PreflightError: the server refuses.
    """
    answers = client.ask("/set_internal_state", {"server_args": {"dspark_force_budget_frac": share}})
    answers = answers if isinstance(answers, list) else [answers]
    if not answers or not all(isinstance(one, dict) and one.get("updated") for one in answers):
        raise PreflightError(f"SGLang at {client.address} refuses a forced budget: {answers}", HOW)


def _round(
    client: SGLangClient,
    prompts: Sequence[Sequence[int]],
    shape: Shape,
    gamma: int,
    ranks: int,
    warmup: int,
    steps: int,
) -> list[tuple[float, float]]:
    """Seconds of whole steps and of drafting in them, of the steps in which all requests of a rank ran together."""
    requests, _, share = shape
    if share is not None:
        _force(client, share)
    client.flush_cache()
    marks = client.marks()
    client.generate_together(prompts, 1 + steps + _SLACK)
    wanted = verified_tokens(requests, share, gamma)
    found: list[tuple[float, float]] = []
    for rank in client.steps_since(marks):
        new = [
            one
            for one in rank
            if one.get("num_running_reqs") == requests
            and one.get("num_verify_tokens") == wanted
            and one.get("step_cpu_ms") is not None
        ]
        found += [(one["step_cpu_ms"] / 1000, one.get("draft_gpu_ms", 0.0) / 1000) for one in new[warmup:steps]]
    if len(found) < (steps - warmup) * ranks:
        raise DataError(
            f"SGLang at {client.address} recorded {len(found)} steps of {requests} requests and {wanted} tokens, "
            f"{(steps - warmup) * ranks} were to be timed",
            "let no one else use the server, and lower `requests` of the serving profile to what it runs at a time",
        )
    return found


def verified_tokens(requests: int, share: float | None, gamma: int) -> int:
    """Tokens of a step, anchors included: the forced budget is rounded down over all requests together."""
    return requests * (1 + gamma) if share is None else requests + int(share * requests * gamma)


def _curve(rows: Sequence[CostRow], max_batch_tokens: int) -> dict[str, Any]:
    """The curve, or why there is none; plain decoding runs on another server."""
    fields = curve_fields(rows, max_batch_tokens)
    absent = {"plain": "a server with a drafter does not decode plainly", **fields.pop("absent", {})}
    return {**fields, "absent": absent}
