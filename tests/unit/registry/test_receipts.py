"""A receipt makes publishing again a matter of one small file, and never claims more than is still there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dspark.package.manifest import Digests
from dspark.registry.receipts import Receipt, default_uri, known_receipt, receipt_path, sqlite_file, write_receipt


def digests(package: str, evidence: str = "b") -> Digests:
    return Digests(
        model_digest="0" * 64, package_digest=package * 64, evidence_digest=evidence * 64, self_digest="1" * 64
    )


MINE = digests("a")


@pytest.fixture
def receipt(tmp_path) -> Receipt:
    database = tmp_path / "mlflow" / "mlflow.db"
    database.parent.mkdir()
    database.touch()
    return Receipt(
        build="demo",
        package_digest=MINE.package_digest,
        evidence_digest=MINE.evidence_digest,
        tracking_uri=default_uri(tmp_path),
        run_id="r",
        model_name="dspark-demo",
        version="1",
    )


def test_the_registry_of_a_workspace_has_an_absolute_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert default_uri(tmp_path / "ws") == f"sqlite:////{str(tmp_path)[1:]}/ws/mlflow/mlflow.db"
    assert sqlite_file(default_uri(tmp_path)) == tmp_path / "mlflow" / "mlflow.db"
    assert sqlite_file("http://localhost:5000") is None


def test_a_receipt_is_known_for_exactly_what_it_says(tmp_path, receipt):
    folder = tmp_path / "receipts"
    uri = receipt.tracking_uri
    assert known_receipt(folder, "demo", MINE, uri) is None
    write_receipt(folder, receipt)
    assert known_receipt(folder, "demo", MINE, uri) == receipt
    assert known_receipt(folder, "demo", digests("c"), uri) is None
    assert known_receipt(folder, "demo", digests("a", "c"), uri) is None  # measured again
    assert known_receipt(folder, "other", MINE, uri) is None
    assert known_receipt(folder, "demo", MINE, "http://localhost:5000") is None


def test_a_receipt_without_its_database_or_that_is_damaged_shows_nothing(tmp_path, receipt):
    write_receipt(tmp_path, receipt)
    sqlite_file(receipt.tracking_uri).unlink()
    assert known_receipt(tmp_path, "demo", MINE, receipt.tracking_uri) is None
    remote = receipt.model_copy(update={"tracking_uri": "http://localhost:5000"})
    write_receipt(tmp_path, remote)
    assert known_receipt(tmp_path, "demo", MINE, "http://localhost:5000") == remote
    receipt_path(tmp_path, "demo").write_text("{")
    assert known_receipt(tmp_path, "demo", MINE, "http://localhost:5000") is None


def test_looking_at_receipts_or_publishing_code_loads_no_mlflow():
    code = (
        "import sys, dspark.registry, dspark.registry.receipts, dspark.registry.publish;"
        "sys.exit(any(name in sys.modules for name in ('mlflow', 'torch', 'transformers', 'dvc')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
