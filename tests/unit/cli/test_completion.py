"""What the tab key offers, asked as the shells ask."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dspark.cli.boundary import run_command

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The words that click's bash completion offers at the end of a command line."""

    def ask(*words: str, cwd: Path = CHECKOUT) -> list[str]:
        monkeypatch.chdir(cwd)
        monkeypatch.setenv("_DSPARK_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", " ".join(("dspark", *words)))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        with pytest.raises(SystemExit) as end:
            run_command([])
        assert end.value.code == 0
        return [line.partition(",")[2] for line in capsys.readouterr().out.splitlines() if line]

    return ask


def test_verbs_targets_builds_and_profiles_are_offered(offered) -> None:
    assert {"run", "plan", "init", "logs"} <= set(offered(""))
    assert offered("promo") == ["promote"]
    assert {"tiny", "smollm2-135m"} <= set(offered("run", "--target", ""))
    assert "smollm2-135m-large" in offered("plan", "--build", "smollm2")
    assert offered("targets", "show", "ti") == ["tiny"]
    assert offered("profiles", "show", "reference-s") == ["reference-smoke"]
    assert offered("plots", "tin") == ["tiny"]


@pytest.mark.parametrize("words", [
    ("live", "--build"), ("live", "--target"), ("live", "--rival"), ("certify", "--target"),
    ("import", "x", "--target"), ("import", "x", "--like"),
])  # fmt: skip
def test_wherever_a_target_or_a_build_is_named_they_are_offered(offered, words: tuple[str, ...]) -> None:
    assert {"tiny", "smollm2-135m"} <= set(offered(*words, ""))


def test_the_workspace_on_the_command_line_counts(offered, tmp_path: Path) -> None:
    assert offered("run", "--target", "", cwd=tmp_path) == []
    assert "tiny" in offered("-C", str(CHECKOUT), "run", "--target", "", cwd=tmp_path)
    assert offered("nonsense", "", cwd=tmp_path) == offered("", cwd=tmp_path)


def test_stages_with_a_log_are_offered(offered, tmp_path: Path) -> None:
    for name in ("dvc.yaml", "pipeline", "stages"):
        (tmp_path / name).mkdir()
    run = tmp_path / ".dspark/runs/1"
    run.mkdir(parents=True)
    for name in ("train@b.log", "dvc.log"):
        (run / name).touch()
    assert offered("logs", "tr", cwd=tmp_path) == ["train@b"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "_DSPARK_COMPLETE" in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_an_unknown_shell_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["completion", "tcsh"]) == 2
    assert "'bash', 'zsh', 'fish'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    """The script in a real bash, its function called as bash calls it at a press of the tab key."""
    program = tmp_path / "dspark"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dspark "$@"\n')
    program.chmod(0o755)
    lines = (
        f'PATH="{tmp_path}:$PATH"; eval "$(dspark completion bash)"; '
        "COMP_WORDS=(dspark run --target ti); COMP_CWORD=3; _dspark_completion dspark; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(["bash", "-c", lines], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["tiny"]
