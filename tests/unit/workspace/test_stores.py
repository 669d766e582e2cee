"""The stores: where they lie, who names what in them, what is removed and what is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from dspark.cli import store as cli
from dspark.config.declared import Mistakes
from dspark.config.models import Sampling
from dspark.corpus.responses import BatchEntry, ResponsesSummary, store_key
from dspark.errors import DataError, PreflightError
from dspark.features.store import FeatureManifest, ShardEntry, entry_path, shard_path
from dspark.io.digest import digest_bytes, digest_file
from dspark.io.jsonfile import write_json, write_model
from dspark.targets.shelf import LISTING, Listing, Origin, StoredFile
from dspark.workspace.inventory import heaps, inventory
from dspark.workspace.layout import Workspace
from dspark.workspace.lock import run_lock
from dspark.workspace.stores import VARIABLE, feature_store, join_store, store_settings, users
from dspark.workspace.upkeep import collect, garbage, verify


def make_workspace(root: Path) -> Workspace:
    for folder in ("pipeline", "stages", "targets", ".dspark"):
        (root / folder).mkdir(parents=True)
    (root / "dvc.yaml").write_text("")
    return Workspace(root)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return make_workspace(tmp_path / "w")


@pytest.fixture
def other(tmp_path: Path) -> Workspace:
    return make_workspace(tmp_path / "other")


def shard(workspace: Workspace, content: str) -> ShardEntry:
    """A file that stands for a shard, with its entry."""
    store, data = feature_store(workspace), content.encode()
    store.mkdir(parents=True, exist_ok=True)
    key = digest_bytes(data + b" key")
    shard_path(store, key).write_bytes(data)
    entry = ShardEntry(key=key, sequences=1, tokens=1, bytes=len(data), sha256=digest_bytes(data))
    write_model(entry_path(store, key), entry)
    return entry


def manifest(path: Path, *entries: ShardEntry) -> None:
    found = FeatureManifest(
        target_digest="0" * 64, taps=(1,), dtype="int8", hidden_size=8, splits={"train": entries, "dev": ()}
    )
    write_model(path, found)


def corpus(workspace: Workspace, name: str, *entries: ShardEntry) -> None:
    manifest(workspace.root / "corpora" / name / "features" / "manifest.json", *entries)


def names(items: list) -> set[str]:
    return {item.name for item in items}


def quiet(message: str) -> None:
    pass


# ---------------------------------------------------------------- where features lie


def test_the_store_is_where_the_first_that_names_it_says(workspace: Workspace, tmp_path: Path) -> None:
    assert feature_store(workspace, {}) == workspace.root / ".dspark/store/features"
    (workspace.root / "params.yaml").write_text("store:\n  features: shards\n  read_budget_mib: 64\n")
    assert feature_store(workspace, {}) == workspace.root / "shards"
    assert store_settings(workspace).read_budget_mib == 64
    assert feature_store(workspace, {VARIABLE: str(tmp_path / "big")}) == tmp_path / "big"


def test_mistakes_in_its_settings_are_told_with_their_line(workspace: Workspace) -> None:
    (workspace.root / "params.yaml").write_text("features: {}\nstore:\n  read_budget: 64\n")
    with pytest.raises(Mistakes, match=r"params\.yaml:3: unknown key 'store\.read_budget'"):
        feature_store(workspace, {})


def test_a_shared_store_knows_its_users(
    workspace: Workspace, other: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join_store(workspace)
    assert not (workspace.store / "features").exists()  # it is nobody else's
    monkeypatch.setenv(VARIABLE, str(tmp_path / "shared"))
    join_store(workspace)
    join_store(workspace)
    assert [user.root for user in users(workspace)] == [workspace.root]
    join_store(other)
    assert [user.root for user in users(workspace)] == [workspace.root, other.root]
    (other.root / "dvc.yaml").unlink()
    with pytest.raises(PreflightError, match=r"shared with the workspace .*other, which cannot be seen") as caught:
        garbage(workspace)
    note = caught.value.hint.rpartition(" ")[2]
    Path(note).unlink()
    assert [user.root for user in users(workspace)] == [workspace.root]


# ---------------------------------------------------------------- what lies there


def test_things_are_listed_with_their_users(workspace: Workspace) -> None:
    a, b, c = (shard(workspace, text) for text in ("a", "bb", "ccc"))
    corpus(workspace, "one", a, b)
    corpus(workspace, "two", b)
    (workspace.dag).write_text(json.dumps({"builds": {"x": {"corpus": "one"}, "y": {"corpus": "one"}}}))
    found = {item.name: item for item in inventory(workspace)}
    assert found[a.key].users == ("corpus one (builds x, y)",)
    assert found[b.key].users == ("corpus one (builds x, y)", "corpus two")
    assert found[c.key].users == ()
    sizes = {heap.users: heap.bytes for heap in heaps(found.values())}
    entry_bytes = {entry.key: entry_path(feature_store(workspace), entry.key).stat().st_size for entry in (a, b, c)}
    assert sizes[()] == 3 + entry_bytes[c.key]
    assert [heap.count for heap in heaps(found.values())] == [1, 1, 1]


def test_responses_and_weights_belong_to_their_corpus_and_target(workspace: Workspace) -> None:
    sampling, digest = Sampling(temperature=0.7), "1" * 64
    summary = ResponsesSummary(target_digest=digest, sampling=sampling, max_new_tokens=9, splits={})
    write_model(workspace.root / "corpora/c/responses/summary.json", summary)
    used = store_key(digest, "torch.bfloat16", sampling)
    for folder in (f"responses/{used}", f"responses/{'2' * 64}", f"gguf/{digest}", "waiting/w", f"packages/{digest}"):
        (workspace.store / folder).mkdir(parents=True)
    found = {(item.kind, item.name): item.users for item in inventory(workspace)}
    assert found["responses", used] == ("corpus c",)
    assert found["responses", "2" * 64] == found["gguf", digest] == ()
    assert found["waiting", "w"] == ("waits to be registered",)
    # Packages are what was measured, and cannot be made again by a run: they stay.
    assert {(item.kind, item.name) for item in garbage(workspace)} == {("responses", "2" * 64), ("gguf", digest)}


# ---------------------------------------------------------------- gc


def test_only_what_nobody_names_is_removed(workspace: Workspace) -> None:
    kept, lost = shard(workspace, "kept"), shard(workspace, "lost")
    corpus(workspace, "one", kept)
    store = feature_store(workspace)
    torn = store / f".{kept.key}.safetensors.abc.part"
    torn.write_text("half")
    before = {path: path.read_bytes() for path in store.iterdir()}
    assert names(garbage(workspace)) == {lost.key, torn.name}
    assert {path: path.read_bytes() for path in store.iterdir()} == before
    assert names(collect(workspace, quiet)) == {lost.key, torn.name}
    assert {path.name for path in store.iterdir()} == {f"{kept.key}.safetensors", f"{kept.key}.json"}
    assert collect(workspace, quiet) == []


def test_what_a_stopped_extraction_had_made_is_kept(workspace: Workspace) -> None:
    """Its manifest lists shards before they are stored."""
    made = shard(workspace, "made")
    planned = ShardEntry(key=made.key, sequences=1, tokens=1)
    manifest(workspace.work("features", "d") / "state" / "manifest.json", planned)
    assert garbage(workspace) == []
    assert inventory(workspace)[0].users == ("unfinished work",)


def test_a_shard_that_a_manifest_lists_without_storing_it_is_garbage(workspace: Workspace) -> None:
    left = shard(workspace, "left over from when the corpus was cached")
    corpus(workspace, "online", ShardEntry(key=left.key, sequences=1, tokens=1))
    assert names(garbage(workspace)) == {left.key}


def test_nothing_is_removed_while_a_run_holds_the_lock(workspace: Workspace) -> None:
    lost = shard(workspace, "lost")
    with run_lock(workspace, "dspark run of build 'b'", quiet):
        with pytest.raises(PreflightError, match="in use: dspark run of build 'b'"):
            collect(workspace, quiet)
        with pytest.raises(PreflightError, match="in use"):
            verify(workspace, repair=True, note=quiet)
        assert names(garbage(workspace)) == {lost.key}  # looking is free
    assert names(collect(workspace, quiet)) == {lost.key}


def test_what_another_workspace_names_or_runs_is_left_alone(
    workspace: Workspace, other: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "shared"))
    join_store(workspace)
    join_store(other)
    theirs, nobodys = shard(workspace, "theirs"), shard(workspace, "nobody's")
    corpus(other, "o", theirs)
    assert names(garbage(workspace)) == {nobodys.key}
    with run_lock(other, "their run", quiet), pytest.raises(PreflightError, match="in use: their run"):
        collect(workspace, quiet)
    collect(workspace, quiet)
    assert names(inventory(other)) == {theirs.key}
    assert inventory(workspace)[0].users == (f"corpus o of {other.root}",)


def test_a_manifest_that_cannot_be_read_keeps_everything(workspace: Workspace) -> None:
    shard(workspace, "whose?")
    path = workspace.root / "corpora/c/features/manifest.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        collect(workspace, quiet)
    assert len(list(feature_store(workspace).iterdir())) == 2


@pytest.fixture
def make_target(workspace: Workspace, tmp_path: Path) -> Callable[[str], Path]:
    """Puts a linked target with these weights on the shelf; returns its folder."""

    def make(text: str) -> Path:
        source = tmp_path / f"{text}.safetensors"
        source.write_text(text)
        stat = source.stat()
        file = StoredFile(sha256=digest_file(source), bytes=stat.st_size, mtime_ns=stat.st_mtime_ns)
        listing = Listing(dtype="float32", files={"model.safetensors": file})
        folder = workspace.store / "targets" / listing.digest
        folder.mkdir(parents=True)
        (folder / "model.safetensors").symlink_to(source)
        write_model(folder / LISTING, listing)
        origin = Origin(digest=listing.digest, revision="r")
        write_model(workspace.store / "targets" / "origins" / f"{text}.json", origin)
        return folder

    return make


def test_a_linked_target_goes_without_what_it_links_to(workspace: Workspace, make_target, tmp_path: Path) -> None:
    folder = make_target("weights")
    assert names(collect(workspace, quiet)) == {folder.name}
    assert not folder.exists() and not list((workspace.store / "targets/origins").iterdir())
    assert (tmp_path / "weights.safetensors").read_text() == "weights"


# ---------------------------------------------------------------- verify


def test_sound_stores_are_found_sound(workspace: Workspace, make_target) -> None:
    corpus(workspace, "one", shard(workspace, "a"), shard(workspace, "b"))
    make_target("weights")
    found = verify(workspace, repair=False, note=quiet)
    assert (found.digests, found.forms, found.damaged, found.sound) == (3, 0, (), True)


@pytest.mark.parametrize("hurt", ["flip", "cut", "gone", "entry", "elsewhere"])
def test_a_damaged_shard_is_found_and_removed_on_request(workspace: Workspace, hurt: str) -> None:
    good, bad = shard(workspace, "good"), shard(workspace, "bad")
    corpus(workspace, "one", good, bad)
    store = feature_store(workspace)
    path = shard_path(store, bad.key)
    if hurt == "gone":
        path.unlink()
    elif hurt == "entry":
        entry_path(store, bad.key).unlink()
    else:
        path.write_bytes({"flip": b"baD", "cut": b"ba", "elsewhere": b"BAD"}[hurt])
    if hurt == "elsewhere":  # whole, but made again on another kind of machine
        write_model(entry_path(store, bad.key), bad.model_copy(update={"sha256": digest_bytes(b"BAD")}))
    found = verify(workspace, repair=False, note=quiet)
    assert [damaged.item.name for damaged in found.damaged] == [bad.key] and not found.sound
    assert path.exists() == (hurt != "gone")
    repaired = verify(workspace, repair=True, note=quiet)
    assert repaired.sound and repaired.damaged[0].removed
    assert not path.exists() and not entry_path(store, bad.key).exists()
    assert shard_path(store, good.key).exists()


def test_a_changed_target_is_found_and_its_source_left_alone(workspace: Workspace, make_target, tmp_path: Path) -> None:
    folder = make_target("weights")
    source = tmp_path / "weights.safetensors"
    source.write_text("wEights")
    found = verify(workspace, repair=True, note=quiet)
    assert [damaged.what[:33] for damaged in found.damaged] == ["the sha256 of model.safetensors is"[:33]]
    assert not folder.exists() and source.exists()


def test_of_damaged_responses_the_batch_alone_is_removed(workspace: Workspace) -> None:
    folder = workspace.store / "responses" / ("3" * 64)
    folder.mkdir(parents=True)
    row = {"id": "a", "sample": 0, "domain": "d", "prompt_ids": [1], "response_ids": [2], "finish_reason": "stop"}
    for name in ("whole", "torn", "flipped"):
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        write_model(folder / f"{name}.json", BatchEntry(sha256=digest_file(folder / f"{name}.jsonl")))
    assert verify(workspace, repair=False, note=quiet).sound
    (folder / "torn.jsonl").write_text(json.dumps(row)[:30])
    (folder / "flipped.jsonl").write_text(json.dumps(row | {"response_ids": [3]}) + "\n")
    found = verify(workspace, repair=False, note=quiet)
    assert [damaged.item.name[65:] for damaged in found.damaged] == ["flipped", "torn"]
    assert "sha256" in found.damaged[0].what and "torn.jsonl:1" in found.damaged[1].what
    assert verify(workspace, repair=True, note=quiet).sound
    assert {path.name for path in folder.iterdir()} == {"whole.json", "whole.jsonl"}


def test_a_damaged_package_stays_for_somebody_to_look_at(workspace: Workspace) -> None:
    folder = workspace.store / "packages" / ("4" * 64)
    folder.mkdir(parents=True)
    write_json(folder / "manifest.json", {})
    found = verify(workspace, repair=True, note=quiet)
    assert not found.sound and not found.damaged[0].removed and folder.exists()


# ---------------------------------------------------------------- the verbs


def call(workspace: Workspace, *words: str):
    return CliRunner().invoke(cli.store, words, obj={"workspace": workspace.root, "debug": False})


def test_the_verbs_show_and_do_it_and_tell_by_exit_code(workspace: Workspace) -> None:
    kept, lost = shard(workspace, "kept"), shard(workspace, "lost")
    corpus(workspace, "one", kept)
    listed = call(workspace, "ls").output
    assert "corpus one" in listed and "nothing" in listed and kept.key not in listed
    assert kept.key in call(workspace, "ls", "--all").output
    assert {item["name"] for item in json.loads(call(workspace, "ls", "--json").output)["items"]} == {
        kept.key,
        lost.key,
    }
    dry = call(workspace, "gc", "--dry-run")
    assert lost.key in dry.output and "would be removed" in dry.output and dry.exit_code == 0
    assert shard_path(feature_store(workspace), lost.key).exists()
    assert json.loads(call(workspace, "gc", "--json").output)["removed"] is True
    assert not shard_path(feature_store(workspace), lost.key).exists()
    assert call(workspace, "verify").exit_code == 0
    shard_path(feature_store(workspace), kept.key).write_text("kep!")
    damaged = call(workspace, "verify")
    assert damaged.exit_code == 7 and f"damaged: features {kept.key}" in damaged.output
    assert "dspark store verify --repair" in damaged.output
    repaired = call(workspace, "verify", "--repair")
    assert repaired.exit_code == 0 and f"removed: features {kept.key}" in repaired.output
    assert json.loads(call(workspace, "verify", "--json").output)["damaged"][0]["what"] == "missing"
