"""Outputs travel by a DVC remote in S3 and `dvc.lock` in git: nothing is made again elsewhere, or published twice."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow_server
import postgres
import pytest
from sandbox import CHECKOUT, Finished, Sandbox, make_sandbox

from dspark.registry.connection import connected

PATIENCE = 1200.0
DVC = [sys.executable, "-m", "dvc"]


def call(sandbox: Sandbox, *command: str) -> None:
    done = subprocess.run(command, cwd=sandbox.root, env=sandbox.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def git(sandbox: Sandbox, *arguments: str) -> None:
    call(sandbox, "git", "-c", "user.name=test", "-c", "user.email=test@example.org", *arguments)


def commit(sandbox: Sandbox, message: str) -> None:
    git(sandbox, "add", "--all")
    git(sandbox, "commit", "--quiet", "--message", message)


def cloned(sandbox: Sandbox, folder: Path) -> Sandbox:
    git(sandbox, "clone", "--quiet", str(sandbox.root), str(folder))
    return Sandbox(folder)


@pytest.fixture(scope="module")
def registry(postgresql, s3, tmp_path_factory):
    place = ("--artifacts-destination", "s3://models/registry-of-runs")
    with (
        postgres.database(postgresql, "runs") as database,
        mlflow_server.mlflow_server(tmp_path_factory.mktemp("runs"), "--backend-store-uri", database, *place) as url,
    ):
        yield url


@pytest.fixture(scope="module")
def shared(registry: str, s3: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Sandbox, Finished]:
    """A workspace under git in which the tiny build was made, registered, pushed and committed; and how it ended."""
    made = make_sandbox(tmp_path_factory.mktemp("shared") / "work space")
    shutil.copyfile(CHECKOUT / ".gitignore", made.root / ".gitignore")
    shutil.copyfile(CHECKOUT / ".dvc/.gitignore", made.root / ".dvc/.gitignore")
    git(made, "init", "--quiet")
    call(made, *DVC, "remote", "add", "--default", "storage", "s3://models/dvc")
    call(made, *DVC, "remote", "modify", "storage", "endpointurl", s3.meta.endpoint_url)
    commit(made, "Name the remote")
    # Features are shared, as docs/how-to/production.md does it.
    disk = tmp_path_factory.mktemp("disk") / "features"
    done = made.dspark(
        *("run", "--target", "tiny", "--json", "--tracking-uri", registry),
        timeout=PATIENCE,
        DSPARK_FEATURE_STORE=str(disk),
    )
    assert done.code == 0, done.err
    assert list(disk.glob("*.safetensors")) and list((disk / "users").glob("*.json"))
    assert not (made.root / ".dspark/store/features").exists()
    pushed = made.dspark("remote", "push", "--target", "tiny", "--json", timeout=PATIENCE)
    assert pushed.code == 0, pushed.err
    assert len(pushed.json["stages"]) == 10 and pushed.json["files"] > 10 and pushed.json["unmade"] == []
    git(made, "add", "--force", "dvc.lock")
    commit(made, "Make the tiny build")
    return made, done


def test_nothing_is_made_again_in_a_fresh_clone_and_nothing_published_twice(
    shared: tuple[Sandbox, Finished], registry: str, tmp_path: Path
) -> None:
    made, done = shared
    assert made.dspark("remote", "push", "--target", "tiny", "--json", timeout=PATIENCE).json["files"] == 0
    clone = cloned(made, tmp_path / "elsewhere")
    pulled = clone.dspark("remote", "pull", "--target", "tiny", "--json", timeout=PATIENCE)
    assert pulled.code == 0, pulled.err
    assert len(pulled.json["stages"]) == 10 and pulled.json["files"] > 10

    again = clone.dspark("run", "--target", "tiny", "--json", "--tracking-uri", registry, timeout=PATIENCE)
    assert again.code == 0, again.err
    stages = {stage["name"]: stage["status"] for stage in again.json["stages"]}
    assert list(stages.values()) == ["up to date"] * 10
    result = again.json["result"]
    assert result["package_digest"] == done.json["result"]["package_digest"]
    assert (result["model_name"], result["version"]) == ("dspark-tiny", "1")
    with connected(registry, workspace=tmp_path) as opened:
        assert [one.version for one in opened.client.search_model_versions("name = 'dspark-tiny'")] == ["1"]
    assert not list((clone.root / ".dspark/store/features").glob("*"))  # nothing that reads them was to be made
    assert clone.dspark("package", "verify", "builds/tiny/package").code == 0
    # What the clone was told it knows: the next run loads no mlflow.
    third = clone.dspark("run", "--target", "tiny", "--json", "--tracking-uri", registry, timeout=PATIENCE)
    assert third.json["result"] == result and "publish" not in third.err


def test_what_the_remote_cannot_give_is_said(shared: tuple[Sandbox, Finished], s3: Any, tmp_path: Path) -> None:
    made, _ = shared
    clone = cloned(made, tmp_path / "elsewhere")

    def pull(**variables: str) -> Finished:
        return clone.dspark("remote", "pull", "--target", "tiny", timeout=PATIENCE, **variables)

    config = clone.root / ".dvc/config"
    text = config.read_text()
    config.write_text(text.replace(s3.meta.endpoint_url, f"http://127.0.0.1:{mlflow_server.free_port()}"))
    away = pull(AWS_MAX_ATTEMPTS="1")
    assert away.code == 8 and "the same command goes on" in away.err, away.err
    config.write_text(text.replace("models/dvc", "nowhere/dvc"))
    assert pull().code in (3, 8)  # DVC takes a bucket that is not there for an empty one, most of the time
    config.write_text(text.replace("remote = storage", ""))
    nowhere = pull()
    assert nowhere.code == 3 and "dvc remote add --default" in nowhere.err, nowhere.err

    config.write_text(text)
    keys = [item["Key"] for item in s3.list_objects_v2(Bucket="models", Prefix="dvc/")["Contents"]]
    key = max(keys, key=lambda name: s3.head_object(Bucket="models", Key=name)["ContentLength"])
    kept = s3.get_object(Bucket="models", Key=key)["Body"].read()
    s3.delete_object(Bucket="models", Key=key)
    lacking = pull()
    assert lacking.code == 3 and "dspark remote push --build tiny" in lacking.err, lacking.err
    s3.put_object(Bucket="models", Key=key, Body=kept)
    assert pull().code == 0
    digest = json.loads((made.root / ".dspark/receipts/tiny.json").read_text())["package_digest"]
    assert clone.dspark("package", "verify", "builds/tiny/package", "--digest", digest).code == 0

    # What nobody recorded is not lost to a pull.
    mine = clone.root / "builds/tiny/train/notes.txt"
    mine.write_text("mine")
    kept_back = pull()
    assert kept_back.code == 3 and mine.read_text() == "mine", kept_back.err
