"""The stores kept clean: what nobody names is removed, what is damaged is found and makes room for a sound copy.

Both change a store only while they hold the lock of every workspace that uses it: no run is under way then.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dspark.corpus.responses import BatchEntry
from dspark.corpus.sequences import read_sequences
from dspark.errors import DataError, DsparkError
from dspark.features.store import ShardEntry, damage, discard, read_entry
from dspark.io.digest import digest_file
from dspark.io.jsonfile import read_model
from dspark.targets.shelf import LISTING, ORIGINS, Listing, Origin
from dspark.workspace.inventory import Item, inventory, manifests
from dspark.workspace.layout import Workspace
from dspark.workspace.lock import run_lock
from dspark.workspace.packages import is_sound
from dspark.workspace.stores import feature_store, users

# What a run can make again. Packages it cannot: they are what was measured, or wait for a server.
REMADE = ("features", "responses", "targets", "gguf", "leftover")

Listed = dict[str, list[tuple[str, ShardEntry]]]  # shards by key: who names them, and as what


@dataclass(frozen=True)
class Damaged:
    """Something of a store that is not what it should be."""

    item: Item
    what: str
    removed: bool = False

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {**self.item.as_json(), "what": self.what, "removed": self.removed}


@dataclass(frozen=True)
class Verification:
    """What was compared, and what was found.

    Attributes:
        digests: things whose digest was compared.
        forms: things without a digest, of which it was looked at whether they can be read.
        bytes: of both.
    """

    digests: int
    forms: int
    bytes: int
    damaged: tuple[Damaged, ...]

    @property
    def sound(self) -> bool:
        """True if nothing damaged is left."""
        return all(damaged.removed for damaged in self.damaged)


def garbage(workspace: Workspace) -> list[Item]:
    """What a run could make again and nothing names.

    Raises:
        DataError, PreflightError: as `inventory`.
    """
    return [item for item in inventory(workspace) if item.kind in REMADE and not item.users]


def collect(workspace: Workspace, note: Callable[[str], None]) -> list[Item]:
    """Remove what nothing names.

    Args:
        note: see `run_lock`.
    Returns:
        what was removed.
    Raises:
        PreflightError: a run is under way here or in a workspace that shares the feature store.
        DataError: what names things is damaged, so that nothing was removed.
    """
    with _locked(workspace, "dspark store gc", note):
        found = garbage(workspace)
        for item in found:
            _remove(workspace, item)
    return found


def verify(workspace: Workspace, *, repair: bool, note: Callable[[str], None]) -> Verification:
    """Read everything in the stores and compare it with its digest; of what has none, look whether it can be read.

    Args:
        repair: remove what is damaged and can be made again by a run.
    Raises:
        PreflightError: with `repair`, a run is under way; or as `inventory`.
    """
    with ExitStack() as stack:
        if repair:
            stack.enter_context(_locked(workspace, "dspark store verify --repair", note))
        items = [item for item in inventory(workspace) if item.kind != "leftover"]
        with_digest = [item for item in items if item.kind != "gguf"]
        listed = _listed(workspace)
        damaged = [Damaged(item, what) for item in items if (what := _damage(workspace, item, listed)) is not None]
        damaged += [found for item in items if item.kind == "responses" for found in _damaged_batches(item)]
        damaged += _missing(listed, items)
        if repair:
            damaged = [_repaired(workspace, found) for found in damaged]
    total = sum(item.bytes for item in items)
    return Verification(len(with_digest), len(items) - len(with_digest), total, tuple(damaged))


@contextmanager
def _locked(workspace: Workspace, purpose: str, note: Callable[[str], None]) -> Iterator[None]:
    with ExitStack() as stack:
        for user in users(workspace):
            stack.enter_context(run_lock(user, purpose, note, patience_seconds=5))
        yield


def _listed(workspace: Workspace) -> Listed:
    found: Listed = {}
    for user in users(workspace):
        for who, manifest in manifests(user):
            for key, entry in manifest.stored.items():
                found.setdefault(key, []).append((f"{who} in {user.root}", entry))
    return found


def _damage(workspace: Workspace, item: Item, listed: Listed) -> str | None:
    """What is wrong with a thing, or None."""
    folder = item.paths[-1]
    try:
        if item.kind == "features":
            return _shard_damage(feature_store(workspace), item, listed.get(item.name, []))
        if item.kind == "targets":
            return _target_damage(folder)
        if item.kind == "gguf":
            _read_all_gguf(folder)
        elif item.kind == "packages" and not is_sound(folder, item.name):
            return "it is not the package that it is named after"
        elif item.kind == "waiting":
            from dspark.package.verify import verify as verify_package

            verify_package(folder)
    except DsparkError as error:
        return error.message
    return None


def _shard_damage(store: Path, item: Item, listed: list[tuple[str, ShardEntry]]) -> str | None:
    entry = read_entry(store, item.name)
    if entry is None:
        return "it was not finished: its entry is missing" if item.users else None
    wrong = damage(entry, store, deep=True)
    if wrong is not None:
        return wrong
    other = next(((who, named) for who, named in listed if named != entry), None)
    return None if other is None else f"it is another one than {other[0]} names: {other[1].sha256}"


def _damaged_batches(item: Item) -> list[Damaged]:
    """Batches of answers that are not what their entries say, or cannot be read."""
    found = []
    for path in sorted(item.paths[-1].glob("*.jsonl")):
        entry = path.with_suffix(".json")
        try:
            read_sequences(path)
            if entry.is_file() and read_model(entry, BatchEntry).sha256 != digest_file(path):
                raise DataError(f"{path}: its sha256 is not the one in {entry.name}")
        except DataError as error:
            batch = Item("responses", f"{item.name}/{path.stem}", (path, entry), path.stat().st_size, item.users)
            found.append(Damaged(batch, error.message))
    return found


def _target_damage(folder: Path) -> str | None:
    listing = read_model(folder / LISTING, Listing)
    if listing.digest != folder.name:
        return f"its listing is that of {listing.digest}"
    for name, file in listing.files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != file.bytes or digest_file(path) != file.sha256:
            return f"the sha256 of {name} is not {file.sha256}"
    return None


def _read_all_gguf(folder: Path) -> None:
    from dspark.io.gguffile import read_gguf

    for path in sorted(folder.glob("*.gguf")):
        read_gguf(path)


def _missing(listed: Listed, items: list[Item]) -> list[Damaged]:
    """Shards that a manifest names and the store does not have."""
    there = {item.name for item in items if item.kind == "features"}
    return [
        Damaged(Item("features", key, (), named[0][1].bytes or 0, tuple(who for who, _ in named)), "missing")
        for key, named in listed.items()
        if key not in there
    ]


def _repaired(workspace: Workspace, damaged: Damaged) -> Damaged:
    if damaged.item.kind not in REMADE:
        return damaged
    _remove(workspace, damaged.item)
    return replace(damaged, removed=True)


def _remove(workspace: Workspace, item: Item) -> None:
    """Remove a thing; links are removed, not what they lead to."""
    if item.kind == "features":
        discard(feature_store(workspace), item.name)  # an entry whose shard is gone, too
    if item.kind == "targets":
        for path in (workspace.store / "targets" / ORIGINS).glob("*.json"):
            try:
                leads_here = read_model(path, Origin).digest == item.name
            except DataError:
                leads_here = True  # nobody can read where it leads; the target is looked up anew
            if leads_here:
                path.unlink()
    for path in item.paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
