"""Rows of different widths without padding: the same numbers for fewer tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from dspark.decoding import loop
from dspark.decoding.cache import SlotCache
from dspark.decoding.drafting import TorchProposer
from dspark.decoding.loop import decode
from dspark.decoding.policies import Logits, Threshold
from dspark.decoding.ragged import Ragged
from dspark.evaluation.tiny import tiny_drafter, tiny_target
from dspark.targets import attention
from dspark.targets.loading import Target

CPU = torch.device("cpu")
PROMPTS = [[3, 4, 5], [7] * 9, [2, 9, 30, 4, 5], [5, 6], [11, 12, 13, 14, 15, 16], [8, 2]]


def counts(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_tokens_are_laid_one_behind_the_other_and_back():
    ragged = Ragged.of(counts(1, 3, 2), CPU)
    assert ragged is not None
    rows = torch.arange(18).reshape(3, 3, 2)
    packed = ragged.pack(rows)
    assert packed[0, :, 0].tolist() == [0, 6, 8, 10, 12, 14]
    back = ragged.spread(packed)
    assert torch.equal(back[ragged.real], rows[ragged.real]) and back[0, 1:].count_nonzero() == 0


def test_a_little_padding_is_computed():
    """Of 3 x 4 places, 3 without a token are a quarter, 2 are less; rows of one width have none."""
    assert Ragged.of(counts(4, 4, 1), CPU) is not None
    assert Ragged.of(counts(4, 4, 2), CPU) is None
    assert Ragged.of(counts(4, 4, 4), CPU) is None
    assert Ragged.of(counts(5), CPU) is None


@pytest.fixture
def packing(family_target: Target) -> Iterator[Target]:
    """The same with the attention that targets are loaded with on a CPU."""
    before = family_target.model.config._attn_implementation
    family_target.model.set_attn_implementation(attention.register())
    yield family_target
    family_target.model.set_attn_implementation(before)


def test_a_packed_pass_equals_one_pass_per_sequence(packing: Target):
    """Prompts padded, then 1, 3 and 2 tokens packed, of which 1, 2 and 2 are kept, then again; windows are outgrown."""
    assert packing.packs
    texts = [[3, 4, 5, 6, 7], [11, 12, 13, 14, 15, 16, 17], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29]]
    cache = SlotCache(packing.record.num_layers, 3, 12)
    ids = torch.tensor([[3, 4, 39, 39], [11, 12, 13, 39], [20, 21, 22, 23]])
    positions, mask = cache.window(4, CPU)
    packing.last_hidden(ids, attention_mask=mask, position_ids=positions, cache=cache)
    cache.advance(counts(2, 3, 4))

    def run(rows: list[list[int]]) -> torch.Tensor:
        widths = counts(*map(len, rows))
        ragged = Ragged.of(widths, CPU)
        assert ragged is not None
        ids = torch.tensor([[token for row in rows for token in row]])
        positions, mask = cache.ragged_window(ragged)
        output = packing.hidden(ids, attention_mask=mask, position_ids=positions, cache=cache)
        assert output.taps.shape[:2] == output.last_hidden.shape[:2] == ids.shape
        return ragged.spread(output.last_hidden)

    run([[5], [14, 15, 39], [24, 25]])
    cache.advance(counts(1, 2, 2))
    last = run([[6, 7], [16, 17], [26, 27, 28, 29]])
    for row, (text, width) in enumerate(zip(texts, (2, 2, 4), strict=True)):
        whole = packing.last_hidden(torch.tensor([text]))[0, -width:]
        torch.testing.assert_close(last[row, :width], whole, atol=2e-5, rtol=1e-4)


def test_a_packed_window_beyond_the_capacity_is_refused():
    cache = SlotCache(1, 3, 6)
    cache.advance(counts(5, 1, 1))
    ragged = Ragged.of(counts(1, 4, 1), CPU)
    assert ragged is not None
    positions, mask = cache.ragged_window(ragged)
    assert positions.tolist() == [[5, 1, 2, 3, 4, 1]] and mask.shape == (3, 1, 4, 6)
    assert mask[1, 0].int().tolist() == [[1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]
    assert not mask[0, 0, 1:].any() and not mask[2, 0, 1:].any()
    cache.advance(counts(1, 4, 0))
    with pytest.raises(ValueError, match="no room up to 9 of 6"):
        cache.ragged_window(ragged)


class Uneven:
    """As many drafts of each row as its number, so that widths differ and move with the rows."""

    name, drafts = "uneven", True

    def lengths(self, confidence_logits: Logits) -> np.ndarray:
        return np.arange(len(confidence_logits)) % 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("policy", [Uneven(), Threshold(0.5)], ids=["uneven", "threshold"])
def test_texts_and_decisions_are_the_same_and_padding_is_not_computed(
    temperature: float, policy: Any, monkeypatch: pytest.MonkeyPatch
):
    target = tiny_target(40, spread=0.5)
    proposer = TorchProposer(tiny_drafter(target, 3))
    options = {"max_new_tokens": 12, "policy": policy, "temperature": temperature, "batch_size": 6}
    padded = decode(target, proposer, PROMPTS, **options)
    target.model.set_attn_implementation(attention.register())
    seen: list[int] = []
    packed: list[int] = []
    target.decoder.embed_tokens.register_forward_pre_hook(lambda module, given: seen.append(given[0].numel()))
    real = loop.SlotCache.ragged_window

    def window(cache: SlotCache, ragged: Ragged) -> Any:
        packed.append(int(ragged.real.sum()))
        return real(cache, ragged)

    monkeypatch.setattr(loop.SlotCache, "ragged_window", window)
    done = decode(target, proposer, PROMPTS, **options)
    assert packed, "no step was worth packing: nothing was tested"
    for one, other in zip(done, padded, strict=True):
        assert one.token_ids == other.token_ids
        for name in ("drafted", "verified", "accepted", "known"):
            assert (getattr(one.cycles, name) == getattr(other.cycles, name)).all()
    assert set(packed) <= set(seen), "the target looked at more than was verified"


def test_packed_queries_attend_as_they_do_apart():
    """Rows of 1 and 3 queries on 4 keys, grouped heads, against each row by itself."""
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(1, 6, 4, 8, generator=generator)
    key, value = (torch.randn(2, 3, 4, 8, generator=generator) for _ in range(2))
    mask = torch.tensor([[[1, 1, 0, 0], [0] * 4, [0] * 4], [[1, 1, 0, 0], [1, 1, 1, 0], [1] * 4]]).bool()[:, None]
    found, _ = attention.grouped_attention(torch.nn.Module(), query, key, value, mask, scaling=0.3)
    assert found.shape == (1, 4, 6, 8)
    for row, (places, width) in enumerate(((slice(0, 1), 1), (slice(1, 4), 3))):
        alone, _ = attention.grouped_attention(
            torch.nn.Module(), query[:, :, places], key[row : row + 1], value[row : row + 1],
            mask[row : row + 1, :, :width], scaling=0.3,
        )  # fmt: skip
        torch.testing.assert_close(found[:, places], alone)
