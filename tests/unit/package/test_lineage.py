"""Lineage says what is known and why the rest is not; looking changes nothing."""

from __future__ import annotations

import hashlib
import subprocess

import pytest
from pydantic import ValidationError

from dspark.package import lineage
from dspark.package.lineage import Lineage, gather_lineage


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_clean_commit_then_a_dirty_tree(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "dvc.lock").write_text("schema: '2.0'\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    found = gather_lineage(tmp_path)
    assert (found.git_commit, found.git_dirty) == (git(tmp_path, "rev-parse", "HEAD"), False)
    assert found.dvc_lock_sha256 == hashlib.sha256(b"schema: '2.0'\n").hexdigest()
    (tmp_path / "new.yaml").write_text("a: 1\n")
    assert gather_lineage(tmp_path).git_dirty is True  # an untracked file can change a result too


def test_no_commit_and_no_lock_are_said_with_their_reason(tmp_path):
    git(tmp_path, "init", "-q")
    found = gather_lineage(tmp_path)
    assert found.git_commit is None and "commit" in found.git_absent
    assert found.dvc_lock_sha256 is None and "dvc.lock" in found.dvc_lock_absent


@pytest.mark.parametrize(
    ("error", "reason"),
    [(FileNotFoundError(), "not installed"), (subprocess.TimeoutExpired("git", 1), "did not answer")],
)
def test_a_missing_or_stuck_git_is_said(tmp_path, monkeypatch, error, reason):
    def run(*_, **__):
        raise error

    monkeypatch.setattr(lineage.subprocess, "run", run)
    assert reason in gather_lineage(tmp_path).git_absent


def test_absence_without_a_reason_is_refused():
    good = {
        "schema": "dspark/lineage/1",
        "dspark_version": "1",
        "python_version": "3.11",
        "platform": "Linux",
        "versions": {},
        "git_commit": "abc",
        "git_dirty": False,
        "dvc_lock_absent": "none",
    }
    Lineage.model_validate(good)
    for change in (
        {"git_commit": None},
        {"git_dirty": None},
        {"git_commit": None, "git_dirty": None},
        {"git_absent": "both"},
        {"dvc_lock_absent": None},
        {"dvc_lock_sha256": "0" * 64},
    ):
        with pytest.raises(ValidationError):
            Lineage.model_validate(good | change)


def test_versions_are_of_installed_libraries_only(tmp_path, monkeypatch):
    monkeypatch.setattr(lineage, "_LIBRARIES", ("numpy", "surely-not-installed"))
    assert set(gather_lineage(tmp_path).versions) == {"numpy"}
