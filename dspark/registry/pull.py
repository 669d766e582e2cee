"""Fetch a registered package: its folder and nothing else of what was registered with it, verified before it appears.

The manifest comes first, and only names that stand in it are asked for; they have passed the layout's rules, so none
leaves the folder. Files gather in a hidden folder beside the place they are for, so that a second attempt goes on
where the first stopped; one rename at the end. Nothing of a package, nor of the model around it, is run or unpickled.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dspark.errors import IntegrityError, PreflightError, ServiceError
from dspark.io.atomic import atomic_path, replace_tree, write_bytes
from dspark.io.progress import Progress
from dspark.package.layout import MANIFEST, SIGNATURE
from dspark.package.manifest import FileEntry, Manifest
from dspark.package.signature import SIGNATURE_BYTES, check_signature
from dspark.package.verify import MAX_MANIFEST, compare_digest, parse_manifest, verify
from dspark.registry.artifacts import Artifacts, FolderArtifacts, Within, artifacts_at
from dspark.registry.events import waiting_name
from dspark.registry.gathering import gathering, prune, require_free, require_space
from dspark.registry.lookup import SIGNATURE_TAG, Version, find_version

_CHUNK = 2**20
_AGAIN = "give the same command again: files that are whole are kept"


def pull(
    address: str,
    folder: Path,
    *,
    tracking_uri: str,
    digest: str | None = None,
    key: Path | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Fetch the package of a registered version into `folder`, verified.

    A package that stands there already is replaced; of its files those that the new one has too are not fetched.

    Args:
        address: `models:/NAME@ALIAS` or `models:/NAME/VERSION`.
        folder: new, empty, or a package.
        tracking_uri: of the registry.
        digest: a package or self digest obtained elsewhere; compared if given.
        key: a public key; the package must be signed with its private part if given.
        progress: advanced by each file; asked for a stop between pieces of files.
    Raises:
        SettingsError: no such address, model, alias or version; a store that cannot be read.
        PreflightError: `folder` is something else than a package, space is short, or a piece of software is missing.
        IntegrityError: what was fetched is not the registered package, or not the one that was asked for.
        ServiceError: registry or store do not answer.
        Interrupted: at a safe point; what was fetched is kept.
    """
    progress = progress or Progress()
    require_free(folder)
    version = find_version(address, tracking_uri)
    artifacts, data = _located(artifacts_at(version.artifacts, tracking_uri), version)
    manifest = _registered_manifest(data, version)
    signature = _signature(artifacts, version)
    # Before gigabytes are fetched in vain; `verify` demands both again.
    compare_digest(manifest, digest, address)
    if key is not None:
        check_signature(data, signature, key, address)
    if _stands_already(folder, data, signature, digest, key):
        return manifest
    with gathering(folder) as part:
        prune(part, manifest)
        require_space(part, manifest)
        progress.start("pull", len(manifest.files), unit="files")
        here = FolderArtifacts(folder)
        for entry in manifest.files:
            # What is made from the target is no part of what was registered; it is kept where it was made already.
            _ensure(entry, part, here, None if entry.made_from else artifacts, progress)
            progress.advance()
        if signature is not None:
            write_bytes(part / SIGNATURE, signature)
        write_bytes(part / MANIFEST, data)
        verify(part, digest=digest, key=key)
        replace_tree(part, folder)
    return manifest


def _located(store: Artifacts, version: Version) -> tuple[Artifacts, bytes]:
    """The package's own folder among a version's artifacts, and the bytes of its manifest.

    MLflow keeps a folder under the name that it had: a package in its build is `package`, one that waited in the store
    until the server was back is named by its digests.
    """
    digests = [version.tags.get(f"dspark.{name}", "") for name in ("package_digest", "evidence_digest")]
    known = all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in digests)
    for name in ("package", *([waiting_name(*digests)] if known else [])):
        artifacts = Within(store, f"artifacts/{name}")
        data = _read(artifacts, MANIFEST, MAX_MANIFEST)
        if data is not None:
            return artifacts, data
    raise IntegrityError(f"{_named(version)} holds no package of dspark's", "dspark registry list")


def _registered_manifest(data: bytes, version: Version) -> Manifest:
    """The manifest that was fetched, if it is that of the package which the registry says was registered."""
    named = _named(version)
    manifest = parse_manifest(data, Path(f"{named}: {MANIFEST}"))
    found = manifest.digests.model_dump()
    said = {name: version.tags.get(f"dspark.{name}") for name in ("package_digest", "self_digest")}
    if said["package_digest"] is None or any(said[name] not in (None, found[name]) for name in said):
        raise IntegrityError(
            f"{named} holds package {found['package_digest']} with manifest {found['self_digest']}, "
            f"the registry says {said['package_digest'] or 'nothing'} with {said['self_digest'] or 'nothing'}",
            "one of the two was changed since: whoever runs the registry must find out which",
        )
    return manifest


def _named(version: Version) -> str:
    return f"version {version.number} of {version.name}"


def _signature(artifacts: Artifacts, version: Version) -> bytes | None:
    """`manifest.sig`: as the registry has it from a signing after publishing, else as it was published, else None."""
    encoded = version.tags.get(SIGNATURE_TAG)
    if encoded is None:
        return _read(artifacts, SIGNATURE, SIGNATURE_BYTES)
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError:
        raise IntegrityError(f"the tag {SIGNATURE_TAG} of {_named(version)} holds no signature") from None


def _stands_already(folder: Path, data: bytes, signature: bytes | None, digest: str | None, key: Path | None) -> bool:
    """True if the folder is the package already, sound and signed as the registry has it."""
    try:
        verify(folder, digest=digest, key=key)
        path = folder / SIGNATURE
        return (folder / MANIFEST).read_bytes() == data and (path.read_bytes() if path.exists() else None) == signature
    except IntegrityError:
        return False  # what is wrong with it is fetched again


def _read(artifacts: Artifacts, name: str, limit: int) -> bytes | None:
    """The bytes of a small file of the package; None: it is not there.

    Raises:
        IntegrityError: it is larger than it may be.
    """
    pieces: list[bytes] = []
    left = limit + 1
    try:
        with artifacts.open(name) as source:
            while left and (piece := source.read(min(left, _CHUNK))):
                pieces.append(piece)
                left -= len(piece)
    except FileNotFoundError:
        return None
    if not left:
        raise IntegrityError(f"{name}: larger than {limit} bytes", "this is no package of dspark's")
    return b"".join(pieces)


def _ensure(entry: FileEntry, part: Path, here: Artifacts, artifacts: Artifacts | None, progress: Progress) -> None:
    """Have one file in `part`, with the bytes that the manifest names: from there, from the old package, or fetched."""
    path = part / entry.path
    if path.is_file():
        if path.stat().st_size == entry.bytes and _digest(path, progress) == entry.sha256:
            return
        path.unlink()
    try:
        _copy(here, entry, path, progress)
    except (FileNotFoundError, IntegrityError, ServiceError):
        if artifacts is None:
            return
        try:
            _copy(artifacts, entry, path, progress)
        except FileNotFoundError:
            raise IntegrityError(f"{entry.path}: is in the manifest and not in the registry's store") from None


def _copy(source: Artifacts, entry: FileEntry, path: Path, progress: Progress) -> None:
    """Copy one file as far as the manifest says it goes, and keep it only if it is that file."""
    digest = hashlib.sha256()
    left = entry.bytes
    with _writing(path) as write, source.open(entry.path) as handle:
        while piece := handle.read(min(_CHUNK, left + 1)):
            left -= len(piece)
            if left < 0:
                break
            digest.update(piece)
            write(piece)
            progress.advance(0)
        if left > 0:
            raise IntegrityError(f"{entry.path}: {left} bytes are missing at its end", _AGAIN)
        if left < 0 or digest.hexdigest() != entry.sha256:
            raise IntegrityError(
                f"{entry.path}: the registry's store holds another file than the manifest names", _AGAIN
            )


@contextmanager
def _writing(path: Path) -> Iterator[Callable[[bytes], None]]:
    """Write a file atomically; what the disk refuses is told apart from what a store refuses."""

    def write(piece: bytes) -> None:
        try:
            handle.write(piece)
        except OSError as reason:
            raise _disk(path, reason) from None

    try:
        with atomic_path(path) as temporary, temporary.open("wb") as handle:
            yield write
    except FileNotFoundError:
        raise  # of the store
    except OSError as reason:
        raise _disk(path, reason) from None


def _disk(path: Path, reason: OSError) -> PreflightError:
    return PreflightError(f"{path}: {reason.strerror}", _AGAIN)


def _digest(path: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while piece := handle.read(_CHUNK):
            digest.update(piece)
            progress.advance(0)
    return digest.hexdigest()
