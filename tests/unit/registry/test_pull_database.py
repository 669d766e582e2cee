"""Pulling from a registry that is a database, and what it takes; servers and S3 are in tests/services."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dspark.errors import PreflightError, ServiceError, SettingsError
from dspark.registry import artifacts, lookup
from dspark.registry.publish import publish
from dspark.registry.pull import pull
from dspark.registry.receipts import default_uri

ADDRESS = "models:/dspark-demo@candidate"


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_from_a_workspaces_own_registry_also_after_it_was_moved(pristine, database, tmp_path):
    """MLflow keeps absolute addresses of artifacts; they lie beside the database wherever that is."""
    workspace = tmp_path / "work space ü"
    (workspace / "mlflow").mkdir(parents=True)
    shutil.copyfile(database, workspace / "mlflow" / "mlflow.db")
    publish(pristine, workspace=workspace, build="demo", receipts=workspace / "receipts")
    pull(ADDRESS, tmp_path / "p", tracking_uri=default_uri(workspace))
    assert tree(tmp_path / "p") == tree(pristine)
    moved = workspace.rename(tmp_path / "moved")
    pull("models:/dspark-demo/1", tmp_path / "q", tracking_uri=default_uri(moved))
    assert tree(tmp_path / "q") == tree(pristine)
    for absent in ("models:/dspark-demo@production", "models:/dspark-demo/2", "models:/dspark-other@candidate"):
        with pytest.raises(SettingsError, match="not in the registry"):
            pull(absent, tmp_path / "r", tracking_uri=default_uri(moved))


def test_a_database_is_never_made_by_asking_it(tmp_path):
    with pytest.raises(ServiceError, match="no such registry"):
        pull(ADDRESS, tmp_path / "p", tracking_uri=f"sqlite:///{tmp_path / 'none' / 'mlflow.db'}")
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_installed_is_named_with_what_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(lookup, "find_spec", lambda name: None)
    monkeypatch.setattr(artifacts, "find_spec", lambda name: None)
    with pytest.raises(PreflightError) as caught:
        pull(ADDRESS, tmp_path / "p", tracking_uri="postgresql://me:secret@host/mlflow")
    assert "dspark[pipeline]" in caught.value.hint and "secret" not in caught.value.message
    with pytest.raises(PreflightError) as caught:
        artifacts.artifacts_at("s3://bucket/x", "http://127.0.0.1:9")
    assert "dspark[s3]" in caught.value.hint
