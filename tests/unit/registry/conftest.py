from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # fake_server.py, race.py, trap.py
sys.path.insert(0, str(Path(__file__).parents[1] / "package"))  # fake_build.py, resealing.py

import fake_build

from dspark.package.assemble import assemble
from dspark.registry.publish import find_published, publish


@pytest.fixture(scope="session")
def pristine(tmp_path_factory) -> Path:
    """A package made by the real `assemble`; never changed."""
    root = tmp_path_factory.mktemp("build")
    assemble(fake_build.make(root), root / "package", card=fake_build.card)
    return root / "package"


@pytest.fixture(scope="session")
def database(tmp_path_factory) -> Path:
    """An empty registry: MLflow takes seconds to make one, copying it takes none."""
    workspace = tmp_path_factory.mktemp("empty workspace")
    assert find_published("demo", "0" * 64, workspace=workspace) is None
    return workspace / "mlflow" / "mlflow.db"


@pytest.fixture(scope="session")
def compared(tmp_path_factory) -> Path:
    """A package that was measured against a champion and a pinned baseline; never changed."""
    root = tmp_path_factory.mktemp("compared")
    assemble(fake_build.make(root, rivals=True), root / "package", card=fake_build.card)
    return root / "package"


@pytest.fixture(scope="session")
def published(tmp_path_factory, pristine, database) -> Path:
    """A workspace with three versions of build `demo` in its registry; copied by those who change it."""
    workspace = tmp_path_factory.mktemp("published")
    (workspace / "mlflow").mkdir()
    shutil.copyfile(database, workspace / "mlflow" / "mlflow.db")
    for steps in (60, 61, 62):
        root = workspace / f"steps {steps}"
        sources = fake_build.make(root)
        cost = sources.costs[fake_build.CPU]
        cost.write_text(cost.read_text().replace("60.0", f"{steps}.0"))
        assemble(sources, root / "package", card=fake_build.card)
        publish(root / "package", workspace=workspace, build="demo", receipts=workspace / "receipts")
    return workspace
