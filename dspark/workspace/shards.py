"""Feature shards that a build's manifest names: which are not as they should be, and whether a stage would miss them.

They are no outputs of DVC's: a workspace that pulled a build from a remote has none, and needs none as long as nothing
is trained or exported anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from dspark.features.store import FeatureManifest, ShardEntry, damaged_shards, discard
from dspark.io.jsonfile import read_model
from dspark.workspace.dvc import changed_stages
from dspark.workspace.graph import Instance
from dspark.workspace.layout import Workspace
from dspark.workspace.stores import feature_store

READERS = ("train", "export")  # the stages that read shards; `features` makes what it misses by itself


def reads(name: str) -> bool:
    """True if a stage, `stage@key`, reads shards."""
    return name.partition("@")[0] in READERS


def damaged(workspace: Workspace, planned: Sequence[Instance], *, deep: bool) -> list[ShardEntry]:
    """Shards that are missing or damaged; none where there is no manifest, or the stage could not make them.

    Args:
        planned: the stages of the build, or of builds of one corpus.
        deep: compare digests too, which reads every byte.
    """
    instance = next(item for item in planned if item.stage.name == "features")
    manifest = workspace.root / instance.stage.output(instance.key, instance.entry) / "manifest.json"
    inputs = instance.stage.dependencies(instance.key, instance.entry)
    if not manifest.is_file() or not all((workspace.root / path).exists() for path in inputs):
        return []
    return damaged_shards(read_model(manifest, FeatureManifest), feature_store(workspace), deep=deep)


def are_read(workspace: Workspace, targets: Sequence[str]) -> bool:
    """True if DVC would run a stage that reads shards, to make these.

    One that runs only because another comes out different is not foreseen: it fails on a missing shard, and the run
    makes the shards then.
    """
    return any(reads(name) for name in changed_stages(workspace, *targets))


def remove(workspace: Workspace, entries: Sequence[ShardEntry]) -> None:
    """Remove what is left of them, so that they are made again."""
    store = feature_store(workspace)
    for entry in entries:
        discard(store, entry.key)
