"""Accounts of `mlflow server --app-name basic-auth`, as docs/how-to/production.md hands them out."""

from __future__ import annotations

import secrets
import shutil

import mlflow_server
import postgres
import pytest
from test_production import options, package, push, tree, workspace

from dspark.cli.boundary import run_command
from dspark.errors import ServiceError

ADMIN = "admin"


@pytest.fixture
def server(postgresql, s3, tmp_path, monkeypatch):
    folder = tmp_path / "server"
    folder.mkdir()
    with postgres.database(postgresql, "accounts") as database:
        (folder / "accounts.ini").write_text(
            f"[mlflow]\ndefault_permission = READ\ndatabase_uri = {database}\n"
            "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
        )
        monkeypatch.setenv("MLFLOW_AUTH_CONFIG_PATH", str(folder / "accounts.ini"))
        monkeypatch.setenv("MLFLOW_FLASK_SERVER_SECRET_KEY", secrets.token_hex())
        monkeypatch.setenv("MLFLOW_AUTH_ADMIN_USERNAME", ADMIN)
        monkeypatch.setenv("MLFLOW_AUTH_ADMIN_PASSWORD", "an administrator's password")
        with mlflow_server.mlflow_server(
            folder, *options(database, "proxied", "accounts"), "--app-name", "basic-auth"
        ) as url:
            yield url


def test_who_publishes_cannot_promote_and_who_serves_can_only_read(server, tmp_path, monkeypatch, capsys):
    root = workspace(tmp_path / "work")
    made = package(tmp_path / "made", "60.0")
    served = tmp_path / "served"

    def log_in(name: str) -> None:
        password = "an administrator's password" if name == ADMIN else f"the password of {name}"
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", name)
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)

    def dspark(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        code = run_command(["--workspace", str(root), *arguments, "--tracking-uri", server])
        return code, capsys.readouterr().err

    promote = ("promote", "demo", "--to", "production", "--force", "--reason", "made-up measurements")
    from mlflow import MlflowClient
    from mlflow.server import get_app_client

    log_in(ADMIN)
    accounts = get_app_client("basic-auth", tracking_uri=server)
    for name in ("publisher", "promoter", "reader", "blue"):
        accounts.create_user(name, f"the password of {name}")

    log_in("publisher")
    assert push(made, root, server).version == "1"
    log_in(ADMIN)
    accounts.grant_user_permission("promoter", "registered_model", "dspark-demo", "EDIT")

    # Another team's publisher: the experiment belongs to whose runs were the first.
    (tmp_path / "theirs").mkdir()
    blue = package(tmp_path / "blue", "63.0", "blue")
    log_in("blue")
    with pytest.raises(ServiceError):
        push(blue, tmp_path / "theirs", server, "blue")
    log_in(ADMIN)
    experiment = MlflowClient(server, server).get_experiment_by_name("dspark").experiment_id
    accounts.grant_user_permission("blue", "experiment", experiment, "EDIT")
    log_in("blue")
    assert push(blue, tmp_path / "theirs", server, "blue").version == "1"

    log_in("reader")
    with pytest.raises(ServiceError):
        push(package(tmp_path / "other", "61.0"), root, server, receipts="other")
    shutil.rmtree(root / ".dspark/spool")
    code, said = dspark(*promote)
    assert code == 8, said
    # New names are anybody's: the stage's model is made by who shall own it, before it is made by another.
    MlflowClient(server, server).create_registered_model("reader's own")
    log_in("promoter")
    code, said = dspark(*promote)
    assert code == 0, said

    log_in("publisher")
    assert push(package(tmp_path / "second", "62.0"), root, server).version == "2"
    code, said = dspark(*promote)
    assert code == 8, said
    log_in("reader")
    code, said = dspark("package", "pull", "models:/dspark-demo@production", str(served))
    assert code == 0 and tree(served) == tree(made), said
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.delenv(name)
    code, said = dspark("package", "pull", "models:/dspark-demo@production", str(tmp_path / "nobody"))
    assert code == 8 and "access is refused" in said
