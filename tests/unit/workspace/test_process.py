"""Child groups: the right environment, signals passed on, nothing left behind."""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dspark.errors import Interrupted
from dspark.io import progress
from dspark.workspace.layout import Workspace
from dspark.workspace.process import child_environment, group_members, stopping


@pytest.fixture(autouse=True)
def no_stop_requested() -> Iterator[None]:
    progress._stop.clear()
    yield
    progress._stop.clear()


def run(tmp_path: Path, code: str, notes: list[str] | None = None) -> int:
    told: list[str] = [] if notes is None else notes
    with stopping(told.append) as stopper:
        return stopper.run(
            [sys.executable, "-c", code], workspace=Workspace(tmp_path), environment=os.environ, log=tmp_path / "log"
        )


def test_output_goes_to_the_log_and_the_exit_code_is_kept(tmp_path: Path) -> None:
    assert run(tmp_path, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)") == 3
    assert sorted((tmp_path / "log").read_text().split()) == ["err", "out"]


def test_what_a_killed_command_leaves_running_is_stopped_and_waited_for(tmp_path: Path) -> None:
    """As DVC that is killed while its stage runs."""
    code = (
        "import os, signal, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(os.getpgid(0), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert run(tmp_path, code) == -signal.SIGKILL
    assert group_members(int((tmp_path / "log").read_text().split()[0])) == []


def test_a_signal_is_passed_on_as_sigint_and_ends_in_interrupted(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: (print('got SIGINT', flush=True), sys.exit(130)))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    notes: list[str] = []
    killer = threading.Thread(target=signal_when_ready, args=(tmp_path / "log", 1))
    killer.start()
    with pytest.raises(Interrupted):
        run(tmp_path, code, notes)
    killer.join()
    assert "got SIGINT" in (tmp_path / "log").read_text()
    assert notes == ["stopping at the next safe point; again to stop at once"]


def test_the_third_signal_kills(tmp_path: Path) -> None:
    code = (
        "import signal, time\n"
        "signal.signal(signal.SIGINT, lambda *_: print('ignored', flush=True))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(60)\n"
    )
    killer = threading.Thread(target=signal_when_ready, args=(tmp_path / "log", 3))
    killer.start()
    with pytest.raises(Interrupted):
        run(tmp_path, code)
    killer.join()


def signal_when_ready(log: Path, times: int) -> None:
    import time

    while not log.is_file() or "ready" not in log.read_text():
        time.sleep(0.02)
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)


def test_handlers_are_put_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run(tmp_path, "pass")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping(lambda message: None):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_children_get_this_interpreter_this_dspark_and_no_telemetry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DVC_ROOT", "/elsewhere")
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    for name in ("MLFLOW_TRACKING_URI", "DSPARK_TRACKING_URI", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "not for stages")
    workspace = Workspace(tmp_path)
    run_folder = workspace.runs / "r1"
    environment = child_environment(workspace, run_folder, debug=True)
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert environment["DVC_NO_ANALYTICS"] == "1"
    assert environment["DVC_SITE_CACHE_DIR"] == str(tmp_path / ".dspark/dvc")
    assert environment["SHELL"] == "/bin/sh"
    assert "DVC_ROOT" not in environment
    assert "not for stages" not in environment.values()
    assert (environment["DSPARK_RUN_ID"], environment["DSPARK_RUN_PID"]) == ("r1", str(os.getpid()))
    assert environment["DSPARK_DEBUG"] == "1"
    assert "DSPARK_RUN_ID" not in child_environment(workspace, None)


def test_an_installed_dspark_needs_no_python_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    installed = Path(sysconfig.get_path("purelib")) / "dspark" / "__init__.py"
    monkeypatch.setattr("dspark.workspace.process.dspark.__file__", str(installed))
    assert "PYTHONPATH" not in child_environment(Workspace(tmp_path), None)
    checkout = tmp_path / "src" / "dspark" / "__init__.py"
    monkeypatch.setattr("dspark.workspace.process.dspark.__file__", str(checkout))
    assert child_environment(Workspace(tmp_path), None)["PYTHONPATH"] == str(tmp_path / "src")


def test_when_whoever_listens_fails_nobody_works_on(tmp_path: Path) -> None:
    """As on a disk that has become full: the journal of the run cannot be written, and the command still runs."""

    def broken() -> None:
        if (tmp_path / "log").read_text():
            raise OSError(28, "No space left on device")

    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with pytest.raises(OSError, match="No space left"), stopping(lambda message: None) as stopper:
        stopper.run(
            [sys.executable, "-c", code],
            workspace=Workspace(tmp_path),
            environment=os.environ,
            log=tmp_path / "log",
            tick=broken,
        )
    assert group_members(int((tmp_path / "log").read_text().split()[0])) == []
