from __future__ import annotations

from functools import partial

import pytest
import torch

from dspark.errors import DataError, IntegrityError
from dspark.features.extraction import extract, plan
from dspark.features.online import open_split
from dspark.features.sources import loaded
from dspark.features.store import shard_path


@pytest.fixture
def corpus(make_sequences):
    """Domains take turns in the file, shards do not."""
    math, chat = make_sequences("math", 7), make_sequences("chat", 5)
    return {"train": [row for pair in zip(math, chat, strict=False) for row in pair] + math[5:], "dev": math[:2]}


def refuse():
    pytest.fail("it was asked for")


def bits(sequence):
    tensors = (sequence.taps, sequence.last_hidden, sequence.logsumexp)
    fields = (sequence.id, sequence.domain, sequence.prompt_length, sequence.token_ids.tolist())
    return *fields, *(tensor.view(torch.uint8).tolist() for tensor in tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "fp8"])
def test_online_and_hybrid_features_are_the_cached_ones_to_the_bit(target, corpus, settings, tmp_path, dtype):
    settings = settings.model_copy(update={"dtype": dtype})
    cached = extract(target, corpus, settings, tmp_path)
    budget = {"cache_gib": 0.5 * cached.bytes / 2**30}
    hybrid = extract(target, corpus, settings.model_copy(update={"mode": "hybrid", **budget}), tmp_path)
    online = plan(target.record, corpus, settings.model_copy(update={"mode": "online"}))
    assert 0 < len(hybrid.stored) < len(cached.stored) and not online.stored
    found = [
        loaded(open_split(manifest, "train", tmp_path, sequences=lambda: corpus["train"], target=lambda: target))
        for manifest in (cached, hybrid, online)
    ]
    assert len(found[0]) == 12
    assert [bits(row) for row in found[0]] == [bits(row) for row in found[1]] == [bits(row) for row in found[2]]


def test_a_row_alone_says_what_it_says_among_others(target, corpus, settings, tmp_path):
    online = plan(target.record, corpus, settings.model_copy(update={"mode": "online"}))
    rows = open_split(online, "train", tmp_path, sequences=lambda: corpus["train"], target=lambda: target, max_length=9)
    together = loaded(rows[3:8])
    for row, sequence in zip(rows[3:8], together, strict=True):
        assert torch.equal(row.taps, sequence.taps) and len(row.taps) <= 9
        assert torch.equal(row.last_hidden, sequence.last_hidden)
        assert row.token_ids.tolist() == sequence.token_ids.tolist()
        assert (row.id, row.domain, row.prompt_length) == (sequence.id, sequence.domain, sequence.prompt_length)


def test_a_stored_corpus_needs_neither_target_nor_responses(target, corpus, settings, tmp_path):
    cached = extract(target, corpus, settings, tmp_path)
    rows = open_split(cached, "dev", tmp_path, sequences=refuse, target=refuse)
    assert [row.token_ids.tolist() for row in rows] == [row.token_ids for row in corpus["dev"]]


def test_nothing_is_computed_before_somebody_asks_for_features(target, corpus, settings, tmp_path):
    online = plan(target.record, corpus, settings.model_copy(update={"mode": "online"}))
    rows = open_split(online, "train", tmp_path, sequences=lambda: corpus["train"], target=refuse)
    assert sum(len(row.token_ids) for row in rows) == sum(len(row.token_ids) for row in corpus["train"])


def test_other_responses_than_the_planned_ones_are_refused(target, corpus, settings, tmp_path):
    online = plan(target.record, corpus, settings.model_copy(update={"mode": "online"}))
    opened = partial(open_split, online, "train", tmp_path, target=lambda: target)
    changed = [*corpus["train"]]
    changed[4] = corpus["dev"][0]
    for rows in (changed, corpus["train"][:-1], corpus["train"][::-1], corpus["train"] + corpus["dev"][1:]):
        with pytest.raises(DataError, match="the responses are not those"):
            opened(sequences=lambda rows=rows: rows)


def test_another_target_is_refused(target, corpus, settings, tmp_path):
    online = plan(target.record, corpus, settings, taps=(0, 3))
    rows = open_split(online, "dev", tmp_path, sequences=lambda: corpus["dev"], target=lambda: target)
    with pytest.raises(DataError, match="another target than 'tiny', or for other taps"):
        loaded(rows)


def test_a_damaged_shard_of_a_hybrid_store_is_not_computed_in_silence(target, corpus, settings, tmp_path):
    cached = extract(target, corpus, settings, tmp_path)
    shard_path(tmp_path, cached.splits["train"][0].key).unlink()
    with pytest.raises(IntegrityError, match="missing"):
        open_split(cached, "train", tmp_path, sequences=lambda: corpus["train"], target=lambda: target)
