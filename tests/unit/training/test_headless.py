"""Training without heads: DFlash by cross entropy, by DSpark's loss, one token at a time, and on into DSpark."""

import csv
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dspark.config.models import LossSettings
from dspark.drafters.kinds import build_drafter
from dspark.errors import SettingsError
from dspark.training.batches import make_batch
from dspark.training.methods import method_of
from dspark.training.objective import TrainingObjective
from dspark.training.trainer import train
from dspark.training.warm_start import Initial, warm_start

HEADLESS = {"markov_type": "none", "markov_rank": 0, "confidence": False}
CROSS_ENTROPY = LossSettings(cross_entropy=1.0, l1=0.0, confidence=0.0)
TOTAL_VARIATION = LossSettings(confidence=0.0)
RECORD = SimpleNamespace(
    name="tiny",
    public_id=None,
    architecture="LlamaForCausalLM",
    revision="x",
    embedding_digest="e",
    head_digest="h",
    eos_token_ids=(2,),
)


@pytest.fixture
def headless(config):
    return config.model_copy(update=HEADLESS)


@pytest.mark.parametrize("settings", [CROSS_ENTROPY, TOTAL_VARIATION])
@pytest.mark.parametrize("gamma", [1, 3])
def test_the_objective_and_its_gradients_are_those_of_softmaxes_of_the_lm_head(
    headless, target, make_sequences, settings, gamma
):
    """One sequence, one block: everything written out with the LM head's logits alone."""
    embedding, head = target
    drafter = build_drafter(headless.model_copy(update={"gamma": gamma}), embedding, head, seed=4)
    (sequence,) = make_sequences(1, lengths=(12, 13))
    p = 5
    batch = make_batch([sequence], [np.array([p])], gamma, None)
    objective = TrainingObjective(drafter, settings, low_precision=False)
    value, sums, _, confidences = objective(batch, objective.denominators(batch))
    context = drafter.project(sequence.taps[:p])[None]
    states = drafter.block_hidden(
        torch.tensor([[[int(sequence.token_ids[p])] + [1] * (gamma - 1)]]),
        context,
        torch.arange(p)[None],
        torch.arange(p, p + gamma)[None, None],
        torch.ones(1, 1, p, dtype=torch.bool),
    )[0, 0]
    logs = torch.log_softmax(states @ head.T, -1)
    known = torch.softmax(sequence.last_hidden[p : p + gamma] @ head.T, -1)
    weights = torch.tensor([math.exp(-slot / 4) for slot in range(gamma)])
    surprise = -logs[torch.arange(gamma), sequence.token_ids[p + 1 : p + 1 + gamma]]
    distance = (logs.exp() - known).abs().sum(-1)
    expected = ((settings.cross_entropy * surprise + settings.l1 * distance) * weights).sum() / weights.sum()
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    assert confidences is None and sums.confidence.item() == 0
    names = [name for name, _ in drafter.named_parameters()]
    assert not any("_head" in name for name in names)
    ours = torch.autograd.grad(value, list(drafter.parameters()))
    theirs = torch.autograd.grad(expected, list(drafter.parameters()))
    for name, one, two in zip(names, ours, theirs, strict=True):
        assert torch.allclose(one, two, atol=1e-5), name


@pytest.fixture
def run(target, make_sequences, make_settings):
    train_rows, dev_rows = make_sequences(9), make_sequences(4, seed=1)

    def go(work, config, initial=None, **changes):
        settings = make_settings(**{"loss": CROSS_ENTROPY} | changes)
        return train(config, *target, train_rows, dev_rows, settings, work, eos_token_ids=[2], initial=initial)

    return go


@pytest.mark.parametrize("reduced", [None, pytest.param(12, marks=pytest.mark.long)])
def test_training_learns_a_target_that_counts_and_says_nothing_of_confidences(run, tmp_path, headless, reduced):
    """Every next token is the last one plus one: 1.0 is no draft accepted."""
    config = headless.model_copy(update={"layers": 2, "draft_vocab_size": reduced})
    how = {"steps": 120, "sequences_per_step": 8, "learning_rate": 1e-2, "dev_every_steps": 40}
    result = run(tmp_path / "work", config, **how)
    assert result.curves[-1]["loss"] < 0.7 * result.curves[0]["loss"]
    assert result.metrics.best.dev_anchor_tau > 1.5
    best = result.metrics.best
    assert best.dev_confidence is None and best.dev_confidence_error is None and len(best.dev_acceptance) == 3
    result.write(tmp_path / "out", RECORD)
    rows = list(csv.DictReader((tmp_path / "out/curves.csv").open()))
    assert {row["confidence"] for row in rows} == {row["dev_confidence"] for row in rows} == {""}
    assert all(row["l1"] for row in rows)


def test_a_one_token_drafter_is_trained_on_every_position(run, tmp_path, headless):
    config = headless.model_copy(update={"gamma": 1})
    result = run(tmp_path, config, steps=60, sequences_per_step=8, learning_rate=1e-2, anchors_per_sequence=64)
    assert 1.3 < result.metrics.best.dev_anchor_tau <= 2.0


@pytest.mark.parametrize(("kind", "reduced"), [("vanilla", None), ("vanilla", 12), ("gated", None), ("rnn", None)])
def test_dspark_begins_with_the_drafts_of_the_dflash_that_it_starts_from(
    run, tmp_path, config, headless, make_sequences, target, kind, reduced
):
    vocabulary = {"draft_vocab_size": reduced}
    first = run(tmp_path / "first", headless.model_copy(update=vocabulary), steps=4)
    heads = config.model_copy(update=vocabulary | {"markov_type": kind})
    second = run(tmp_path / "second", heads, Initial(first.drafter), loss=LossSettings(), steps=4)
    before, after = first.metrics.best, second.metrics.initial
    assert after.dev_anchor_tau == before.dev_anchor_tau
    assert after.dev_cross_entropy == pytest.approx(before.dev_cross_entropy, rel=1e-6)
    assert after.dev_confidence is not None
    # Nothing said is nothing to lose by, but it learns at once.
    assert bool(second.drafter.markov_head.markov_w2.weight.any())


def test_heads_are_added_but_never_dropped(config, headless, target):
    full, bare = build_drafter(config, *target), build_drafter(headless, *target)
    with pytest.raises(SettingsError, match=r"markov_type is vanilla, here none; markov_rank is 4, here 0; confidence"):
        warm_start(bare, Initial(full), [], None)
    deeper = headless.model_copy(update={"layers": 2})
    with pytest.raises(SettingsError, match=r"weights: layers is 1, here 2$"):
        method_of(deeper).require_startable(deeper, Initial(bare))
