"""Each thing that keeps a run from starting, alone and together."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dspark.config.build import ResolvedBuild
from dspark.config.models import Hardware, ServingProfile
from dspark.config.resolve import resolve
from dspark.errors import PreflightError, ServiceError
from dspark.workspace import preflight
from dspark.workspace.layout import Workspace
from dspark.workspace.plan import plan

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


@pytest.fixture
def resolved() -> ResolvedBuild:
    return resolve(CHECKOUT, build="tiny").chosen


def test_missing_modules_are_named_with_the_extra_that_brings_them(
    resolved: ResolvedBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    gone = {"torch", "mlflow", "onnxruntime"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else real(name))
    problems = preflight.missing_extras(resolved)
    assert [problem.what for problem in problems] == ["not installed: torch, mlflow", "not installed: onnxruntime"]
    assert all("pip install 'dspark[" in problem.hint for problem in problems)


def test_both_onnxruntime_distributions_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "1.0")
    problems = preflight.conflicting_runtimes()
    assert len(problems) == 1
    assert "onnxruntime and onnxruntime-gpu are both installed" in problems[0].what
    assert "pip uninstall" in problems[0].hint


def test_a_device_that_is_not_there_is_named_before_anything_starts(
    resolved: ResolvedBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value, said in (
        ("cuda", "DSPARK_DEVICE is cuda, torch"),
        ("cuda:1", "DSPARK_DEVICE is 'cuda:1': it can be cpu or cuda"),
    ):
        monkeypatch.setenv("DSPARK_DEVICE", value)
        monkeypatch.setattr("dspark.device.gpu_names", list)
        (problem,) = preflight.unusable_device(resolved)
        assert problem.what.startswith(said) and problem.hint
    monkeypatch.setenv("DSPARK_DEVICE", "cpu")
    assert preflight.unusable_device(resolved) == []


def test_what_a_profile_on_a_gpu_needs_is_named(resolved: ResolvedBuild, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = resolved.profiles[0].model_copy(update={"hardware": Hardware(accelerator="NVIDIA H100")})
    on_a_gpu = replace(resolved, profiles=(profile,))
    monkeypatch.setattr(preflight, "_installed", lambda name: name == "onnxruntime")
    monkeypatch.setenv("DSPARK_DEVICE", "cpu")
    kept, absent = preflight.unusable_device(on_a_gpu)
    assert kept.what == f"serving profile {profile.name} is measured on 1 x NVIDIA H100, DSPARK_DEVICE is cpu"
    assert absent.what.startswith("not installed: onnxruntime-gpu") and "dspark[gpu]" in absent.hint
    assert "unset DSPARK_DEVICE" in kept.hint
    monkeypatch.delenv("DSPARK_DEVICE")
    monkeypatch.setattr(preflight, "_installed", lambda name: name == "onnxruntime-gpu")
    assert preflight.unusable_device(on_a_gpu) == [], "that this machine has no such GPU is said of the profile"
    monkeypatch.setattr("dspark.profiling.fingerprint.gpus_of_the_driver", lambda: [{"name": "NVIDIA H100 PCIe"}])
    monkeypatch.setattr("dspark.device.gpu_names", list)
    (unseen,) = preflight.unusable_device(on_a_gpu)  # rather than after hours, in stage `profile`
    assert "measured on 1 x NVIDIA H100, torch" in unseen.what and "dspark doctor" in unseen.hint
    monkeypatch.setattr("dspark.device.gpu_names", lambda: ["NVIDIA H100 PCIe"])
    assert preflight.unusable_device(on_a_gpu) == []


def test_domains_without_their_file_are_named(workspace: Workspace, resolved: ResolvedBuild) -> None:
    problems = preflight.missing_domains(workspace, resolved)
    assert len(problems) == len(resolved.domains)
    assert all("is not a file" in problem.what for problem in problems)
    assert preflight.missing_domains(Workspace(CHECKOUT), resolved) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stages: [", "dvc.yaml:1: not valid YAML"),
        ("stages: 3\n", "holds no stages"),
        ("", "holds no stages"),
        (None, "file not found"),
    ],
)
def test_a_pipeline_that_dvc_cannot_read_is_named(workspace: Workspace, text: str | None, said: str) -> None:
    path = workspace.root / "dvc.yaml"
    path.write_text("stages: {}\n")
    assert preflight.unreadable_pipeline(workspace) == []
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    (workspace.root / "dvc.lock").mkdir()
    problem, lock = preflight.unreadable_pipeline(workspace)
    assert said in problem.what and "git checkout dvc.yaml" in problem.hint
    assert "dvc.lock is not a file" in lock.what


@pytest.mark.parametrize(("free", "refused"), [(10 * 1024**2, True), (10 * 1024**3, False)])
def test_a_full_disk_is_refused(
    workspace: Workspace, free: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert bool(preflight.full_disk(workspace)) is refused


def test_a_folder_that_cannot_be_written_is_refused(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.os, "access", lambda path, mode: False)
    assert "cannot be written to" in preflight.full_disk(workspace)[0].what


def test_a_target_that_can_be_made_here_is_no_problem(workspace: Workspace, resolved: ResolvedBuild) -> None:
    assert preflight.missing_target(workspace, resolved.build.target) == []


def test_all_problems_are_reported_together(
    workspace: Workspace, resolved: ResolvedBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = preflight.Problem
    monkeypatch.setattr(preflight, "conflicting_runtimes", lambda: [problem("both", "remove one\nthen the other")])
    with pytest.raises(PreflightError) as caught:
        preflight.check(workspace, resolved)
    text = str(caught.value)
    assert text.startswith("5 things keep build 'tiny' from running\n")
    assert "\n  both\n    remove one\n    then the other" in text


def test_one_problem_reads_as_one_line_and_its_hint(resolved: ResolvedBuild, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = [preflight.Problem("something", "mend it")]
    monkeypatch.setattr(preflight, "find_problems", lambda workspace, resolved: found)
    with pytest.raises(PreflightError) as caught:
        preflight.check(Workspace(CHECKOUT), resolved)
    assert (caught.value.message, caught.value.hint) == ("something", "mend it")
    found.clear()
    preflight.check(Workspace(CHECKOUT), resolved)


def test_records_that_no_engine_would_give_are_a_problem(workspace: Workspace) -> None:
    digests = [f"calibration.records.{name}={'a' * 64}" for name in ("drafter_weights_sha256", "target_digest")]
    shards = ["calibration.records.kind=shards", "calibration.records.folder=shards"]
    resolved = resolve(CHECKOUT, build="tiny", flags=(*shards, *digests)).chosen
    found = preflight.unfit_records(workspace, resolved)
    assert [problem.what for problem in found] == [
        f"calibration.records: {workspace.root / 'shards'} holds no shards <stem>.<n>.pt"
    ]
    (workspace.root / "shards").mkdir()
    (workspace.root / "shards" / "traffic.0.pt").write_bytes(b"")
    assert preflight.unfit_records(workspace, resolved) == []
    far = ServingProfile(
        name="far", engine="sglang", access="url", url="http://a:1", plain_url="http://a:2",
        records_url="http://127.0.0.1:9",
    )  # fmt: skip
    resolved = replace(resolve(CHECKOUT, build="tiny").chosen, records_profile=far)
    (problem,) = preflight.unfit_records(workspace, resolved)
    assert "SGLang at http://127.0.0.1:9: it did not answer /server_info" in problem.what


def test_a_service_that_is_away_is_the_same_error_for_run_and_plan(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 where nothing else is wrong; both name it before anything is asked of DVC or written."""
    pipeline = resolve(CHECKOUT, build="tiny")
    away = preflight.Problem.of("serving profile far", ServiceError("nobody answers", "start it"))
    found = [away]
    monkeypatch.setattr(preflight, "find_problems", lambda workspace, resolved: found)
    for others, kind, code in (([], ServiceError, 8), ([preflight.Problem("full", "free some")], PreflightError, 3)):
        found[1:] = others
        for call in (lambda: preflight.check(workspace, pipeline.chosen), lambda: plan(workspace, pipeline)):
            with pytest.raises(kind) as caught:
                call()
            assert caught.value.exit_code == code and "serving profile far: nobody answers" in caught.value.message
    assert list(workspace.root.iterdir()) == []
