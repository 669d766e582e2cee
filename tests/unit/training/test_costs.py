"""What a step costs: multiplications, as torch counts them, and tables over the vocabulary that are alive at a time."""

import weakref
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from dspark.config.models import LossSettings
from dspark.drafters.kinds import build_drafter
from dspark.training import losses
from dspark.training.methods import method_of

HEADLESS = {"markov_type": "none", "markov_rank": 0, "confidence": False}
KINDS = {
    "dspark": {"layers": 2, "intermediate_size": 40},
    "dspark-rnn": {"markov_type": "rnn"},
    "dflash": HEADLESS,
    "eagle3": {"kind": "eagle3"} | HEADLESS,
}


@pytest.fixture
def make_drafter(config, target):
    return lambda kind: build_drafter(config.model_copy(update=KINDS[kind]), *target, seed=5)


@pytest.fixture
def drafter(make_drafter):
    return make_drafter("dspark")


@pytest.fixture
def make_row(make_sequences):
    """A sequence of so many tokens, the first of which is the prompt."""

    def make(length):
        (row,) = make_sequences(1, lengths=(length, length + 1))
        row.prompt_length = 1
        return row

    return make


def step(drafter, sequences, anchors, counted, labels="hard"):
    """The forward and backward pass of a step, watched by a dispatch mode."""
    method = method_of(drafter.config)
    batch = method.batch(sequences, [np.array(a) for a in anchors], drafter.config, None, 64)
    objective = method.objective(drafter, LossSettings(labels=labels), low_precision=False)
    denominators = objective.denominators(batch)
    with counted:
        objective(batch, denominators)[0].backward()
    return counted


def flops(drafter, sequences, anchors):
    return step(drafter, sequences, anchors, FlopCounterMode(display=False)).get_total_flops()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_computed_for_padding(make_drafter, make_row, kind):
    """A long sequence with many anchors beside a short one with one costs what both cost apart, to the last product."""
    drafter = make_drafter(kind)
    long, short, many, one = make_row(48), make_row(6), range(2, 40), [2]
    apart = flops(drafter, [long], [many]) + flops(drafter, [short], [one])
    assert flops(drafter, [long, short], [many, one]) == apart


def test_the_cost_of_drafting_follows_anchors_and_not_the_context(drafter, make_row):
    """A token more of context costs its projection, keys and values, and a score and a weight in every slot.

    Counted out for d 16, two taps, two layers, heads 2 x 8, kv heads 1 x 8 and blocks of 3; times 3 for the backward
    pass (no gradient reaches the features: 2 for the projection). An anchor more costs over ten times as much.
    """
    base, longer, more = (flops(drafter, [make_row(60)], [anchors]) for anchors in ([10, 20], [10, 21], [9, 10, 20]))
    context = 2 * (2 * 32 * 16) + 3 * 2 * (2 * 16 * 16)
    scores = 3 * 2 * (2 * 2 * 3 * 2 * 16)
    assert longer - base == context + scores
    assert more - base > 10 * (longer - base)


class Tables(TorchDispatchMode):
    """The most bytes of tables over the vocabulary that were alive at a time; transposed weights are none."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary = vocabulary
        self.alive, self.bytes, self.most = Counter(), {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, torch.Tensor) and one.dim() == 2 and one.shape[1] == self.vocabulary:
                self.note(one)
        return found

    def note(self, table):
        if not table.is_contiguous():
            return
        memory = table.untyped_storage()
        place = memory.data_ptr()
        self.bytes[place] = memory.nbytes()
        self.alive[place] += 1
        weakref.finalize(table, self.alive.subtract, [place])
        self.most = max(self.most, sum(self.bytes[place] for place, count in self.alive.items() if count > 0))


@pytest.mark.parametrize("labels", ["hard", "soft"])
def test_no_more_than_one_chunk_over_the_vocabulary_is_alive(drafter, make_row, monkeypatch, labels):
    """A chunk's logits of drafter and target, and the drafter's distribution at two slots of it.

    Soft labels need exponentials of these two slots' logits for a moment. Where a chunk is as large as the batch, there
    are three tables of all slots; the plain formula has more.
    """
    vocabulary, rows, anchors = drafter.config.vocab_size, [make_row(30), make_row(20)], [range(2, 12), range(2, 9)]
    monkeypatch.setattr(losses, "ROWS", 4)
    monkeypatch.setattr(losses, "CACHED", 2 * vocabulary)
    chunked = step(drafter, rows, anchors, Tables(vocabulary), labels).most
    assert chunked / (4 * vocabulary) == 4 + 4 + 2 + (2 if labels == "soft" else 0)
    monkeypatch.setattr(losses, "ROWS", 1000)
    monkeypatch.setattr(losses, "CACHED", 1000 * vocabulary)
    assert step(drafter, rows, anchors, Tables(vocabulary), labels).most >= 3 * 17 * 3 * 4 * vocabulary
