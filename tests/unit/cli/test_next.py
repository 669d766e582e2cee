"""The command that comes next is about the very build that was asked for: it has the same `--set`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dspark.cli.boundary import run_command
from dspark.workspace import plan, remote
from dspark.workspace.plan import Plan, Step
from dspark.workspace.remote import Transfer

CHECKOUT = Path(__file__).resolve().parents[3]
FLAGS = ["--set", "training.steps=5", "--set", "drafter.gamma=2"]
SAME = "--set training.steps=5 --set drafter.gamma=2"


@pytest.fixture(autouse=True)
def _inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CHECKOUT)


def printed(patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], module: Any, name: str, found: Any) -> str:
    """What a verb prints of something that was found; its words are the module's and `found`'s."""
    patch.setattr(module, name, lambda *arguments: found)
    words = ["plan"] if isinstance(found, Plan) else ["remote", found.direction]
    assert run_command([*words, "--target", "tiny", *FLAGS]) == 0
    return capsys.readouterr().out


def test_a_plan_ends_in_the_run_that_was_planned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    found = Plan("tiny", "tiny", (), (Step("train@tiny", "will run"),), 10**9)
    lines = printed(monkeypatch, capsys, plan, "plan", found).splitlines()
    assert lines[-2] == f"what the others may take: dspark plan --build tiny {SAME} --estimate"
    assert lines[-1] == f"next  dspark run --build tiny {SAME}"


@pytest.mark.parametrize("direction, following", [("pull", "run"), ("push", "remote pull")])
def test_what_was_shared_is_gone_on_with_under_the_same_settings(
    direction: str, following: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    found = Transfer("tiny", direction, 1, ("train@tiny",), ())
    lines = printed(monkeypatch, capsys, remote, "transfer", found).splitlines()
    assert lines[-1].endswith(f" dspark {following} --build tiny {SAME}")
