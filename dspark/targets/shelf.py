"""The store of targets: `.dspark/store/targets/<digest>/`, each with a listing of its files.

Converted and made-up models lie there as files; a local folder or a hub download is linked, never copied. Beside
them, `origins/` remembers which source gave which digest, so that nothing is fetched, converted or read twice.
Sizes and modification times tell whether a file was touched since its digest was taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from dspark.config.models import Digest, DType
from dspark.errors import DataError
from dspark.io.atomic import replace_tree
from dspark.io.digest import digest_file, digest_json, digest_listing
from dspark.io.jsonfile import read_model, write_model
from dspark.targets.layout import target_files
from dspark.targets.record import STORE

LISTING = "dspark.json"
ORIGINS = "origins"

Model = TypeVar("Model", bound=BaseModel)


class StoredFile(BaseModel):
    """A file of a stored target."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: Digest
    bytes: int
    mtime_ns: int


class Listing(BaseModel):
    """`<digest>/dspark.json`: what the folder holds."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    schema_: Literal["dspark/target-store/1"] = Field(default="dspark/target-store/1", alias="schema")
    dtype: DType
    files: dict[str, StoredFile]

    @property
    def digest(self) -> str:
        """What names the folder: every file and the dtype it is loaded in."""
        return digest_json([{name: file.sha256 for name, file in self.files.items()}, self.dtype])

    @property
    def weights_digest(self) -> str:
        """Digest of the safetensors files."""
        return self.digest_of([name for name in self.files if name.endswith(".safetensors")])

    def digest_of(self, names: Sequence[str]) -> str:
        """Digest of those of the named files that are there."""
        return digest_listing({name: self.files[name].sha256 for name in names if name in self.files})


class Origin(BaseModel):
    """`origins/<key>.json`: what a source gave. Local: it never leaves the machine."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    schema_: Literal["dspark/target-origin/1"] = Field(default="dspark/target-origin/1", alias="schema")
    digest: Digest
    revision: str
    quantisation: str | None = None


def find(root: Path, key: str, original: Path | None = None) -> tuple[Origin, Listing] | None:
    """What the source with this key gave, if it is still on the shelf and, for a linked source, unchanged.

    Args:
        original: the folder that is linked to, if it is.
    """
    origin = _read(root / STORE / ORIGINS / f"{key}.json", Origin)
    if origin is None:
        return None
    place = root / STORE / origin.digest
    listing = _read(place / LISTING, Listing)
    if listing is None or not _as_listed(place, listing):
        return None
    if original is not None and not (target_files(original) == sorted(listing.files) and _as_listed(original, listing)):
        return None
    return origin, listing


def reread(root: Path, key: str) -> None:
    """Let `find` recognise files whose modification times alone are others, as after a workspace was copied.

    They are read in full; where a digest differs nothing is changed, and `find` goes on not finding them.
    """
    origin = _read(root / STORE / ORIGINS / f"{key}.json", Origin)
    place = root / STORE / origin.digest if origin is not None else root
    listing = _read(place / LISTING, Listing) if origin is not None else None
    if listing is None:
        return
    files: dict[str, StoredFile] = {}
    for name, file in listing.files.items():
        path = place / name
        if not path.is_file() or path.stat().st_size != file.bytes or digest_file(path) != file.sha256:
            return
        files[name] = file.model_copy(update={"mtime_ns": path.stat().st_mtime_ns})
    write_model(place / LISTING, listing.model_copy(update={"files": files}))


def put(
    root: Path,
    key: str,
    folder: Path,
    work: Path,
    *,
    dtype: DType,
    revision: str | None,
    quantisation: str | None = None,
    link: bool,
    on_file: Callable[[], None] = lambda: None,
) -> tuple[Origin, Listing]:
    """Put a model folder on the shelf by one rename.

    Args:
        key: of its source.
        folder: the model; moved in unless `link`.
        work: scratch space in the workspace.
        revision: what the source resolved to; None: the digest of the weights.
        link: leave the files where they are and link to them.
        on_file: called after each file that was read; may raise to stop.
    """
    files: dict[str, StoredFile] = {}
    for name in target_files(folder):
        found = (folder / name).stat()
        digest = digest_file(folder / name)
        files[name] = StoredFile(sha256=digest, bytes=found.st_size, mtime_ns=found.st_mtime_ns)
        on_file()
    listing = Listing(dtype=dtype, files=files)
    origin = Origin(digest=listing.digest, revision=revision or listing.weights_digest, quantisation=quantisation)
    shelved = folder
    if link:
        shelved = work / "links"
        shelved.mkdir(parents=True)
        for name in files:
            (shelved / name).symlink_to((folder / name).resolve())
    write_model(shelved / LISTING, listing)
    replace_tree(shelved, root / STORE / listing.digest)
    write_model(root / STORE / ORIGINS / f"{key}.json", origin)
    return origin, listing


def _as_listed(folder: Path, listing: Listing) -> bool:
    """True if every listed file is there and was not touched."""
    for name, file in listing.files.items():
        try:
            found = (folder / name).stat()
        except OSError:
            return False
        if (found.st_size, found.st_mtime_ns) != (file.bytes, file.mtime_ns):
            return False
    return True


def _read(path: Path, model: type[Model]) -> Model | None:
    try:
        return read_model(path, model)
    except DataError:
        return None
