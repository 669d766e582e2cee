"""The digest of the code that a stage can reach: its script and everything of dspark that it imports, to the end.

Found by reading the source, so a checkout and an installed wheel behave alike and nothing is listed by hand. Imports
inside functions count, and so do modules named in text (`"dspark.package.lineage:Lineage"`, and everything below
`f"dspark.export.{name}"`); imports for type checkers only never run and do not.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dspark
from dspark.errors import PreflightError
from dspark.io.atomic import write_if_changed
from dspark.io.digest import digest_listing

PACKAGE = "dspark"
# A module or everything below a package (final dot), as text that is imported later.
_NAMED = re.compile(r"^dspark(\.[a-z_][a-z0-9_]*)*(\.|:\w+)?$")


class CodeIndex:
    """Digests and imports of source files, remembered between runs by size and modification time.

    Args:
        cache: file to remember them in; None: not remembered.
        source: the folder of the package `dspark` (None: the one that is imported).
    """

    def __init__(self, cache: Path | None = None, source: Path | None = None) -> None:
        self._cache = cache
        self._source = source or Path(dspark.__file__).resolve().parent
        self._known: dict[str, dict[str, Any]] = _remembered(cache)
        self._fresh: dict[str, dict[str, Any]] = {}

    def digest(self, script: Path) -> str:
        """sha256 over the paths and contents of the script's import closure.

        Raises:
            PreflightError: there is no such script.
        """
        if not script.is_file():
            raise PreflightError(f"{script} is missing: a stage of dvc.yaml runs it", "dspark init --upgrade --yes")
        entries = {f"stages/{script.name}": self._entry(script)["sha256"]}
        waiting = list(self._entry(script)["imports"])
        seen: set[str] = set()
        while waiting:
            module = waiting.pop()
            if module in seen:
                continue
            seen.add(module)
            if module.endswith("."):
                waiting += self._below(module)
                continue
            file = self._file(module)
            if file is None:
                continue
            entry = self._entry(file, module)
            entries[file.relative_to(self._source.parent).as_posix()] = entry["sha256"]
            waiting += entry["imports"]
        return digest_listing(entries)

    def save(self) -> None:
        """Remember what was read, for the next run."""
        if self._cache is not None:
            write_if_changed(self._cache, json.dumps(self._fresh, sort_keys=True))

    def _file(self, module: str) -> Path | None:
        base = self._source.parent.joinpath(*module.split("."))
        if (base / "__init__.py").is_file():
            return base / "__init__.py"
        plain = base.with_suffix(".py")
        return plain if plain.is_file() else None

    def _below(self, module: str) -> list[str]:
        """All modules directly in a package, for `dspark.room.`."""
        folder = self._source.parent.joinpath(*module.rstrip(".").split("."))
        return [f"{module}{path.stem}" for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]

    def _entry(self, file: Path, module: str = "") -> dict[str, Any]:
        name = str(file)
        if name in self._fresh:
            return self._fresh[name]
        stat = file.stat()
        stamp = [stat.st_mtime_ns, stat.st_size]
        known = self._known.get(name)
        if known is None or known["stamp"] != stamp:
            data = file.read_bytes()
            known = {
                "stamp": stamp,
                "sha256": hashlib.sha256(data).hexdigest(),
                "imports": sorted(set(imported_modules(data, module, file.name == "__init__.py"))),
            }
        self._fresh[name] = known
        return known


def imported_modules(source: bytes, module: str = "", is_package: bool = False) -> Iterator[str]:
    """Names under `dspark` that a source file imports; `from a import b` names both `a` and `a.b`.

    Args:
        module: the file's own dotted name, for relative imports.
        is_package: the file is an `__init__.py`.
    """
    for node in _executed(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_parents(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, module, is_package)
            if base.split(".")[0] == PACKAGE:
                yield from _with_parents(base)
                yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAMED.match(node.value):
            yield node.value.partition(":")[0]


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes except those under `if TYPE_CHECKING:`."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _base(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*parts, node.module] if node.module else parts)


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    if parts[0] == PACKAGE:
        yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def _remembered(cache: Path | None) -> dict[str, dict[str, Any]]:
    if cache is None or not cache.is_file():
        return {}
    try:
        value = json.loads(cache.read_text(encoding="utf-8"))
    except ValueError:
        return {}  # a cut-off cache is only slower
    return value if isinstance(value, dict) else {}
