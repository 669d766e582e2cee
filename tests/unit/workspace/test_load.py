"""Which step times a load study rests on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dspark.config.models import LoadSettings, ServingProfile
from dspark.io.jsonfile import write_json, write_model
from dspark.io.progress import Progress
from dspark.profiling import steps
from dspark.profiling.cost import CostReport, CostRow
from dspark.workspace.load import _Load

PROFILE = ServingProfile(name="cpu", engine="reference", access="local", requests=(1, 2))


def cost(*requests: int) -> CostReport:
    rows = tuple(
        CostRow(requests=count, verify_tokens=2 * count, context=64, draft_seconds=0.1, verify_seconds=0.9,
                step_seconds=1.0, n=5, ci95=(1.0, 1.0))
        for count in requests
    )  # fmt: skip
    return CostReport(profile="cpu", target="t", target_digest="0", geometry="g", gamma=1, dtype="float32", threads=1,
                      draft_backend="torch", warmup=1, repeats=5, fingerprint={}, rows=rows, plain=rows,
                      drafting=())  # fmt: skip


@pytest.mark.parametrize(
    ("known", "concurrency", "measured"),
    [
        ((1, 2, 4), (2, 4), None),  # the build's own
        ((1, 2), (2, 4), (1, 2, 4)),  # which do not go so far
        ((2, 4), (2, 4), (1, 2, 4)),  # nor down to the one request with which every round ends
        ((), (4, 8), (1, 4, 8)),
    ],
)
def test_step_times_go_from_one_request_to_the_most(
    known: tuple[int, ...],
    concurrency: tuple[int, ...],
    measured: tuple[int, ...] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    asked: list[tuple[int, ...]] = []

    def profile_engine(target: Any, config: Any, profile: ServingProfile, *rest: Any, **more: Any) -> CostReport:
        asked.append(profile.requests)
        return cost(*profile.requests)

    monkeypatch.setattr(steps, "profile_engine", profile_engine)
    write_json(tmp_path / "fingerprint.json", {})
    if known:
        write_model(tmp_path / "cost.json", cost(*known))
    make: Any = _Load  # of as much as step times need
    load = make(
        workspace=SimpleNamespace(fingerprint=lambda name: tmp_path / "fingerprint.json"),
        inputs=SimpleNamespace(profile=PROFILE),
        paths=SimpleNamespace(cost=tmp_path / "cost.json"),
        settings=LoadSettings(concurrency=concurrency),
        progress=Progress(),
    )
    found = load._cost(None, SimpleNamespace(config=None))
    assert asked == ([measured] if measured is not None else [])
    assert {row.requests for row in found.rows} == set(measured or known)
