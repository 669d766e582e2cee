"""A workspace from the installed files: all of it or nothing, and upgrades that leave edits alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import dspark
from dspark.cli.boundary import run_command
from dspark.config.resolve import resolve
from dspark.errors import PreflightError
from dspark.workspace import scaffold as module
from dspark.workspace.layout import Workspace, find_workspace
from dspark.workspace.scaffold import BESIDE, CONTENT, RECORD, changes, scaffold, upgrade, written_by

CHECKOUT = Path(__file__).resolve().parents[3]
IGNORED = ["# made by `dspark run`", "/.dspark/", "/builds/"]
FILES = {
    "dvc.yaml": b"stages: {}\n",
    "params.yaml": b"training: {steps: 1}\n",
    "pipeline/builds/tiny.yaml": b"target: tiny\n",
    "stages/train.py": b"first\n",
    ".dvc/config": b"[core]\n",
}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".git" not in path.parts and ".dspark" not in path.parts
    }


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """What dspark ships; a test that changes it has a newer dspark."""
    files = dict(FILES)
    monkeypatch.setattr(module, "_template", lambda: (dict(files), list(IGNORED)))
    return files


@pytest.fixture
def made(shipped: dict[str, bytes], tmp_path: Path) -> Workspace:
    scaffold(tmp_path / "made")
    return Workspace(tmp_path / "made")


def nothing(line: str) -> None:
    raise AssertionError(line)


def test_the_checkouts_own_files_make_a_workspace(tmp_path: Path) -> None:
    """Byte by byte, `.gitignore` as far as it concerns a workspace; and the tiny build resolves in it."""
    written = scaffold(tmp_path / "ws")
    assert find_workspace(tmp_path / "ws" / "stages").root == tmp_path / "ws"
    for name in written:
        if name != ".gitignore":
            assert (tmp_path / "ws" / name).read_bytes() == (CHECKOUT / name).read_bytes()
    ignored = (tmp_path / "ws/.gitignore").read_text().splitlines()
    assert "/.dspark/" in ignored and ".mypy_cache/" not in ignored
    assert not list((tmp_path / "ws").rglob("*.pyc"))
    assert resolve(tmp_path / "ws", target="tiny").chosen.name == "tiny"
    assert scaffold(tmp_path / "ws") == [] and written_by(Workspace(tmp_path / "ws")) == dspark.__version__


def test_the_wheel_carries_exactly_these_files() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    carried = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert carried == {name: f"dspark/_workspace/{name}" for name in CONTENT}


def test_other_files_of_a_repository_are_left_as_they_are(shipped: dict[str, bytes], tmp_path: Path) -> None:
    mine = {"README.md": b"mine", "pipeline/mine.txt": b"mine", "params.yaml": FILES["params.yaml"]}
    for name, data in mine.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / ".gitignore").write_text("*.log\n/builds/")
    assert sorted(scaffold(tmp_path)) == sorted({*FILES, ".gitignore"} - {"params.yaml"})
    assert contents(tmp_path).items() >= {**FILES, **mine}.items()
    assert (tmp_path / ".gitignore").read_text() == "*.log\n/builds/\n# made by `dspark run`\n/.dspark/\n"


@pytest.mark.parametrize("blocking", ["dvc.yaml", "stages", "pipeline/builds", ".dvc/config/x"])
def test_nothing_is_written_where_something_is_in_the_way(
    blocking: str, shipped: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / blocking).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / blocking).write_text("another thing")
    before = contents(tmp_path)
    with pytest.raises(PreflightError, match="in the way of a workspace: ") as refusal:
        scaffold(tmp_path)
    assert refusal.value.hint.startswith("nothing was written")
    assert contents(tmp_path) == before and not (tmp_path / RECORD).exists()


def test_links_are_not_written_through(shipped: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws/stages").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PreflightError, match=r"stages/train\.py"):
        scaffold(tmp_path / "ws")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_failure_on_the_way_leaves_nothing(
    shipped: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, written = module.write_bytes, []

    def full(path: Path, data: bytes) -> None:
        written.append(path)
        if len(written) == 4:
            raise OSError(28, "No space left on device", str(path))
        real(path, data)

    monkeypatch.setattr(module, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        scaffold(tmp_path / "deep" / "ws")
    assert list(tmp_path.iterdir()) == []


def test_a_workspace_within_a_workspace_is_refused(made: Workspace) -> None:
    with pytest.raises(PreflightError, match="lies inside the workspace"):
        scaffold(made.root / "pipeline" / "another")
    with pytest.raises(PreflightError, match=r"dvc\.yaml is a file"):
        scaffold(made.root.parent / "made" / "dvc.yaml" / "x")


def test_folders_with_blanks_stand_in_commands_that_can_be_copied(shipped: dict[str, bytes], tmp_path: Path) -> None:
    place = tmp_path / "my place"
    place.mkdir()
    (place / "dvc.yaml").write_text("mine")
    with pytest.raises(PreflightError) as refusal:
        scaffold(place)
    assert refusal.value.hint.endswith(f": dspark init '{place}/dspark-workspace'")
    (place / "dvc.yaml").unlink()
    scaffold(place)
    (place / "params.yaml").write_text("mine")
    with pytest.raises(PreflightError) as refusal:
        scaffold(place)
    assert refusal.value.hint == f"see how: dspark init --upgrade '{place}'"
    with pytest.raises(PreflightError) as refusal:
        scaffold(place / "more")
    assert f"(cd '{place}')" in refusal.value.hint


def test_an_edited_workspace_is_not_made_anew(made: Workspace) -> None:
    (made.root / "params.yaml").write_text("mine")
    with pytest.raises(PreflightError, match=r"is a workspace already; 1 of its files .*params\.yaml") as refusal:
        scaffold(made.root)
    assert "dspark init --upgrade" in refusal.value.hint
    assert (made.root / "params.yaml").read_text() == "mine"


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_or_not(shipped: dict[str, bytes], tmp_path: Path) -> None:
    scaffold(tmp_path / "plain")
    assert (tmp_path / "plain/.gitignore").is_file() and not (tmp_path / "plain/.git").exists()
    scaffold(tmp_path / "none", git=False)
    assert not (tmp_path / "none/.gitignore").exists() and not (tmp_path / "none/.git").exists()
    scaffold(tmp_path / "own", git=True)
    assert (tmp_path / "own/.git").is_dir()
    subprocess.run(["git", "init", "--quiet", str(tmp_path / "outer")], check=True)
    scaffold(tmp_path / "outer/inside", git=True)
    assert not (tmp_path / "outer/inside/.git").exists()
    told = subprocess.run(["git", "status", "--porcelain"], cwd=tmp_path / "outer", capture_output=True, text=True)
    assert told.stdout == "?? inside/\n"


def test_an_upgrade_shows_what_dspark_changed_and_nothing_else(made: Workspace, shipped: dict[str, bytes]) -> None:
    """Edits here are no change of dspark's; a removed target stays removed, a removed stage does not."""
    assert changes(made) == []
    (made.root / "params.yaml").write_text("mine\n")
    (made.root / "pipeline/builds/tiny.yaml").unlink()
    assert changes(made) == []
    shipped["stages/train.py"] = b"second\n"
    shipped["stages/more.py"] = b"more\n"
    (made.root / "dvc.yaml").unlink()
    found = {change.path: change for change in changes(made)}
    assert {path: change.kind for path, change in found.items()} == {
        "dvc.yaml": "new",
        "stages/train.py": "changed",
        "stages/more.py": "new",
    }
    assert found["stages/train.py"].diff.splitlines() == [
        "--- here/stages/train.py",
        f"+++ dspark {dspark.__version__}/stages/train.py",
        "@@ -1 +1 @@",
        "-first",
        "+second",
    ]


def test_an_upgrade_puts_its_version_beside_what_both_changed(made: Workspace, shipped: dict[str, bytes]) -> None:
    (made.root / "params.yaml").write_text("mine\n")
    shipped["params.yaml"] = b"theirs\n"
    shipped["stages/train.py"] = b"second\n"
    applied = upgrade(made, nothing)
    assert {change.path: change.kind for change in applied} == {"params.yaml": "edited", "stages/train.py": "changed"}
    assert (made.root / "params.yaml").read_text() == "mine\n"
    assert (made.root / f"params.yaml{BESIDE}").read_text() == "theirs\n"
    assert (made.root / "stages/train.py").read_text() == "second\n"
    assert changes(made) == []


def test_of_a_workspace_that_nobody_wrote_down_every_difference_is_taken_for_an_edit(
    made: Workspace, shipped: dict[str, bytes]
) -> None:
    (made.root / RECORD).unlink()
    shipped["stages/train.py"] = b"second\n"
    assert [(change.path, change.kind) for change in changes(made)] == [("stages/train.py", "edited")]
    assert written_by(made) is None


def test_lines_that_gitignore_lacks_are_added(made: Workspace) -> None:
    (made.root / ".gitignore").write_text("*.log\n/builds/\n")
    assert [(change.path, change.kind) for change in changes(made)] == [(".gitignore", "changed")]
    upgrade(made, nothing)
    assert (made.root / ".gitignore").read_text().splitlines() == ["*.log", "/builds/", *IGNORED[:2]]
    (made.root / ".gitignore").unlink()
    assert changes(made) == []


def test_a_gitignore_that_is_there_stays_to_the_byte(shipped: dict[str, bytes], tmp_path: Path) -> None:
    """Latin-1, and ends of lines as on Windows: what is added ends as they do."""
    mine = b"*.log\r\n# caf\xe9\r\n/builds/"
    (tmp_path / ".gitignore").write_bytes(mine)
    scaffold(tmp_path)
    assert (tmp_path / ".gitignore").read_bytes() == mine + b"\r\n# made by `dspark run`\r\n/.dspark/\r\n"
    assert changes(Workspace(tmp_path)) == []


def test_a_gitignore_that_was_to_be_left_alone_is_left_alone_by_upgrades_too(
    shipped: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / ".gitignore").write_bytes(b"*.log\n")
    workspace = Workspace(tmp_path)
    scaffold(tmp_path, git=False)
    assert changes(workspace) == []
    shipped["stages/train.py"] = b"second\n"
    assert [change.path for change in upgrade(workspace, nothing)] == ["stages/train.py"]
    assert changes(workspace) == [] and (tmp_path / ".gitignore").read_bytes() == b"*.log\n"
    assert scaffold(tmp_path) == [".gitignore"], "asked for without --no-git, its lines are dspark's again"
    (tmp_path / ".gitignore").write_bytes(b"*.log\n")
    assert [change.path for change in changes(workspace)] == [".gitignore"]


def test_a_git_that_fails_in_silence_is_told(
    shipped: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = subprocess.CompletedProcess(["git"], 128, "", "\n")
    monkeypatch.setattr(module.subprocess, "run", lambda *arguments, **options: failed)
    with pytest.raises(PreflightError, match="git init: it ended with 128"):
        scaffold(tmp_path / "ws", git=True)
    assert not (tmp_path / "ws").exists()


def test_the_command(
    shipped: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["init", "my place"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "made a workspace in my place: 6 files",
        "next  cd 'my place' && dspark plan --target tiny",
    ]
    assert run_command(["init", "my place", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"] == []
    shipped["stages/train.py"] = b"second\n"
    assert run_command(["init", "--upgrade", "my place"]) == 0
    out = capsys.readouterr().out
    assert "+second" in out and "would be changed: stages/train.py" in out
    assert out.splitlines()[-1] == "next  dspark init --upgrade --yes 'my place'"
    assert (tmp_path / "my place/stages/train.py").read_text() == "first\n"
    assert run_command(["-C", "my place", "init", "--upgrade", "--yes"]) == 0
    assert capsys.readouterr().out == "changed: stages/train.py\n"
    assert run_command(["init", "--upgrade", "my place"]) == 0
    assert capsys.readouterr().out == "my place: nothing to change\n"
    assert run_command(["init", "--yes"]) == 2
    assert run_command(["init", "--upgrade", "--git"]) == 2
    assert run_command(["init", "--upgrade"]) == 3
