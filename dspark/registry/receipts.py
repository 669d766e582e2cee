"""What was last published from this workspace, so that publishing it again needs no tracking server and no mlflow."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from dspark.config.models import Digest, Name
from dspark.errors import DataError
from dspark.io.jsonfile import read_model, write_model
from dspark.package.manifest import Digests

_SQLITE = "sqlite:///"


class Receipt(BaseModel):
    """`dspark/receipt/1`: one package in one registry."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    schema_: Literal["dspark/receipt/1"] = Field(default="dspark/receipt/1", alias="schema")
    build: Name
    package_digest: Digest
    evidence_digest: Digest
    tracking_uri: str
    run_id: str
    model_name: str
    version: str


def default_uri(workspace: Path) -> str:
    """The registry inside a workspace: SQLite, by absolute path (a relative one would follow the current folder)."""
    return f"{_SQLITE}{workspace.resolve() / 'mlflow' / 'mlflow.db'}"


def sqlite_file(tracking_uri: str) -> Path | None:
    """The database file of a SQLite registry, or None for any other."""
    return Path(tracking_uri.removeprefix(_SQLITE)) if tracking_uri.startswith(_SQLITE) else None


def receipt_path(receipts: Path, build: str) -> Path:
    """Where the receipt of a build lies: only the last one counts, since `candidate` is what was published last."""
    return receipts / f"{build}.json"


def known_receipt(receipts: Path, build: str, digests: Digests, tracking_uri: str) -> Receipt | None:
    """The receipt that shows a package, evidence included, to be the last one published of its build, or None.

    A receipt that cannot be read, or whose database file is gone, shows nothing.
    """
    try:
        receipt = read_model(receipt_path(receipts, build), Receipt)
    except DataError:
        return None
    found = receipt.build, receipt.package_digest, receipt.evidence_digest, receipt.tracking_uri
    if found != (build, digests.package_digest, digests.evidence_digest, tracking_uri):
        return None
    database = sqlite_file(tracking_uri)
    return receipt if database is None or database.is_file() else None


def write_receipt(receipts: Path, receipt: Receipt) -> None:
    """Replace the build's receipt."""
    write_model(receipt_path(receipts, receipt.build), receipt)
