"""One run per workspace, and the repair of what a killed DVC leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark.errors import PreflightError
from dspark.workspace.layout import Workspace, find_workspace
from dspark.workspace.lock import (
    complete_lock_file,
    dvc_processes,
    holder,
    keep_dvc_lock,
    repair_dvc,
    run_lock,
)

LOCK_FILE = (
    "schema: '2.0'\nstages:\n  train@b:\n    cmd: x\n    outs:\n    - path: builds/b/train\n      md5: 0123456789\n"
)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    (tmp_path / ".dvc" / "tmp").mkdir(parents=True)
    return Workspace(tmp_path)


def test_a_second_run_is_refused_and_names_the_first(workspace: Workspace) -> None:
    with run_lock(workspace, "dspark run of build 'b'", print):
        found = holder(workspace)
        assert found is not None and found["pid"] == os.getpid()
        message = f"in use: dspark run of build 'b' \\(process {os.getpid()}\\)"
        with pytest.raises(PreflightError, match=message), run_lock(workspace, "another", print):
            raise AssertionError("both hold it")
    assert holder(workspace) is None
    with run_lock(workspace, "a later one", print):
        assert holder(workspace) is not None


def test_a_workspace_that_never_ran_is_free(workspace: Workspace) -> None:
    assert holder(workspace) is None


def killed_owner_with_child(workspace: Workspace, seconds: float) -> subprocess.Popen[str]:
    """A process that takes the lock, hands it to a child that lives for `seconds`, and dies of SIGKILL."""
    code = (
        "import os, signal, subprocess, sys; from pathlib import Path\n"
        "from dspark.workspace.layout import Workspace; from dspark.workspace.lock import run_lock\n"
        f"with run_lock(Workspace(Path({str(workspace.root)!r})), 'first', print) as handle:\n"
        f"    subprocess.Popen(['sleep', '{seconds}'], pass_fds=(handle,), stdout=subprocess.DEVNULL)\n"
        "    print('held', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdout.readline() == "held\n"
    owner.wait()
    return owner


def test_a_run_waits_for_what_a_killed_run_left_running(workspace: Workspace) -> None:
    killed_owner_with_child(workspace, 1.5)
    notes: list[str] = []
    with run_lock(workspace, "second", notes.append):
        assert len(notes) == 1 and "waiting" in notes[0]


def test_it_does_not_wait_for_ever(workspace: Workspace) -> None:
    killed_owner_with_child(workspace, 3)
    second = run_lock(workspace, "second", lambda message: None, patience_seconds=0.3)
    with pytest.raises(PreflightError, match="does not stop"), second:
        raise AssertionError("both hold it")


ENTRY = '{"read": {"x": [{"pid": 1, "cmd": "dvc repro"}]}}'  # process 1 lives, as a zombie would


@pytest.mark.parametrize("content", ["", '{"write": {"a"', ENTRY])
def test_a_table_of_file_locks_that_a_killed_dvc_left_is_removed(workspace: Workspace, content: str) -> None:
    table = workspace.root / ".dvc/tmp/rwlock"
    table.write_text(content)
    assert len(repair_dvc(workspace)) == 1
    assert not table.exists()
    assert repair_dvc(workspace) == []


def test_it_is_left_alone_while_a_dvc_process_may_be_rewriting_it(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = workspace.root / ".dvc/tmp/rwlock"
    table.write_text("")
    monkeypatch.setattr("dspark.workspace.lock.dvc_processes", lambda workspace: [1])
    assert repair_dvc(workspace) == []
    assert table.exists()


@pytest.mark.parametrize("content", ["{}", '{"write": {}}', '{"read": {}, "write": {}}'])
def test_a_table_without_entries_is_left_alone(workspace: Workspace, content: str) -> None:
    """That is what a DVC leaves that ended well."""
    table = workspace.root / ".dvc/tmp/rwlock"
    table.write_text(content)
    assert repair_dvc(workspace) == []
    assert table.read_text() == content


def test_dvc_commands_of_this_workspace_are_found(
    workspace: Workspace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    script = workspace.root / "dvc"
    script.write_text("import time; time.sleep(30)")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    here = subprocess.Popen([sys.executable, str(script), "repro"], cwd=workspace.root)
    there = subprocess.Popen([sys.executable, str(script), "repro"], cwd=elsewhere)
    try:
        assert dvc_processes(workspace) == [here.pid]
    finally:
        for child in (here, there):
            child.kill()
            child.wait()


@pytest.mark.parametrize("length", [0, 1, 20, 40, len(LOCK_FILE) - 20, len(LOCK_FILE) - 1])
def test_a_cut_off_dvc_lock_is_told_from_a_whole_one(length: int) -> None:
    assert complete_lock_file(LOCK_FILE.encode())
    assert not complete_lock_file(LOCK_FILE[:length].encode())


def test_a_cut_off_dvc_lock_is_restored_from_the_last_finished_run(workspace: Workspace) -> None:
    lock = workspace.root / "dvc.lock"
    workspace.state.mkdir()
    lock.write_text(LOCK_FILE)
    keep_dvc_lock(workspace)
    lock.write_text(LOCK_FILE[:30])
    assert len(repair_dvc(workspace)) == 1
    assert lock.read_text() == LOCK_FILE


def test_without_a_copy_it_is_moved_aside(workspace: Workspace) -> None:
    lock = workspace.root / "dvc.lock"
    lock.write_text(LOCK_FILE[:30])
    assert len(repair_dvc(workspace)) == 1
    assert not lock.exists()
    assert (workspace.root / "dvc.lock.damaged").read_text() == LOCK_FILE[:30]


def test_the_workspace_is_found_from_inside_and_missed_from_outside(tmp_path: Path) -> None:
    for folder in ("pipeline", "stages", "a/b"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "dvc.yaml").touch()
    assert find_workspace(tmp_path / "a" / "b").root == tmp_path
    with pytest.raises(PreflightError, match="not inside a workspace"):
        find_workspace(tmp_path.parent)


def test_of_runs_that_begin_at_once_one_holds_the_workspace_at_any_time(workspace: Workspace) -> None:
    """Five processes want it again and again; who has it notes when he came and when he went."""
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "from dspark.errors import PreflightError\n"
        "from dspark.workspace.layout import Workspace; from dspark.workspace.lock import run_lock\n"
        f"root = Path({str(workspace.root)!r})\n"
        "log = os.open(root / 'log', os.O_WRONLY | os.O_APPEND | os.O_CREAT)\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "end = time.monotonic() + 0.7\n"
        "while time.monotonic() < end:\n"
        "    try:\n"
        "        with run_lock(Workspace(root), 'a run', print):\n"
        "            os.write(log, f'{os.getpid()} in\\n'.encode()); time.sleep(0.002)\n"
        "            os.write(log, f'{os.getpid()} out\\n'.encode())\n"
        "    except PreflightError as error:\n"
        "        assert 'in use: a run' in error.message, error\n"
        "        time.sleep(0.001)\n"
    )
    command = [sys.executable, "-c", code]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ)
        for _ in range(5)
    ]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    assert [child.communicate()[0] for child in children] == [""] * 5  # nobody waited for a killed run: none was
    assert [child.returncode for child in children] == [0] * 5
    lines = [line.split() for line in (workspace.root / "log").read_text().splitlines()]
    assert len(lines) > 20
    for (first, came), (second, went) in zip(lines[::2], lines[1::2], strict=True):
        assert (first, came, went) == (second, "in", "out")
