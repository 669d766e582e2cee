"""How the files of a package are looked up and compared; what is compared, `consistency` and its neighbours say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from dspark.package.contents import Content
from dspark.package.manifest import FileEntry, Manifest

Kind = TypeVar("Kind")


def compare(where: str, pairs: Mapping[str, tuple[object, object]]) -> None:
    """Refuse the first of some values that is not what it should be.

    Args:
        where: the file that is spoken of.
        pairs: found and expected, by key.
    Raises:
        ValueError: naming both.
    """
    for key, (found, expected) in pairs.items():
        if found != expected:
            raise ValueError(f"{where} {key}: {found!r}, expected {expected!r}".strip())


def entry_of(manifest: Manifest, path: str) -> FileEntry:
    """The manifest's line of a file that is there."""
    return next(entry for entry in manifest.files if entry.path == path)


def foreign(contents: Mapping[str, Content], path: str) -> dict[str, Any] | None:
    """A JSON file of an engine, if the package has it."""
    return typed(contents, path, dict) if path in contents else None


def typed(contents: Mapping[str, Content], path: str, kind: type[Kind]) -> Kind:
    """What a file holds.

    Raises:
        ValueError: it is missing, or of another kind.
    """
    content = contents.get(path)
    if not isinstance(content, kind):
        raise ValueError(f"{path} is missing or not what stands in its place")
    return content
