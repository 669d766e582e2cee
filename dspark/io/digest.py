"""SHA-256 digests, always lower-case hex."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dspark.io.jsonfile import canonical_json


def digest_bytes(data: bytes) -> str:
    """sha256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def digest_json(value: Any) -> str:
    """sha256 of the canonical JSON of `value` (sorted keys, no spaces): equal values, equal digests."""
    return digest_bytes(canonical_json(value).encode("utf-8"))


def digest_file(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def digest_listing(entries: Mapping[str, str]) -> str:
    """sha256 over sorted `path sha256` lines: the digest of a set of files (package.md, "Digests")."""
    lines = "".join(f"{path} {digest}\n" for path, digest in sorted(entries.items()))
    return digest_bytes(lines.encode("utf-8"))


def digest_tree(root: Path, skip: Iterable[str] = ()) -> str:
    """sha256 of everything below a folder, or of a single file, by relative path and content."""
    if root.is_file():
        return digest_file(root)
    skipped = set(skip)
    entries = {
        path.relative_to(root).as_posix(): digest_file(path)
        for path in root.rglob("*")
        if path.is_file() and path.relative_to(root).as_posix() not in skipped
    }
    return digest_listing(entries)
