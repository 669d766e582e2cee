import math

import pytest
import torch

from dspark.config.models import LossSettings
from dspark.drafters.dspark import DSparkDrafter
from dspark.training.batches import Batch
from dspark.training.development import DevBatch, DevBatches, dev_metrics, dev_sums, greedy_tokens
from dspark.training.losses import SlotLosses, SlotTargets
from dspark.training.objective import Sums, TrainingObjective

CPU = torch.device("cpu")


def test_accepted_length_by_hand(config, target):
    """Three blocks of three slots, the last with two supervised. Matches: 1 1 0 | 0 1 1 | 1 1 .

    Leading matches 2, 0, 2: tau = 1 + 4/3. L1 = .5 everywhere: acceptance .75, expected lengths .75 + .75^2 + .75^3
    twice and .75 + .75^2 once.
    """
    slot_rows = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7])
    slots = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    matches = torch.tensor([1, 1, 0, 0, 1, 1, 1, 1])
    best = torch.arange(8)
    found = SlotLosses(torch.full((8,), 2.0), torch.full((8,), 0.5), torch.ones(8), best)
    sums = Sums(*torch.tensor([8.0, 8.0, 16.0, 4.0, 8.0]))

    class Fixed:
        drafter = DSparkDrafter(config, *target)

        def denominators(self, batch):
            return torch.ones(2)

        def __call__(self, batch, denominators):
            return torch.zeros(()), sums, found, torch.zeros(8)  # confidence 1/2, off by .25

    empty = torch.zeros(0)
    targets = SlotTargets(torch.zeros(8), empty, empty, slots)
    batch = Batch(empty, empty, empty, torch.zeros(1, 3), empty, slot_rows, empty, targets)
    dev = DevBatch(batch, torch.where(matches == 1, best, -1))
    once = dev_sums(Fixed(), [dev], CPU)
    metrics = dev_metrics(once, 3)
    assert metrics["dev_anchor_tau"] == pytest.approx(1 + 4 / 3)
    assert metrics["dev_anchor_tau_sampled"] == pytest.approx(1 + (3 * (0.75 + 0.75**2) + 2 * 0.75**3) / 3)
    assert metrics["dev_greedy_match"] == pytest.approx([2 / 3, 1.0, 1 / 2])
    assert metrics["dev_acceptance"] == pytest.approx([0.75] * 3)
    assert metrics["dev_confidence_error"] == pytest.approx([0.25] * 3)
    assert metrics["dev_cross_entropy"] == 2.0
    assert (metrics["dev_l1"], metrics["dev_confidence"]) == (0.5, 1.0)
    # Accepted are 3/4 of the slots, the logit of which is ln 3; there is nothing to scale where all are alike.
    twice = dev_metrics(dev_sums(Fixed(), [dev] * 2000, CPU), 3)
    assert twice.pop("dev_confidence_fit") == pytest.approx([1, math.log(3)], abs=1e-3)
    del metrics["dev_confidence_fit"]
    assert all(twice[name] == pytest.approx(value) for name, value in metrics.items())  # means, not sums


def test_greedy_tokens_are_the_target_s_argmax(target):
    _, head = target
    hidden = torch.randn(700, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(greedy_tokens(hidden, head, low_precision=False), (hidden @ head.T).argmax(-1))


def test_dev_batches_hold_every_sequence_and_the_target_s_own_tokens(config, target, make_sequences):
    """The counting target's argmax is the next token, so it equals the label, as a draft column where there is one."""
    rows = make_sequences(5)
    drafter = DSparkDrafter(config, *target)
    objective = TrainingObjective(drafter, LossSettings(), low_precision=False)
    batches = DevBatches(rows, objective, target[1], None, size=2, max_length=64, device=CPU)
    assert [len(dev.batch.packing.blocks) for dev in batches] == [2, 2, 1]
    assert all(torch.equal(dev.target_columns, dev.batch.targets.labels) for dev in batches)
    columns = torch.full((24,), -1)
    columns[:10] = torch.arange(10)
    reduced = DevBatches(rows, objective, target[1], columns, size=2, max_length=64, device=CPU)
    assert all(torch.equal(dev.target_columns, dev.batch.targets.labels) for dev in reduced)
    assert any((dev.target_columns == -1).any() for dev in reduced)


def test_a_drafter_that_copies_the_target_accepts_everything(config, target, make_sequences):
    """tau is then 1 + the mean number of supervised slots."""
    rows = make_sequences(4)
    drafter = DSparkDrafter(config, *target)

    class Perfect(TrainingObjective):
        def states(self, batch):
            markov = torch.zeros(len(batch.slot_rows), config.markov_rank)
            return batch.targets.target_hidden.clone(), markov, markov

    objective = Perfect(drafter, LossSettings(), low_precision=False)
    batches = DevBatches(rows, objective, target[1], None, size=2, max_length=64, device=CPU)
    metrics = dev_metrics(dev_sums(objective, batches, CPU), config.gamma)
    slots = sum(len(dev.batch.slot_rows) for dev in batches)
    anchors = sum(len(set((dev.batch.slot_rows // config.gamma).tolist())) for dev in batches)
    assert metrics["dev_anchor_tau"] == pytest.approx(1 + slots / anchors)
    assert metrics["dev_anchor_tau_sampled"] == pytest.approx(1 + slots / anchors, abs=1e-4)
    assert metrics["dev_l1"] == pytest.approx(0, abs=1e-5)


def test_batches_that_are_not_kept_are_made_anew_the_same(config, target, make_sequences):
    """A dev split of any size takes the same memory: none of these batches is kept, or the first one alone."""
    rows = make_sequences(5)
    objective = TrainingObjective(DSparkDrafter(config, *target), LossSettings(), low_precision=False)
    split = {"size": 2, "max_length": 64, "device": CPU}
    kept = DevBatches(rows, objective, target[1], None, **split)
    first = next(iter(kept)).batch
    for budget, same in ((0, 0), (first.nbytes, 1)):
        anew = DevBatches(rows, objective, target[1], None, **split, keep_bytes=budget)
        assert len(anew) == len(kept) == 3
        assert sum(one.batch is two.batch for one, two in zip(anew, anew, strict=True)) == same
        assert torch.equal(dev_sums(objective, anew, CPU), dev_sums(objective, kept, CPU))
