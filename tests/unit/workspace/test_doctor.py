"""What `dspark doctor` says: of the machine, the installation, the workspace, and services that it names."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from dspark import __version__, device
from dspark.workspace import environment, memory, services, versions
from dspark.workspace.doctor import Check, examine
from dspark.workspace.layout import Workspace
from dspark.workspace.scaffold import scaffold


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch):
    """The check, on a machine where torch and the driver see some GPUs."""

    def look(asked: str | None = None, torch: tuple[str, ...] = (), driver: tuple[str, ...] = ()) -> Check:
        monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
        monkeypatch.delenv("DSPARK_DEVICE", raising=False)
        if asked is not None:
            monkeypatch.setenv("DSPARK_DEVICE", asked)
        for module in (device, environment):
            monkeypatch.setattr(module, "gpu_names", lambda: list(torch))
        monkeypatch.setattr(environment, "gpus_of_the_driver", lambda: [{"name": name} for name in driver])
        (check,) = (one for one in examine(None).checks if one.name == "device")
        return check

    return look


def test_the_gpu_or_the_cpu_that_stages_will_use(found) -> None:
    check = found(torch=("NVIDIA H200",), driver=("NVIDIA H200",))
    assert (check.status, check.found) == ("ok", "cuda:0, NVIDIA H200: stages compute there")
    assert found().found == "cpu: there is no GPU"
    assert found("cpu", torch=("NVIDIA H200",)).found.startswith("cpu, as the environment asks (DSPARK_DEVICE")


def test_a_gpu_that_torch_does_not_see_is_a_warning(found) -> None:
    check = found(driver=("NVIDIA H200",))
    assert check.status == "warning" and "the driver has NVIDIA H200, torch" in check.found
    assert "CUDA" in check.fix


def test_a_device_that_is_asked_for_in_vain_is_an_error(found) -> None:
    check = found("cuda")
    assert check.status == "error" and "sees no GPU" in check.found


def looked(name: str, workspace: Workspace | None = None) -> Check:
    (check,) = (one for one in examine(workspace).checks if one.name == name)
    return check


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    scaffold(tmp_path / "ws")
    return Workspace(tmp_path / "ws")


def test_little_memory_is_a_warning_and_a_containers_limit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8 GiB that the machine has free a container of 3 GiB, 2 of them used, leaves 1."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {8 * 1024**2} kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path / "none")
    assert memory.available_memory() == 8 * 1024**3
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_memory() == 8 * 1024**3
    (tmp_path / "memory.max").write_text(f"{3 * 1024**3}\n")
    (tmp_path / "memory.current").write_text(f"{2 * 1024**3}\n")
    assert memory.available_memory() == 1024**3 and memory.usable_memory() == 3 * 1024**3
    check = looked("memory")
    assert check.status == "warning" and check.found.startswith("1.0 of 3.0 GiB free") and "--estimate" in check.fix


def test_a_library_outside_its_range_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["click>=8.2,<9", "numpy>=2.1,<3", 'torch>=2.9,<3; extra == "pipeline"']
    there = {"click": "8.2.1", "numpy": "1.26.4", "torch": "2.8.0+cpu"}
    monkeypatch.setattr(versions.metadata, "requires", lambda name: asked)
    monkeypatch.setattr(versions, "version_of", there.get)
    assert versions.unsuited() == {
        "numpy": "1.26.4 is installed, dspark asks for <3,>=2.1",
        "torch": "2.8.0+cpu is installed, dspark asks for <3,>=2.9",
    }
    check = looked("versions")
    assert check.status == "warning" and check.fix.startswith("pip install --upgrade 'dspark==")


def test_files_of_another_version_are_a_warning(workspace: Workspace) -> None:
    assert looked("workspace files", workspace).status == "ok"
    record = workspace.root / ".dspark.json"
    record.write_text(record.read_text().replace(f'"version": "{__version__}"', '"version": "0.0.9"'))
    check = looked("workspace files", workspace)
    assert check.status == "warning" and "written by dspark 0.0.9" in check.found
    assert check.fix.endswith("dspark init --upgrade")
    record.write_text("{")
    assert looked("workspace files", workspace).status == "warning"
    record.unlink()  # a checkout
    assert looked("workspace files", workspace).status == "ok"


def test_a_tracking_server_that_is_away_is_a_warning(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "PATIENCE_SECONDS", 0.1)
    assert looked("tracking server", workspace).found.startswith("sqlite:///")
    monkeypatch.setenv("DSPARK_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    check = looked("tracking server", workspace)
    assert check.status == "warning" and "does not answer" in check.found and "dspark registry sync" in check.fix
    monkeypatch.setenv("DSPARK_TRACKING_URI", "mlflow.db")
    assert looked("tracking server", workspace).status == "error"


def test_an_engine_that_a_build_names_has_to_answer(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "PATIENCE_SECONDS", 0.1)
    address = f"http://127.0.0.1:{free_port()}"
    profile = workspace.root / "serving_profiles/remote.yaml"
    profile.write_text(
        f"engine: sglang\naccess: url\nurl: {address}\nplain_url: {address}\n"
        "hardware: {accelerator: NVIDIA H100}\nlimits: {requests: 1, context: 1024}\n"
    )
    assert not [one for one in examine(workspace).checks if one.name.startswith("remote")]  # no build names it
    build = workspace.root / "pipeline/builds/tiny.yaml"
    build.write_text(build.read_text().replace("[reference-smoke]", "[remote]"))
    found = [one for one in examine(workspace).checks if one.name.startswith("remote")]
    assert [one.name for one in found] == ["remote url", "remote plain_url"]
    assert all(one.status == "error" and address in one.found for one in found)
    assert "serving_profiles/remote.yaml" in found[0].fix


def test_every_warning_and_error_has_a_fix(workspace: Workspace) -> None:
    """Of a workspace in which everything is wrong that can be put wrong by hand."""
    (workspace.root / ".dvc/config").unlink()
    (workspace.root / ".dvc/tmp").mkdir()
    (workspace.root / ".dvc/tmp/rwlock").touch()
    (workspace.root / "dvc.lock").write_text("schema: '2.0'\nstages:\n  tr")
    (workspace.root / "dvc.yaml").write_text("stages: [")
    (workspace.root / "pipeline/builds/tiny.yaml").write_text("trainin: {}\n")
    for diagnosis in (examine(None), examine(workspace)):
        assert all(check.fix for check in diagnosis.checks if check.status != "ok")
    assert not examine(workspace).healthy


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
