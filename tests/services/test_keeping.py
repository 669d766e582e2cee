"""What docs/how-to/production.md says of retention, backup and upgrade, with its own script and commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import mlflow_server
import postgres
import pytest
from test_production import options, package, push, tree, workspace

from dspark.cli.boundary import run_command
from dspark.errors import SettingsError
from dspark.registry.pull import pull

DOCS = Path(__file__).resolve().parents[2] / "docs/how-to/production.md"
PREFIX = "keeping"


def call(*command: str, **variables: str) -> str:
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def kept(s3) -> int:
    """Packages in the bucket."""
    found = s3.list_objects_v2(Bucket="models", Prefix=PREFIX, MaxKeys=1000)
    assert not found["IsTruncated"]
    return sum(one["Key"].endswith("/drafter/model.safetensors") for one in found["Contents"])


def test_old_packages_go_and_a_backup_is_the_registry(postgresql, s3, tmp_path, capsys):
    root, script = workspace(tmp_path / "work"), tmp_path / "retain.py"
    (code,) = re.findall(r"^# retain\.py.*?(?=^```)", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    script.write_text(code)
    made = [package(tmp_path / f"package {steps}", f"{steps}.0") for steps in (60, 61, 62, 63)]
    (tmp_path / "server").mkdir()
    with postgres.database(postgresql, "keeping") as database:
        with mlflow_server.mlflow_server(tmp_path / "server", *options(database, "proxied", PREFIX)) as url:
            for number, one in enumerate(made, start=1):
                assert push(one, root, url).version == str(number)
                if number == 1:
                    held = ("promote", "demo", "--to", "production", "--force", "--reason", "first")
                    assert run_command(["--workspace", str(root), *held, "--tracking-uri", url]) == 0
            assert kept(s3) == 4
            assert push(made[1], root, url, receipts="again").version == "2"  # the candidate again
            # Version 1 holds production, 2 is the candidate, 4 the newest.
            told = call(sys.executable, str(script), url, "dspark-demo", "1")
            assert re.findall(r"version (\d)", told) == ["3"]
            place = ("--backend-store-uri", database, "--artifacts-destination", f"s3://models/{PREFIX}")
            for options_of_gc, left in ((("--older-than", "30d"), 4), ((), 3)):
                call(sys.executable, "-m", "mlflow", "gc", *options_of_gc, *place, MLFLOW_TRACKING_URI=url)
                assert kept(s3) == left
            with pytest.raises(SettingsError, match="not in the registry"):
                pull("models:/dspark-demo/3", tmp_path / "gone", tracking_uri=url)
        dump = tmp_path / "mlflow.dump"
        programs = postgres.programs()
        plain = database.replace("+psycopg2", "")
        call(str(programs / "pg_dump"), "--format", "custom", "--file", str(dump), plain)
    with postgres.database(postgresql, "restored") as restored:
        call(str(programs / "pg_restore"), "--no-owner", "--dbname", restored.replace("+psycopg2", ""), str(dump))
        call(sys.executable, "-m", "mlflow", "db", "upgrade", restored)
        with mlflow_server.mlflow_server(tmp_path / "server", *options(restored, "proxied", PREFIX)) as url:
            pull("models:/dspark-demo@production", tmp_path / "production", tracking_uri=url)
            pull("models:/dspark-demo@candidate", tmp_path / "candidate", tracking_uri=url)
            assert tree(tmp_path / "production") == tree(made[0]) and tree(tmp_path / "candidate") == tree(made[1])
