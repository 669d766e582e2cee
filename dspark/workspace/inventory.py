"""What lies in the stores of a workspace, what it takes there, and who names it.

A manifest names feature shards, a target's record its weights and its GGUF files, a corpus's summary its responses, a
build the packages that it starts from or is measured against. Work that was stopped on its way names what it had made.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from dspark.config.models import DIGEST_PATTERN, DType
from dspark.corpus.responses import ResponsesSummary, store_key
from dspark.errors import DataError
from dspark.features.store import SUFFIX, FeatureManifest, entry_path, shard_path
from dspark.io.jsonfile import read_json, read_model
from dspark.targets.record import read_record
from dspark.targets.shelf import ORIGINS
from dspark.workspace.layout import Workspace
from dspark.workspace.stores import USERS, feature_store, users

KINDS = ("features", "responses", "targets", "gguf", "packages", "waiting")
_DIGEST = re.compile(DIGEST_PATTERN)
_UNFINISHED = "unfinished work"

Names = dict[str, set[str]]  # of things: who uses them


@dataclass(frozen=True)
class Item:
    """One thing of a store.

    Attributes:
        kind: one of `KINDS`, or `leftover`: what a killed process did not finish.
        name: its digest, or the name of its file.
        paths: files and folders that it consists of.
        bytes: of its own; what is linked to is not counted.
        users: who names it; empty: nobody does.
    """

    kind: str
    name: str
    paths: tuple[Path, ...]
    bytes: int
    users: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {"kind": self.kind, "name": self.name, "bytes": self.bytes, "users": list(self.users)}


@dataclass(frozen=True)
class Heap:
    """The things of one kind that have the same users."""

    kind: str
    users: tuple[str, ...]
    count: int
    bytes: int


def inventory(workspace: Workspace) -> list[Item]:
    """Everything in the stores of a workspace, by kind and name.

    Raises:
        DataError: what names things is damaged.
        PreflightError: the feature store is shared with a workspace that cannot be seen.
    """
    shards: Names = {}
    for other in users(workspace):
        where = "" if other is workspace else f" of {other.root}"
        for user, manifest in manifests(other):
            for key in manifest.stored:
                shards.setdefault(key, set()).add(user + where)
            if user == _UNFINISHED:  # it lists shards before they are stored
                for entry in (entry for entries in manifest.splits.values() for entry in entries):
                    shards.setdefault(entry.key, set()).add(user + where)
    targets = _named_targets(workspace)
    items = [
        *_features(feature_store(workspace)),
        *_folders("responses", workspace.store / "responses"),
        *_folders("targets", workspace.store / "targets"),
        *_folders("gguf", workspace.store / "gguf"),
        *_folders("packages", workspace.store / "packages"),
        *_folders("waiting", workspace.store / "waiting"),
    ]
    named: dict[str, Mapping[str, Iterable[str]]] = {
        "features": shards,
        "responses": _named_responses(workspace),
        "targets": targets,
        "gguf": targets,
        "packages": _named_packages(workspace),
        "waiting": {},
    }
    everywhere = {"waiting": ("waits to be registered",)}
    if any((workspace.state / "work" / "responses").glob("*/*")):
        everywhere["responses"] = (_UNFINISHED,)
    return [
        replace(item, users=tuple(sorted({*named[item.kind].get(item.name, ()), *everywhere.get(item.kind, ())})))
        if item.kind != "leftover"
        else item
        for item in items
    ]


def heaps(items: Iterable[Item]) -> list[Heap]:
    """What `dspark store ls` shows."""
    found: dict[tuple[str, tuple[str, ...]], list[Item]] = {}
    for item in items:
        found.setdefault((item.kind, item.users), []).append(item)
    order = (*KINDS, "leftover")
    return [
        Heap(kind, users, len(group), sum(item.bytes for item in group))
        for (kind, users), group in sorted(found.items(), key=lambda pair: (order.index(pair[0][0]), pair[0][1]))
    ]


def manifests(workspace: Workspace) -> Iterator[tuple[str, FeatureManifest]]:
    """Every manifest of features in a workspace, with who needs what it names.

    Raises:
        DataError: one cannot be read.
    """
    builds = _builds(workspace)
    hint = "make it again: dspark run --target NAME"
    for path in sorted(workspace.root.glob("corpora/*/features/manifest.json")):
        corpus = path.parents[1].name
        using = ", ".join(sorted(name for name, entry in builds.items() if entry.get("corpus") == corpus))
        user = f"corpus {corpus}" + (f" (builds {using})" if using else "")
        yield user, read_model(path, FeatureManifest, hint=hint)
    for path in sorted((workspace.state / "work" / "features").rglob("manifest.json")):
        yield _UNFINISHED, read_model(path, FeatureManifest, hint=f"{hint}, or give up what is unfinished: rm {path}")


def _builds(workspace: Workspace) -> dict[str, dict[str, str]]:
    """The builds of the last plan or run."""
    try:
        found: dict[str, dict[str, str]] = read_json(workspace.dag).get("builds", {})
    except DataError:
        return {}  # nothing was planned yet
    return found


def _named_targets(workspace: Workspace) -> Names:
    names: Names = {}
    for path in sorted((workspace.root / "targets").glob("*.json")):
        names.setdefault(read_record(path).digest, set()).add(f"target {path.stem}")
    return names


def _named_responses(workspace: Workspace) -> Names:
    names: Names = {}
    for path in sorted(workspace.root.glob("corpora/*/responses/summary.json")):
        summary = read_model(path, ResponsesSummary)
        for dtype in get_args(DType):  # which of them was computed is the machine's business
            key = store_key(summary.target_digest, f"torch.{dtype}", summary.sampling)
            names.setdefault(key, set()).add(f"corpus {path.parents[1].name}")
    return names


def _named_packages(workspace: Workspace) -> Names:
    """Packages that the inputs of stages speak of."""
    names: Names = {}
    for path in sorted((workspace.state / "inputs" / "package").glob("*.json")):
        build = read_json(path).get("settings", {}).get("build", {})
        initial = (build.get("training") or {}).get("initial") or {}
        for digest in (initial.get("package"), build.get("against"), build.get("baseline")):
            if digest:
                names.setdefault(digest, set()).add(f"build {path.stem}")
    return names


def _features(store: Path) -> Iterator[Item]:
    if not store.is_dir():
        return
    whole: set[str] = set()
    for path in sorted(store.iterdir()):
        if path.name == USERS:
            continue
        key = path.name.partition(".")[0]
        is_shard = _DIGEST.match(key) and path.name in (f"{key}{SUFFIX}", f"{key}.json")
        if is_shard and shard_path(store, key).is_file():
            if key not in whole:
                whole.add(key)
                paths = tuple(part for part in (entry_path(store, key), shard_path(store, key)) if part.is_file())
                yield Item("features", key, paths, sum(part.stat().st_size for part in paths))
        else:  # an entry without its shard, or the temporary file of a killed process
            yield Item("leftover", path.name, (path,), _size(path))


def _folders(kind: str, store: Path) -> Iterator[Item]:
    if not store.is_dir():
        return
    for path in sorted(store.iterdir()):
        if path.name == ORIGINS and kind == "targets":
            continue
        hidden = path.name.startswith(".")
        yield Item("leftover" if hidden else kind, path.name, (path,), _size(path))


def _size(path: Path) -> int:
    files = [path] if not path.is_dir() else path.rglob("*")
    return sum(file.lstat().st_size for file in files if file.is_file() and not file.is_symlink())
