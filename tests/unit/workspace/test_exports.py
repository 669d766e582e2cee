"""Exports that were stopped or killed: what they leave, what is said of it, and what `dspark status` shows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dspark.cli.boundary import run_command
from dspark.errors import GateError, Interrupted
from dspark.io.atomic import clear_unfinished, replaced_tree, unfinished_folder
from dspark.workspace.export import _noted
from dspark.workspace.exports import ExportRecord, clear_killed, read_exports, write_export
from dspark.workspace.layout import MARKS, Workspace


class Notes:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, message: str) -> None:
        self.lines.append(message)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    for mark in MARKS:
        (tmp_path / mark).mkdir() if not Path(mark).suffix else (tmp_path / mark).write_text("")
    return Workspace(tmp_path)


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def killed_export(out: Path) -> None:
    """A process that is killed in the middle of writing."""
    code = (
        "import os, pathlib, sys; from dspark.io.atomic import replaced_tree\n"
        "with replaced_tree(pathlib.Path(sys.argv[1])) as folder:\n"
        "    (folder / 'half').write_bytes(b'x' * 2**20)\n"
        "    os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(out)], check=False)
    assert done.returncode == -signal.SIGKILL


def test_what_a_killed_export_left_is_removed_by_the_next_one_which_says_so(workspace: Workspace) -> None:
    out = workspace.root / "exported"
    killed_export(out)
    dead = ExportRecord(target="small", out=str(out), pid=2**22 + 1, started=1.0)
    write_export(workspace, dead)
    assert unfinished_folder(out).is_dir() and not out.exists()
    assert [(one.state, one.message) for one in read_exports(workspace)] == [
        ("killed", f"nothing was written to {out}")
    ]
    notes = Notes()
    clear_killed(workspace, workspace.root / "elsewhere", notes.note)
    assert notes.lines == [f"the export of small to {out} was killed: removed its unfinished files (1.0 MiB)"]
    assert not unfinished_folder(out).exists()
    clear_killed(workspace, out, notes.note)
    assert len(notes.lines) == 1, "it is said once"
    assert [one.state for one in read_exports(workspace)] == ["killed"], "and stays known"


def test_an_earlier_export_is_put_back_if_the_kill_came_between_the_moves(tmp_path: Path) -> None:
    out = tmp_path / "exported"
    aside = unfinished_folder(out) / ".replaced-x" / "exported"
    aside.mkdir(parents=True)
    (aside / "io.json").write_text("old")
    assert clear_unfinished(out) == 0
    assert (out / "io.json").read_text() == "old" and names(tmp_path) == ["exported"]


@pytest.mark.parametrize("failure", [None, GateError("wrong"), KeyboardInterrupt()])
def test_nothing_hidden_is_left_however_an_export_ends(tmp_path: Path, failure: BaseException | None) -> None:
    out = tmp_path / "exported"
    out.mkdir()
    (out / "io.json").write_text("old")

    def make() -> None:
        with replaced_tree(out) as folder:
            (folder / "io.json").write_text("new")
            if failure is not None:
                raise failure

    if failure is None:
        make()
    else:
        with pytest.raises(type(failure)):
            make()
    assert (out / "io.json").read_text() == ("new" if failure is None else "old")
    assert names(tmp_path) == ["exported"]


def test_an_export_is_noted_from_its_beginning_to_its_end(workspace: Workspace) -> None:
    out, listener = workspace.root / "exported", Notes()
    with _noted(workspace, "small", out, listener):  # type: ignore[arg-type]  # of a listener, only notes are told
        (running,) = read_exports(workspace)
        assert (running.state, running.pid, running.finished) == ("running", os.getpid(), None)
    with pytest.raises(GateError), _noted(workspace, "large", out, listener):  # type: ignore[arg-type]
        raise GateError("it is not the target")
    with pytest.raises(Interrupted) as caught, _noted(workspace, "tiny", out, listener):  # type: ignore[arg-type]
        raise Interrupted
    assert str(caught.value) == f"the export of tiny was stopped: nothing was written to {out}"
    assert caught.value.hint == "the same command begins the export anew"
    ended = {one.target: (one.state, one.message) for one in read_exports(workspace)}
    assert ended == {
        "small": ("done", ""),
        "large": ("failed", "it is not the target"),
        "tiny": ("interrupted", f"nothing was written to {out}"),
    }
    assert listener.lines == []


def status(workspace: Workspace, capsys: Any, *flags: str) -> tuple[int, str]:
    code = run_command(["--workspace", str(workspace.root), "status", *flags])
    return code, capsys.readouterr().out


def test_status_shows_exports_also_where_nothing_was_run(workspace: Workspace, capsys: Any) -> None:
    assert status(workspace, capsys)[0] == 3
    write_export(workspace, ExportRecord(target="small", out="/x/y", pid=os.getpid(), started=1.0))
    code, text = status(workspace, capsys)
    assert code == 0 and "export of small" in text and "running" in text and "/x/y" in text
    code, text = status(workspace, capsys, "--json")
    assert code == 0 and [one["state"] for one in json.loads(text)["exports"]] == ["running"]
