"""Is a folder exactly the package that its manifest describes? (package.md, "Digests")

Follows no link, runs and unpickles nothing, hashes and parses through one open file each. Without a digest or a key
from outside this shows integrity, not authenticity: who can change a file can also write a new manifest.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from dspark.errors import DsparkError, IntegrityError, SettingsError
from dspark.io.below import open_below
from dspark.io.jsonfile import strict_loads, validation_text
from dspark.package.layout import MANIFEST, SIGNATURE
from dspark.package.manifest import FileEntry, Manifest, manifest_bytes
from dspark.package.signature import SIGNATURE_BYTES, require_signature

# The forms of all files are imported where they are read: a run that finds nothing to do reads the manifest only.
if TYPE_CHECKING:
    from dspark.package.contents import Content

_HINT = "fetch the package again, or make it again: dspark run --target NAME"
_UNCHECKED = "it has a signature file, unchecked: verify it with --key FILE"
MAX_MANIFEST = 16 * 2**20


class VerifyReport(BaseModel):
    """What was verified, and how far that reaches."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    build: str
    model_digest: str
    package_digest: str
    evidence_digest: str
    self_digest: str
    files: int  # that are there
    bytes: int  # of those
    absent: tuple[str, ...] = ()  # that the package may be without until they are made from the target
    authenticated: Literal["nothing", "deployable files", "everything"]  # by the digest or the key that was given
    signature: Literal["none", "not checked", "valid"]

    @property
    def note(self) -> str:
        """What a reader must know about the reach of the check."""
        if self.signature == "valid":
            return "signed with the key that was given: every file is the one that was signed"
        if self.authenticated == "nothing":
            unchecked = "" if self.signature == "none" else f"; {_UNCHECKED}"
            return f"integrity only, not authenticity: compare a digest obtained elsewhere with --digest{unchecked}"
        if self.authenticated == "deployable files":
            return "package_digest matches; it does not cover the evidence, self_digest does"
        return "self_digest matches: every file is the one that was published"


def verify(folder: Path, *, digest: str | None = None, key: Path | None = None) -> VerifyReport:
    """Verify a package completely.

    Args:
        folder: the package.
        digest: a package or manifest digest obtained elsewhere (64 lower-case hex digits); compared if given.
        key: a public key; the package must be signed with its private part if given.
    Raises:
        SettingsError: `digest` is no digest, `key` no key.
        IntegrityError: a file is changed, missing, too many, linked or special, a path is not allowed, the manifest is
            not canonical, something inside does not parse or validate, the digest is another one, or the package is not
            signed with the key.
    """
    from dspark.package.consistency import check_package

    manifest = read_manifest(folder)
    authenticated = compare_digest(manifest, digest, folder)
    signed, absent = _check_tree(folder, manifest)
    if key is not None:
        require_signature(folder, key)
    contents: dict[str, Content] = {}
    present = [entry for entry in manifest.files if entry.path not in absent]
    for entry in present:
        with _explained(folder / entry.path), open_below(folder, entry.path) as handle:
            contents[entry.path] = _read_entry(handle, entry)
    with _explained(folder):
        check_package(manifest, contents)
    return VerifyReport(
        name=manifest.name,
        build=manifest.build,
        model_digest=manifest.digests.model_digest,
        package_digest=manifest.digests.package_digest,
        evidence_digest=manifest.digests.evidence_digest,
        self_digest=manifest.digests.self_digest,
        files=len(present),
        bytes=sum(entry.bytes for entry in present),
        absent=absent,
        authenticated=authenticated if key is None else "everything",
        signature="valid" if key is not None else "not checked" if signed else "none",
    )


def read_manifest(folder: Path) -> Manifest:
    """Read and validate `manifest.json` alone: its form and its own digests, not the files.

    Raises:
        IntegrityError: missing, linked, not canonical, or not a manifest.
    """
    path = folder / MANIFEST
    require_folder(folder, IntegrityError)
    if not os.path.lexists(path):
        hint = f"packages lie in builds/NAME/package; if it was one, {_HINT}"
        raise IntegrityError(f"{folder} has no {MANIFEST}: it is not a package, or not whole", hint)
    with _explained(path), open_below(folder, MANIFEST) as handle:
        data = handle.read(MAX_MANIFEST + 1)
    return parse_manifest(data, path)


def require_folder(folder: Path, error: type[DsparkError] = SettingsError) -> None:
    """Refuse a package that is no folder.

    Args:
        error: raised. What somebody typed and is not there is a slip of the keyboard, not a package that was tampered
            with.
    """
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise error(f"{folder} {what}", "give the folder of a package: builds/NAME/package, or a copy of it")


def parse_manifest(data: bytes, path: Path) -> Manifest:
    """Validate the bytes of a manifest, wherever they come from; `path` is what errors call it.

    Raises:
        IntegrityError: as `read_manifest`.
    """
    with _explained(path):
        if len(data) > MAX_MANIFEST:
            raise ValueError(f"larger than {MAX_MANIFEST} bytes")
        value = strict_loads(data.decode("utf-8"))
        schema = value.get("schema") if isinstance(value, dict) else None
        expected = Manifest.model_fields["schema_"].default
        if schema != expected:
            raise ValueError(f"schema is {schema!r}, this version of dspark reads {expected!r}")
        manifest = Manifest.model_validate(value)
        if manifest_bytes(manifest) != data:
            raise ValueError("not in canonical form")
    return manifest


def _check_tree(folder: Path, manifest: Manifest) -> tuple[bool, tuple[str, ...]]:
    """Demand exactly the files of the manifest, each once.

    Returns:
        whether there is a signature beside them, and which files are not there and need not be.
    """
    listed = {entry.path for entry in manifest.files}
    makeable = {entry.path for entry in manifest.files if entry.made_from is not None}
    with _explained(folder):
        links = dict(_walk(folder, "", _folders(listed)))
    present = links.keys() - {MANIFEST, SIGNATURE}
    if missing := sorted(listed - present - makeable):
        raise IntegrityError(f"{folder}: missing: {_some(missing)}", _HINT)
    if extra := sorted(present - listed):
        raise IntegrityError(f"{folder}: not in the manifest: {_some(extra)}", _HINT)
    if linked := sorted(path for path, names in links.items() if names != 1):
        raise IntegrityError(
            f"{folder}: has a second name on this file system (hard link): {_some(linked)}",
            "copy the package instead of linking it",
        )
    if SIGNATURE in links and (folder / SIGNATURE).lstat().st_size != SIGNATURE_BYTES:
        raise IntegrityError(f"{folder / SIGNATURE}: is no ed25519 signature, which has {SIGNATURE_BYTES} bytes", _HINT)
    return SIGNATURE in links, tuple(sorted(makeable - present))


def _walk(folder: Path, below: str, folders: frozenset[str]) -> Iterator[tuple[str, int]]:
    """Every regular file below `folder` and how many names it has.

    Raises:
        ValueError: a link, a special file, or a folder in which no listed file stands.
    """
    with os.scandir(folder / below) as entries:
        for entry in sorted(entries, key=lambda item: item.name):
            path = f"{below}/{entry.name}" if below else entry.name
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                yield path, status.st_nlink
            elif not stat.S_ISDIR(status.st_mode):
                raise ValueError(f"{path!r} is {'a link' if stat.S_ISLNK(status.st_mode) else 'a special file'}")
            elif path not in folders:
                raise ValueError(f"{path!r} is a folder in which no file of the manifest stands")
            else:
                yield from _walk(folder, path, folders)


def _folders(paths: set[str]) -> frozenset[str]:
    return frozenset(str(parent) for path in paths for parent in PurePosixPath(path).parents)


def _read_entry(handle: BufferedReader, entry: FileEntry) -> Content:
    """Check size and sha256 of an open file, then parse it."""
    from dspark.package.contents import read_content

    size = os.fstat(handle.fileno()).st_size
    if size != entry.bytes:
        raise ValueError(f"has {size} bytes, the manifest says {entry.bytes}")
    if hashlib.file_digest(handle, "sha256").hexdigest() != entry.sha256:
        raise ValueError("is not the file of the manifest (sha256 differs)")
    handle.seek(0)
    return read_content(entry.path, handle, size)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Any failure to read, parse or validate anything in a package is one of integrity (package.md)."""
    try:
        yield
    except IntegrityError:
        raise
    except ValidationError as reason:
        raise IntegrityError(f"{path}: {validation_text(reason)}", _HINT) from reason
    except Exception as reason:
        raise IntegrityError(f"{path}: {str(reason) or type(reason).__name__}", _HINT) from reason


def compare_digest(
    manifest: Manifest, digest: str | None, where: Path | str
) -> Literal["nothing", "deployable files", "everything"]:
    """What of a package a digest from outside speaks for.

    Raises:
        SettingsError: `digest` is no digest.
        IntegrityError: it is that of another package than `where` holds.
    """
    if digest is None:
        return "nothing"
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise SettingsError(
            f"{digest!r} is not a digest: 64 lower-case hexadecimal digits are expected",
            "take package_digest or self_digest from where the package was published",
        )
    if digest == manifest.digests.self_digest:
        return "everything"
    if digest == manifest.digests.package_digest:
        return "deployable files"
    raise IntegrityError(
        f"{where}: {digest} is neither its package_digest {manifest.digests.package_digest} "
        f"nor its self_digest {manifest.digests.self_digest}",
        "this is not the package that was asked for",
    )


def _some(paths: list[str]) -> str:
    return ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
