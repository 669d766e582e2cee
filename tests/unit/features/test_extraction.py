from __future__ import annotations

import json
import subprocess

import pytest
import torch

from dspark.corpus.sequences import TokenSequence
from dspark.errors import DataError, Interrupted, PreflightError
from dspark.features import extraction, forward
from dspark.features.extraction import ensure, extract, plan, plan_shards
from dspark.features.forward import plan_batches
from dspark.features.sources import read_split
from dspark.features.store import damaged_shards, shard_path
from dspark.io.disk import disk_errors
from dspark.io.jsonfile import model_json
from dspark.io.progress import Progress


class Watched(Progress):
    """Remembers what was reported, and stops after so many tokens."""

    def __init__(self, stop_after=None):
        self.started, self.tokens, self.stop_after = [], 0, stop_after

    def start(self, task, total, done=0, unit="steps"):
        self.started.append((total, done, unit))

    def advance(self, count=1, **fields):
        self.tokens += count
        if self.stop_after is not None and self.tokens >= self.stop_after:
            raise Interrupted("stop")


@pytest.fixture
def corpus(make_sequences):
    return {"train": make_sequences("math", 9) + make_sequences("chat", 6), "dev": make_sequences("math", 3, seed=1)}


def features_of(target, row):
    """One sequence alone, without batch and padding, through transformers' own outputs."""
    output = target.model(torch.tensor([row.token_ids]), output_hidden_states=True)
    taps = torch.cat([output.hidden_states[tap + 1][0] for tap in target.taps], -1)
    return taps, output.hidden_states[-1][0], output.logits[0].double().logsumexp(-1).float()


def test_stored_features_are_the_targets_own_whatever_the_padding(target, corpus, settings, tmp_path):
    manifest = extract(target, corpus, settings, tmp_path)
    for split, rows in corpus.items():
        stored = {sequence.id: sequence for sequence in read_split(manifest, split, tmp_path)}
        assert len(stored) == len(rows)
        for row in rows:
            found = stored[row.id]
            taps, last_hidden, logsumexp = features_of(target, row)
            assert found.token_ids.tolist() == row.token_ids
            assert (found.domain, found.prompt_length) == (row.domain, row.prompt_length)
            torch.testing.assert_close(found.taps, taps, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(found.last_hidden, last_hidden, rtol=1e-4, atol=1e-4)
            # From the last token of the prompt on, which predicts the first one of the response.
            said = slice(row.prompt_length - 1, None)
            torch.testing.assert_close(found.logsumexp[said], logsumexp[said], rtol=1e-4, atol=1e-4)
            assert found.logsumexp[: row.prompt_length - 1].isnan().all()


def test_logits_in_chunks_give_the_same_normalisers(target, corpus, settings, tmp_path, monkeypatch):
    whole = extract(target, corpus, settings, tmp_path / "a")
    monkeypatch.setattr(forward, "LOGITS_BYTES", 3 * 4 * 280)
    chunked = extract(target, corpus, settings, tmp_path / "b")
    for a, b in zip(read_split(whole, "dev", tmp_path / "a"), read_split(chunked, "dev", tmp_path / "b"), strict=True):
        torch.testing.assert_close(a.logsumexp, b.logsumexp, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_the_manifest_says_what_the_store_holds(target, corpus, settings, tmp_path):
    manifest = extract(target, corpus, settings, tmp_path)
    # 9 math sequences in shards of 4, 4, 1; 6 chat ones in 4, 2; a shard never mixes domains.
    assert [entry.sequences for entry in manifest.splits["train"]] == [4, 4, 1, 4, 2]
    assert sum(entry.tokens for entry in manifest.splits["dev"]) == sum(len(row.token_ids) for row in corpus["dev"])
    assert (manifest.taps, manifest.dtype, manifest.hidden_size) == ((1, 2), "float32", 32)
    assert manifest.target_digest == target.record.digest
    assert damaged_shards(manifest, tmp_path, deep=True) == []


def test_the_same_corpus_gives_the_same_bytes(target, corpus, settings, tmp_path):
    first, second = (extract(target, corpus, settings, tmp_path / name) for name in "ab")
    assert json.dumps(model_json(first)) == json.dumps(model_json(second))


def test_a_second_extraction_computes_nothing(target, corpus, settings, tmp_path, monkeypatch):
    first = extract(target, corpus, settings, tmp_path)
    monkeypatch.setattr(target, "hidden", lambda *args, **options: pytest.fail("the target ran"))
    watched = Watched()
    assert extract(target, corpus, settings, tmp_path, watched) == first
    total, done, unit = watched.started[0]
    assert (done, unit) == (total, "tokens")


def test_a_killed_extraction_goes_on_at_the_last_whole_shard(target, corpus, settings, tmp_path, monkeypatch):
    whole = extract(target, corpus, settings, tmp_path / "other")
    tokens = [entry.tokens for entries in whole.splits.values() for entry in entries]
    with pytest.raises(Interrupted):
        extract(target, corpus, settings, tmp_path, Watched(stop_after=sum(tokens[:2]) + 1))
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    # What a kill -9 leaves in the middle of a write is not mistaken for a shard.
    (tmp_path / f".{'0' * 64}.safetensors.x.part").write_bytes(b"half")
    watched = Watched()
    assert extract(target, corpus, settings, tmp_path, watched) == whole
    assert watched.tokens == sum(tokens[2:])
    assert watched.started[0][:2] == (sum(tokens), sum(tokens[:2]))


def test_a_shard_without_its_entry_was_not_finished(target, corpus, settings, tmp_path):
    """The entry is written after the shard: a kill between the two repeats that shard alone."""
    manifest = extract(target, corpus, settings, tmp_path)
    lost = manifest.splits["train"][1]
    shard_path(tmp_path, lost.key).with_suffix(".json").unlink()
    watched = Watched()
    assert extract(target, corpus, settings, tmp_path, watched) == manifest
    assert watched.tokens == lost.tokens


def test_one_flipped_byte_is_found_and_only_that_shard_is_made_again(target, corpus, settings, tmp_path):
    manifest = extract(target, corpus, settings, tmp_path)
    hurt = manifest.splits["train"][3]
    path = shard_path(tmp_path, hurt.key)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    assert damaged_shards(manifest, tmp_path) == []  # the size is right
    assert damaged_shards(manifest, tmp_path, deep=True) == [hurt]
    others = {other: other.stat().st_mtime_ns for other in tmp_path.iterdir() if hurt.key not in other.name}
    watched = Watched()
    mended = ensure(manifest, lambda: corpus, lambda: target, settings, tmp_path, watched, deep=True)
    assert mended == manifest
    assert watched.tokens == hurt.tokens
    assert damaged_shards(manifest, tmp_path, deep=True) == []
    assert {other: other.stat().st_mtime_ns for other in others} == others


def test_nothing_is_loaded_where_nothing_is_damaged(target, corpus, settings, tmp_path):
    manifest = extract(target, corpus, settings, tmp_path)
    refuse = lambda: pytest.fail("it was loaded")  # noqa: E731
    assert ensure(manifest, refuse, refuse, settings, tmp_path, deep=True) is manifest


def test_a_domain_more_extracts_only_itself(target, make_sequences, settings, tmp_path):
    math, code = make_sequences("math", 7), make_sequences("code", 5)
    first = extract(target, {"train": math}, settings, tmp_path)
    watched = Watched()
    second = extract(target, {"train": code + math}, settings, tmp_path, watched)
    assert watched.tokens == sum(len(row.token_ids) for row in code)
    assert second.splits["train"][-len(first.splits["train"]) :] == first.splits["train"]


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [9] * 12},
        {"prompt_length": 4},
        {"id": "other"},
        {"domain": "other"},
    ],
)
def test_whatever_a_shard_holds_decides_its_key(target, settings, tmp_path, change):
    row = {"id": "a", "domain": "d", "token_ids": [8] * 12, "prompt_length": 3, "finish_reason": "stop"}
    keys = [
        extract(target, {"train": [TokenSequence(**fields)]}, settings, tmp_path).splits["train"][0].key
        for fields in (row, row | change)
    ]
    assert keys[0] != keys[1]


def test_taps_and_dtype_decide_the_key_too(target, make_sequences, settings, tmp_path, monkeypatch):
    rows = {"train": make_sequences("math", 2)}
    first = extract(target, rows, settings, tmp_path).splits["train"][0]
    half = extract(target, rows, settings.model_copy(update={"dtype": "bfloat16"}), tmp_path).splits["train"][0]
    monkeypatch.setattr(target, "taps", (0, 3))
    tapped = extract(target, rows, settings, tmp_path).splits["train"][0]
    assert len({first.key, half.key, tapped.key}) == 3
    assert half.bytes < first.bytes


def poison(target, layer, value):
    """Let one layer say NaN or infinity about the last token of every row."""

    def hurt(module, inputs, output):
        output = output.clone()
        output[:, -1] = value
        return output

    return target.decoder.layers[layer].register_forward_hook(hurt)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_features_that_are_no_numbers_are_refused_with_the_layers_name(
    target, make_sequences, settings, tmp_path, value
):
    handle = poison(target, 2, value)
    try:
        with pytest.raises(DataError, match=r"the output of layer 2 of target 'tiny', 1 of \d+ tokens"):
            extract(target, {"train": make_sequences("math", 1)}, settings, tmp_path)
    finally:
        handle.remove()
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_dtype_too_narrow_for_the_features_is_noticed(target, make_sequences, settings, tmp_path):
    handle = poison(target, 1, 1e6)  # fine in float32, infinite in float16
    try:
        extract(target, {"train": make_sequences("math", 1)}, settings, tmp_path)
        narrow = settings.model_copy(update={"dtype": "float16"})
        with pytest.raises(DataError, match=r"layer 1 .*stored as float16, computed in float32"):
            extract(target, {"train": make_sequences("math", 1)}, narrow, tmp_path)
    finally:
        handle.remove()


@pytest.mark.parametrize("length", [0, 65])
def test_a_sequence_the_target_cannot_take_is_named(target, settings, tmp_path, length):
    row = TokenSequence("math-7#0", "math", [9] * length, 1, "length")
    with pytest.raises(DataError, match=rf"'math-7#0' has {length} tokens; the target takes 1 to 64"):
        extract(target, {"train": [row]}, settings, tmp_path)


def test_a_disk_without_room_is_said_before_the_work(target, corpus, settings, tmp_path, monkeypatch):
    monkeypatch.setattr(extraction.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    monkeypatch.setattr(target, "hidden", lambda *args, **options: pytest.fail("the target ran"))
    with pytest.raises(PreflightError, match="GB are free"):
        extract(target, corpus, settings, tmp_path / "new")


def test_a_target_in_another_dtype_is_not_the_target(target, corpus, settings, tmp_path, monkeypatch, processor_flags):
    processor_flags("avx512_bf16")
    monkeypatch.setattr(target, "record", target.record.model_copy(update={"dtype": "bfloat16"}))
    with pytest.raises(ValueError, match="its own dtype, bfloat16"):
        extract(target, corpus, settings, tmp_path)


def test_an_empty_split_is_a_split(target, settings, tmp_path):
    manifest = extract(target, {"train": []}, settings, tmp_path)
    assert manifest.splits == {"train": ()}
    assert read_split(manifest, "train", tmp_path) == []


def test_batches_hold_what_fits_with_padding():
    # Longest first: 9 alone would pad to 18 with 8; 8+7 pad to 16; 3+2 ...
    assert plan_batches([2, 9, 3, 8, 7], 16) == [[1], [3, 4], [2, 0]]
    assert plan_batches([50, 1], 16) == [[0], [1]]
    assert plan_batches([], 16) == []


def test_every_sequence_is_in_exactly_one_shard(make_sequences):
    rows = make_sequences("a", 7) + make_sequences("b", 1) + make_sequences("c", 8)
    shards = plan_shards(rows, 4)
    assert [len(shard) for shard in shards] == [4, 3, 1, 4, 4]
    assert [row for shard in shards for row in shard] == rows


def test_a_store_that_is_read_only_serves_what_it_holds_and_is_named_where_it_must_take_more(
    target, corpus, settings, small_disk
):
    store = small_disk(4 << 20)
    manifest = extract(target, corpus, settings, store)
    lost = shard_path(store, manifest.splits["dev"][0].key)
    subprocess.run(["mount", "-o", "remount,ro", store], check=True)
    refuse = lambda: pytest.fail("it was loaded")  # noqa: E731
    assert ensure(manifest, refuse, refuse, settings, store, deep=True) is manifest
    assert extract(target, corpus, settings, store) == manifest
    subprocess.run(["mount", "-o", "remount,rw", store], check=True)
    lost.unlink()
    subprocess.run(["mount", "-o", "remount,ro", store], check=True)
    with pytest.raises(PreflightError, match="Read-only file system") as caught, disk_errors():
        extract(target, corpus, settings, store)
    assert str(store) in caught.value.message and "mount it for writing" in caught.value.hint


def test_a_store_that_fills_keeps_whole_shards_and_goes_on_from_them(target, corpus, settings, small_disk, tmp_path):
    """There is room for about half of the shards; the check of free space is answered before, and wrongly."""
    whole = extract(target, corpus, settings, tmp_path / "roomy")
    sizes = [entry.bytes for entries in whole.splits.values() for entry in entries]
    store = small_disk(sum(sizes) // 2 // 4096 * 4096)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(PreflightError, match=r"\.safetensors: No space left"):
        patch.setattr(extraction, "_check_room", lambda store, needed: None)
        with disk_errors():
            extract(target, corpus, settings, store)
    kept = sorted(path.name for path in store.glob("*"))
    assert 0 < len(kept) < 2 * len(sizes) and not [name for name in kept if name.startswith(".")]
    subprocess.run(["mount", "-o", f"remount,size={8 << 20}", store], check=True)
    watched = Watched()
    assert extract(target, corpus, settings, store, watched) == whole
    total, done, _ = watched.started[0]
    assert 0 < done < total


def bits(sequence):
    """Everything of a sequence, numbers as their bits: NaN is NaN."""
    tensors = (sequence.taps, sequence.last_hidden, sequence.logsumexp)
    return sequence.id, sequence.token_ids.tolist(), *(tensor.view(torch.uint8).tolist() for tensor in tensors)


def test_features_are_the_same_bits_whatever_a_sequence_shares_its_shard_with(target, corpus, settings, tmp_path):
    """On a CPU every sequence passes alone."""
    other = settings.model_copy(update={"sequences_per_shard": 3, "batch_tokens": 4096})
    one = read_split(extract(target, corpus, settings, tmp_path / "a"), "train", tmp_path / "a")
    two = read_split(extract(target, corpus, other, tmp_path / "b"), "train", tmp_path / "b")
    assert [bits(row) for row in one] == [bits(row) for row in two]


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_compressed_features_are_near_the_targets_own(target, corpus, settings, tmp_path, dtype):
    """Half a 127th of the largest number of a tap, or a sixteenth of the number itself."""
    exact = read_split(extract(target, corpus, settings, tmp_path), "train", tmp_path)
    compressed = settings.model_copy(update={"dtype": dtype})
    manifest = extract(target, corpus, compressed, tmp_path)
    found = read_split(manifest, "train", tmp_path)
    assert manifest.bytes < 0.6 * extract(target, corpus, settings, tmp_path).bytes
    for one, two in zip(exact, found, strict=True):
        for values, near in ((one.taps.unflatten(-1, (2, -1)), two.taps), (one.last_hidden, two.last_hidden)):
            largest = values.abs().amax(-1, keepdim=True)
            bound = largest / 254 if dtype == "int8" else values.abs() / 16 + largest / 448 / 1024
            assert ((near.view(values.shape) - values).abs() <= bound * 1.001).all()
        assert bits(one)[-1] == bits(two)[-1]  # logsumexp is exact


def test_nothing_is_computed_for_an_online_corpus(target, corpus, settings, tmp_path, monkeypatch):
    monkeypatch.setattr(target, "hidden", lambda *args, **options: pytest.fail("the target ran"))
    online = settings.model_copy(update={"mode": "online"})
    manifest = extract(target, corpus, online, tmp_path / "store")
    assert manifest == plan(target.record, corpus, online)
    assert (manifest.mode, manifest.bytes, damaged_shards(manifest, tmp_path)) == ("online", 0, [])
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 2.0])
def test_a_hybrid_store_stays_within_its_budget_and_begins_with_the_dev_split(
    target, corpus, settings, tmp_path, share
):
    whole = extract(target, corpus, settings, tmp_path)
    budget = share * (whole.bytes + 6 * 4096) + 1
    hybrid = settings.model_copy(update={"mode": "hybrid", "cache_gib": budget / 2**30})
    manifest = extract(target, corpus, hybrid, tmp_path)
    assert manifest.bytes <= budget
    entries = {split: [entry.key for entry in manifest.splits[split]] for split in manifest.splits}
    assert entries == {split: [entry.key for entry in whole.splits[split]] for split in whole.splits}
    stored = {split: sum(entry.stored for entry in manifest.splits[split]) for split in manifest.splits}
    assert stored == {0.0: {"train": 0, "dev": 0}, 2.0: {"train": 5, "dev": 1}}.get(share, stored)
    if share in (0.3, 0.8):
        assert stored["dev"] == 1 and 0 < stored["train"] < 5


def test_recipes_and_corpora_share_shards(target, make_sequences, settings, tmp_path):
    """The same answers in another corpus, under another mode: the same files, touched by nobody."""
    math = make_sequences("math", 7)
    first = extract(target, {"train": math, "dev": []}, settings, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    hybrid = settings.model_copy(update={"mode": "hybrid", "cache_gib": 1.0, "batch_tokens": 9})
    second = extract(target, {"train": make_sequences("chat", 2) + math}, hybrid, tmp_path)
    assert set(first.stored) < set(second.stored)
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())


def test_only_what_should_be_stored_is_made_again(target, corpus, settings, tmp_path):
    hybrid = settings.model_copy(update={"mode": "hybrid", "cache_gib": 30_000 / 2**30})
    manifest = extract(target, corpus, hybrid, tmp_path)
    assert 0 < len(manifest.stored) < 6
    key = next(iter(manifest.stored))
    shard_path(tmp_path, key).unlink()
    watched = Watched()
    assert ensure(manifest, lambda: corpus, lambda: target, hybrid, tmp_path, watched) == manifest
    assert watched.tokens == manifest.stored[key].tokens
