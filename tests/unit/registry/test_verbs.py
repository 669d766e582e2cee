"""`dspark promote`, `rollback` and `registry` as a user meets them, with the checkout's own gates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dspark.cli.boundary import run_command
from dspark.workspace.promote import author

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.fixture
def dspark(tmp_path, published, capsys, monkeypatch):
    """Runs a verb in a workspace with three published versions; gives exit code, stdout, stderr."""
    for name in ("DSPARK_TRACKING_URI", "MLFLOW_TRACKING_URI", "GITHUB_ACTIONS", "GITLAB_CI"):
        monkeypatch.delenv(name, raising=False)
    for name in ("pipeline", "stages", "serving_profiles"):
        shutil.copytree(CHECKOUT / name, tmp_path / name)
    for name in ("dvc.yaml", "params.yaml"):
        shutil.copyfile(CHECKOUT / name, tmp_path / name)
    profile = "engine: reference\naccess: local\nthreads: 1\n"
    (tmp_path / "serving_profiles" / "cpu-reference.yaml").write_text(profile)
    build = "target: tiny\nserving_profiles: [cpu-reference]\n"
    (tmp_path / "pipeline" / "builds" / "demo.yaml").write_text(build)
    (tmp_path / "mlflow").mkdir()
    shutil.copyfile(published / "mlflow" / "mlflow.db", tmp_path / "mlflow" / "mlflow.db")

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run_command(["--workspace", str(tmp_path), *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_from_the_first_look_to_a_rollback(dspark, tmp_path):
    """The fake packages were certified long ago and measured against nobody, so the real gates are shut."""
    code, out, _ = dspark("registry", "list")
    assert code == 0 and out.splitlines()[1].split() == ["dspark-demo", "3", "-", "-"]

    summary = tmp_path / "summary.md"
    code, out, err = dspark("promote", "demo", "--to", "production", "--dry-run", "--summary", str(summary))
    assert code == 6 and out.startswith("gate") and "may not move to production" in out
    assert "dspark-demo version 3" in err and "gates are shut" in err and "--force --reason" in err
    assert "may not move to production" in summary.read_text()

    code, _, err = dspark("promote", "demo", "--to", "production", "--force")
    assert code == 2 and "--reason" in err
    forced = ("--to", "production", "--force", "--reason", "we watch it closely")
    code, out, _ = dspark("promote", "dspark-demo", "--version", "2", *forced)
    assert code == 0 and "dspark-demo version 2 holds production now, in place of nobody, against the gates" in out
    code, out, _ = dspark("promote", "demo", *forced, "--json")
    done = json.loads(out)
    assert code == 0 and done["outcome"] == "done" and done["replaces"] == 2 and done["link"]["forced"] is True
    assert done["gates"]["champion"] and done["gates"]["passed"] is False

    code, out, _ = dspark("registry", "history", "demo")
    rows = [line.split() for line in out.splitlines()]
    assert code == 0 and [row[0] for row in rows] == ["promotion", "1", "2"]
    assert out.count("forced promotion") == 2 and out.count("we watch it closely") == 2
    code, out, _ = dspark("registry", "history", "demo", "--version", "2")
    assert "source version" in out and "may not move to production" in out

    code, _, err = dspark("rollback", "demo")
    assert code == 2 and "--reason" in err
    code, out, _ = dspark("rollback", "demo", "--reason", "slower under load")
    assert code == 0 and "dspark-demo version 2 holds production now, in place of version 3" in out
    code, out, _ = dspark("registry", "history", "demo", "--json")
    told = json.loads(out)
    assert [link["kind"] for link in told["history"]] == ["promotion", "promotion", "rollback"]
    assert told["history"][2]["restores"] == 1 and told["void"] == []
    assert "@" in told["history"][2]["by"] and told["history"][2]["git_commit"].startswith("unknown: ")

    code, out, _ = dspark("registry", "list", "--json")
    (model,) = json.loads(out)["models"]
    assert (model["candidate"], model["stages"]["production"]["source_version"]) == (3, 2)
    code, out, _ = dspark("registry", "show", "demo")
    assert [line.split()[0] for line in out.splitlines()] == ["version", "3", "2", "1"]
    assert [line.split()[-1] for line in out.splitlines()[1:3]] == ["candidate", "production"]
    code, out, _ = dspark("registry", "show", "demo", "--version", "2")
    assert "package_digest" in out and "production" in out


def test_what_differs_between_two_versions(dspark):
    """They differ in their cost tables, hence in digests, and in nothing that was measured."""
    code, out, _ = dspark("registry", "diff", "demo", "1", "candidate")
    lines = out.splitlines()
    assert code == 0 and lines[0].split() == ["setting", "version", "1", "version", "3"]
    assert any(line.startswith("dspark.package_digest") for line in lines)
    tau = next(line for line in lines if line.startswith("evaluate.temperatures.0.domains.math.tau"))
    assert tau.split()[1:] == ["2", "[1.9,", "2.1]", "2", "[1.9,", "2.1]", "+0.00%"]
    code, out, _ = dspark("registry", "diff", "demo", "1", "1")
    assert "nothing differs" in out
    code, _, err = dspark("registry", "diff", "demo")
    assert code == 2 and "no version holds production" in err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("promote", "demmo", "--to", "staging"), 2, "did you mean 'demo'?"),
        (("registry", "show", "dspark-dem"), 2, "did you mean 'demo'?"),
        (("registry", "shwo", "demo"), 2, "did you mean 'show'?"),
        (("registry", "show", "demo", "--version", "7"), 2, "no version 7"),
        (("registry", "history", "demo", "--version", "7"), 2, "no promotion 7"),
        (("promote", "demo", "--to", "production", "--profile", "cpu-refrence"), 2, "did you mean 'cpu-reference'?"),
        (("registry", "list", "--tracking-uri", "sqlite:////nowhere/mlflow.db"), 3, "there is no registry yet"),
        (("registry", "list", "--tracking-uri", "mlflow.db"), 2, "--tracking-uri"),
        (("promote", "demo", "--to", "production", "--summary", "/nowhere/summary.md"), 2, "--summary"),
    ],
)
def test_mistakes_are_said_with_the_next_step(dspark, arguments, code, said):
    found, _, err = dspark(*arguments)
    assert found == code and said in err


def test_who_promotes_is_a_person_here_and_a_job_in_ci(tmp_path):
    assert "@" in author(tmp_path, {}).by and author(tmp_path, {}).git_commit.startswith("unknown: ")
    github = {
        "GITHUB_ACTIONS": "true",
        "GITHUB_ACTOR": "ada",
        "GITHUB_SERVER_URL": "https://github.com",
        "GITHUB_REPOSITORY": "loom/drafters",
        "GITHUB_RUN_ID": "7",
    }
    assert author(tmp_path, github).by == "ada, https://github.com/loom/drafters/actions/runs/7"
    gitlab = {"GITLAB_CI": "true", "GITLAB_USER_LOGIN": "ada", "CI_JOB_URL": "https://gitlab.com/loom/-/jobs/7"}
    assert author(tmp_path, gitlab).by == "ada, https://gitlab.com/loom/-/jobs/7"
