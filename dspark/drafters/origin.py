"""Where an imported drafter came from: the listing beside its files in `.dspark/store/drafters/<digest>/`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dspark.config.models import Digest
from dspark.errors import IntegrityError
from dspark.io.digest import digest_listing
from dspark.io.jsonfile import read_model

LISTING = "dspark.json"


class StoredFile(BaseModel):
    """A file of an imported drafter."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: Digest
    bytes: int = Field(ge=0)


class DrafterOrigin(BaseModel):
    """`dspark.json`: whose drafter this is, and the files that are it, byte for byte as released."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    schema_: Literal["dspark/imported-drafter/1"] = Field(default="dspark/imported-drafter/1", alias="schema")
    layout: Literal["dspark", "deepspec", "specforge", "speculators"]
    source: dict[str, Any]  # `kind`, and of a hub repository `repo` and its commit; a folder's path stays here
    files: dict[str, StoredFile] = Field(min_length=1)

    @property
    def digest(self) -> str:
        """What names the drafter: its files, wherever they came from."""
        return digest_listing({name: file.sha256 for name, file in self.files.items()})

    def __str__(self) -> str:
        if self.source.get("kind") == "hub":
            return f"{self.source['repo']} at {self.source['revision']}"
        return "a local folder"


def read_origin(folder: Path) -> DrafterOrigin:
    """The listing of an imported drafter.

    Raises:
        IntegrityError: there is none, or not one of this version.
    """
    return read_model(folder / LISTING, DrafterOrigin, IntegrityError, "dspark import the drafter again")
