from __future__ import annotations

import random

import pytest
import torch

from dspark.corpus.sequences import TokenSequence
from dspark.errors import DataError, IntegrityError
from dspark.features.store import (
    FeatureManifest,
    bytes_per_token,
    damaged_shards,
    discard,
    known_entry,
    read_shard,
    read_split,
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


def test_a_manifest_survives_its_file(manifest, tmp_path):
    write_model(tmp_path / "manifest.json", manifest)
    assert read_model(tmp_path / "manifest.json", FeatureManifest) == manifest


def test_an_unknown_split_is_a_data_error(manifest, tmp_path):
    with pytest.raises(DataError, match=r"no split 'eval', only \['train'\]"):
        read_split(manifest, "eval", tmp_path)


@pytest.mark.parametrize(("damage", "reason"), [("gone", "missing"), ("cut", "bytes instead of"), ("flip", "sha256")])
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


def test_a_file_that_is_no_shard_is_an_integrity_error(tmp_path):
    for number, content in enumerate((b"", b"\x00" * 64, b"\x02\x00\x00\x00\x00\x00\x00\x00{}")):
        path = tmp_path / str(number)
        path.write_bytes(content)
        with pytest.raises(IntegrityError, match="not a feature shard"):
            read_shard(path)


def test_discarding_is_thorough_and_repeatable(manifest, tmp_path):
    discard(tmp_path, KEY)
    discard(tmp_path, KEY)
    assert list(tmp_path.iterdir()) == []


def test_bytes_per_token_are_those_of_the_paper_targets():
    """SmolLM2-135M: 5 taps and the last hidden state of 576 bfloat16 numbers are 6.9 kB (environment.md)."""
    assert bytes_per_token(576, 5, "bfloat16") == 576 * 6 * 2 + 12
    assert bytes_per_token(2560, 5, "bfloat16") == 30_732


def test_a_shard_takes_the_bytes_that_were_announced(manifest):
    entry = manifest.splits["train"][0]
    assert 0 <= entry.bytes - 7 * bytes_per_token(2, 2, "float32") < 1000


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
    """No entry, so that the shard is made again; or one by which the sound shard is refused, and then made again."""
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
            with pytest.raises(IntegrityError, match="sha256"):
                read_split(wrong, "train", tmp_path)
            refused += 1
    assert refused > 30  # digits of the sha256 that became other digits
