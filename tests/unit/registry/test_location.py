"""Where a registry believes its files to lie, read from its database without mlflow."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from dspark.errors import IntegrityError
from dspark.registry.location import left_behind
from dspark.workspace import doctor
from dspark.workspace.layout import Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "wörk space" / "mlflow").mkdir(parents=True)
    return tmp_path / "wörk space"


def remember(workspace: Path, *places: tuple[str, str]) -> Path:
    database = workspace / "mlflow" / "mlflow.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE experiments (name TEXT, artifact_location TEXT)")
        connection.executemany("INSERT INTO experiments VALUES (?, ?)", places)
        connection.commit()
    return database


def test_only_folders_that_are_gone_and_hold_our_packages_are_told(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "still there").mkdir()
    here, gone = workspace / "mlflow" / "artifacts", tmp_path / "früher hier" / "mlflow" / "artifacts"
    remember(
        workspace,
        ("dspark", gone.as_uri()),
        ("dspark-0a1b2c3d", here.as_uri()),
        ("dspark-11111111", (tmp_path / "still there").as_uri()),
        ("dspark-22222222", "mlflow-artifacts:/2"),
        ("Default", (tmp_path / "nobody's").as_uri()),
    )
    assert left_behind(workspace) == [gone]
    (check,) = doctor._moved(Workspace(workspace))
    assert (check.name, check.status) == ("registry", "warning")
    assert str(gone) in check.found and str(here) in check.found
    assert check.fix.endswith(f"&& ln -s '{here}' '{gone}'")


def test_no_registry_is_nothing_to_tell(workspace: Path) -> None:
    assert left_behind(workspace) == []
    assert list((workspace / "mlflow").iterdir()) == []


def test_a_database_of_another_version_is_not_judged_and_a_damaged_one_is(workspace: Path) -> None:
    database = remember(workspace, ("dspark", (workspace / "mlflow" / "artifacts").as_uri()))
    good = database.read_bytes()
    for damaged in (b"no database" * 100, good[:100] + bytes(len(good) - 100)):
        database.write_bytes(damaged)
        with pytest.raises(IntegrityError, match=r"mlflow\.db: the registry's database is damaged"):
            left_behind(workspace)
        (check,) = doctor._moved(Workspace(workspace))
        assert check.status == "error" and "restore it from a backup" in check.fix
    database.unlink()
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE experiments (title TEXT)")
        connection.commit()
    assert left_behind(workspace) == []
