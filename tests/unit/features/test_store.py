from __future__ import annotations

import random

import pytest
import torch

from dspark.corpus.sequences import TokenSequence
from dspark.errors import DataError, IntegrityError
from dspark.features.shards import Shard
from dspark.features.sizes import bytes_per_token
from dspark.features.sources import StoredFeatures, read_split
from dspark.features.store import (
    FeatureManifest,
    ShardEntry,
    damaged_shards,
    discard,
    known_entry,
    most_bytes,
    shard_entry,
    shard_key,
    shard_path,
    write_shard,
)
from dspark.io.jsonfile import read_model, write_model

ROWS = [TokenSequence("a#0", "math", [5, 6, 7, 8], 2, "stop"), TokenSequence("b#1", "math", [9, 10, 11], 1, "length")]
KEY = shard_key("0" * 64, (1, 2), "float32", ROWS)


@pytest.fixture
def manifest(tmp_path):
    tensors = {
        "taps": torch.arange(7 * 4, dtype=torch.float32).view(7, 4),
        "last_hidden": torch.arange(7 * 2, dtype=torch.float32).view(7, 2),
        "logsumexp": torch.arange(7, dtype=torch.float32),
    }
    entry = write_shard(tmp_path, KEY, ROWS, tensors)
    return FeatureManifest(
        target_digest="0" * 64, taps=(1, 2), dtype="float32", hidden_size=2, splits={"train": (entry,)}
    )


def test_what_is_written_is_read(manifest, tmp_path):
    first, second = read_split(manifest, "train", tmp_path)
    assert (first.id, second.id, second.domain) == ("a#0", "b#1", "math")
    assert second.token_ids.tolist() == [9, 10, 11]
    assert second.prompt_length == 1
    # The second sequence begins at the fifth token.
    assert second.taps[0].tolist() == [16, 17, 18, 19]
    assert second.last_hidden[-1].tolist() == [12, 13]
    assert second.logsumexp.tolist() == [4, 5, 6]


def test_sequences_are_cut_on_request(manifest, tmp_path):
    first, second = read_split(manifest, "train", tmp_path, max_length=3)
    assert (len(first.token_ids), len(first.taps), len(second.token_ids)) == (3, 3, 3)


def test_codes_are_read_with_their_scales(tmp_path):
    """Codes 0 .. 3 of two taps with scales 2 and .5, last hidden with 10: worked out by hand."""
    tensors = {
        "taps": torch.arange(4, dtype=torch.int8).repeat(7, 1),
        "taps_scales": torch.tensor([2.0, 0.5]).repeat(7, 1),
        "last_hidden": torch.tensor([[1, -1]], dtype=torch.int8).repeat(7, 1),
        "last_hidden_scales": torch.full((7, 1), 10.0),
        "logsumexp": torch.zeros(7),
    }
    source = StoredFeatures([write_shard(tmp_path, KEY, ROWS, tensors)], tmp_path)
    (second,) = source.load([1], {})
    assert second.taps.tolist() == [[0, 2, 1, 1.5]] * 3
    assert second.last_hidden.tolist() == [[10, -10]] * 3
    # In memory: six codes, three scales and logsumexp as they are, and six decoded numbers.
    assert source.feature_bytes(1) == 3 * (6 + 4 * 3 + 4 + 4 * 6)


def test_a_manifest_survives_its_file(manifest, tmp_path):
    write_model(tmp_path / "manifest.json", manifest)
    assert read_model(tmp_path / "manifest.json", FeatureManifest) == manifest


def test_a_shard_without_bytes_is_one_that_is_not_stored(manifest):
    planned = ShardEntry(key=KEY, sequences=2, tokens=7)
    online = manifest.model_copy(update={"splits": {"train": (planned,), "dev": manifest.splits["train"]}})
    assert not planned.stored
    assert (list(online.stored), online.bytes) == ([KEY], manifest.splits["train"][0].bytes)
    with pytest.raises(ValueError, match="belong together"):
        ShardEntry(key=KEY, sequences=2, tokens=7, bytes=3)


def test_an_unknown_split_is_a_data_error(manifest, tmp_path):
    with pytest.raises(DataError, match=r"no split 'eval', only \['train'\]"):
        read_split(manifest, "eval", tmp_path)


@pytest.mark.parametrize(("damage", "reason"), [("gone", "missing"), ("cut", "bytes instead of"), ("flip", "checksum")])
def test_damage_is_found_and_never_read(manifest, tmp_path, damage, reason):
    path = shard_path(tmp_path, KEY)
    data = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(data[:-1])
    else:
        data[-1] ^= 1
        path.write_bytes(data)
    assert damaged_shards(manifest, tmp_path, deep=True) == list(manifest.splits["train"])
    assert bool(damaged_shards(manifest, tmp_path)) == (damage != "flip")
    with pytest.raises(IntegrityError, match=reason):
        read_split(manifest, "train", tmp_path)
    assert (shard_entry(tmp_path, KEY) is None) == (damage != "flip")


def test_a_shard_that_was_made_again_elsewhere_is_not_the_listed_one(manifest, tmp_path):
    """Whole by its own checksums, but they are not the ones of the manifest."""
    tensors = {"taps": torch.ones(7, 4), "last_hidden": torch.ones(7, 2), "logsumexp": torch.ones(7)}
    write_shard(tmp_path, KEY, ROWS, tensors)
    with pytest.raises(IntegrityError, match="sha256"):
        read_split(manifest, "train", tmp_path)


def test_a_shard_that_was_listed_without_its_header_is_read_in_full_first(manifest, tmp_path):
    (entry,) = manifest.splits["train"]
    listed = [entry.model_copy(update={"header_sha256": None})]
    assert len(StoredFeatures(listed, tmp_path)) == 2
    path = shard_path(tmp_path, KEY)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="its sha256 is not"):
        StoredFeatures(listed, tmp_path)
    StoredFeatures([entry], tmp_path).token_ids(0)  # its header is whole, and so are these


def test_a_file_that_is_no_shard_is_an_integrity_error(tmp_path):
    for number, content in enumerate((b"", b"\x00" * 64, b"\x02\x00\x00\x00\x00\x00\x00\x00{}")):
        path = tmp_path / str(number)
        path.write_bytes(content)
        with pytest.raises(IntegrityError, match="not a feature shard"):
            Shard(path)


def test_discarding_is_thorough_and_repeatable(manifest, tmp_path):
    discard(tmp_path, KEY)
    discard(tmp_path, KEY)
    assert list(tmp_path.iterdir()) == []


def test_a_shard_takes_the_bytes_that_were_announced(manifest):
    entry = manifest.splits["train"][0]
    assert 0 <= entry.bytes - 7 * bytes_per_token(2, 2, "float32") < 1500
    assert entry.bytes <= most_bytes(ROWS, bytes_per_token(2, 2, "float32"))


def test_whatever_its_ids_are_a_shard_takes_no_more_than_was_announced(tmp_path):
    rows = [TokenSequence(f'"\\\n{"é" * n}', "d", [1, 2], 1, "stop") for n in range(40)]
    tensors = {"taps": torch.ones(80, 4), "last_hidden": torch.ones(80, 2), "logsumexp": torch.ones(80)}
    entry = write_shard(tmp_path, KEY, rows, tensors)
    assert entry.bytes <= most_bytes(rows, bytes_per_token(2, 2, "float32"))
    assert [row.id for row in StoredFeatures([entry], tmp_path).load(range(40), {})] == [row.id for row in rows]


def test_no_flipped_bit_and_no_cut_of_a_shard_is_read(manifest, tmp_path):
    path = shard_path(tmp_path, KEY)
    good = path.read_bytes()
    draw = random.Random(0)
    cuts = [good[:length] for length in (0, 7, 8, len(good) // 2, len(good) - 1)]
    flips = [(draw.randrange(len(good)), draw.randrange(8)) for _ in range(200)]
    for damaged in [*cuts, *(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :] for at, bit in flips)]:
        path.write_bytes(damaged)
        with pytest.raises(IntegrityError, match=path.name):
            read_split(manifest, "train", tmp_path)
        assert damaged_shards(manifest, tmp_path, deep=True) == list(manifest.splits["train"])
    path.write_bytes(good)
    assert len(read_split(manifest, "train", tmp_path)) == 2


def test_flipped_bits_of_an_entry_are_noticed(manifest, tmp_path):
    """No entry, so that the shard is made again; or the sound shard is refused by its header, or by `store verify`."""
    path = shard_path(tmp_path, KEY).with_suffix(".json")
    good, entry = path.read_bytes(), manifest.splits["train"][0]
    refused = 0
    for at in range(len(good)):
        for bit in range(0, 8, 2):
            path.write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])
            found = known_entry(tmp_path, KEY, ROWS)
            if found is None or found == entry:  # equal: one kind of white space for another
                continue
            wrong = manifest.model_copy(update={"splits": {"train": (found,)}})
            if found.sha256 == entry.sha256:
                with pytest.raises(IntegrityError, match="sha256 of its header"):
                    read_split(wrong, "train", tmp_path)
                refused += 1
            else:
                assert damaged_shards(wrong, tmp_path, deep=True) == [found]
    assert refused > 30  # digits of the sha256 that became other digits
