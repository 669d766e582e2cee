"""The objective of a batch against a plain reading of deepspec.md, section 2, slot by slot."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from dspark.config.models import LossSettings
from dspark.drafters.dspark import DSparkDrafter
from dspark.training.batches import make_batch
from dspark.training.objective import TrainingObjective, mean_losses
from dspark.training.vocabulary import draft_columns

ANCHORS = [[3, 5], [2], [4, 6, 7]]
GEMMA4 = {"layer_style": "gemma4", "shared_key_value": True, "logit_cap": 2.0}


@pytest.fixture
def sequences(make_sequences):
    return make_sequences(3, seed=2, lengths=(10, 11))


def capped(logits, cap):
    return logits if cap is None else cap * torch.tanh(logits / cap)


def make(config, target, reduced, kind="vanilla"):
    ids = torch.tensor([0, 2, 3, 4, 5, 8, 9, 12, 13, 14, 20, 23]) if reduced else None
    config = config.model_copy(update={"draft_vocab_size": 12 if reduced else None, "markov_type": kind})
    drafter = DSparkDrafter(config, *target, ids, seed=5)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        drafter.markov_head.reset_constant_channel()
    return drafter, ids


def bias(head, row, h, state):
    """B of one slot and the next state, as deepspec.md, section 1.2 has them."""
    if head.kind == "gated":
        row = torch.sigmoid(head.gate_proj.weight @ torch.cat([h, row]) + head.gate_proj.bias) * row
    elif head.kind == "rnn":
        joined = head.joint_proj.weight @ torch.cat([state, row, h]) + head.joint_proj.bias
        gate, candidate, output = torch.sigmoid(joined[:4]), torch.tanh(joined[4:8]), torch.tanh(joined[8:])
        row, state = output, gate * state + (1 - gate) * candidate
    return head.markov_w2.weight @ row, state


def plain(drafter, target, sequences, settings, ids, *, label_shift=0, sees=0, offset=0, target_shift=0):
    """Objective of all blocks, one at a time; the keyword arguments are for mutants."""
    _, head = target
    gamma = drafter.config.gamma
    allowed = torch.arange(len(head)) if ids is None else ids
    sums = {"ce": 0.0, "l1": 0.0, "bce": 0.0, "w": 0.0, "w_label": 0.0}
    for sequence, anchors in zip(sequences, ANCHORS, strict=True):
        tokens = sequence.token_ids.tolist()
        for p in anchors:
            context = drafter.project(sequence.taps)[None]
            length = context.shape[1]
            h = drafter.block_hidden(
                torch.tensor([[[tokens[p]] + [drafter.config.mask_token_id] * (gamma - 1)]]),
                context,
                torch.arange(length)[None],
                torch.arange(p, p + gamma)[None, None] + offset,
                (torch.arange(length) < p + sees)[None, None],
            )[0, 0]
            state = torch.zeros(drafter.config.markov_rank)
            for j in range(gamma):
                if p + 1 + j >= len(tokens) - label_shift:
                    break
                w = math.exp(-j / 4)
                label = tokens[p + 1 + j + label_shift]
                previous = torch.tensor(tokens[p + j])
                logits = torch.full((len(head),), -math.inf)
                row = drafter.markov_head.markov_w1(previous)
                added, state = bias(drafter.markov_head, row, h[j], state)
                logits[allowed] = capped(head[allowed] @ h[j], drafter.config.logit_cap) + added
                draft = torch.softmax(logits, -1)
                known = head @ sequence.last_hidden[p + j + target_shift]
                known = torch.softmax(capped(known, drafter.config.logit_cap), -1)
                l1 = (draft - known).abs().sum()
                if settings.labels == "soft":
                    sums["ce"] = sums["ce"] - w * (known[allowed] * torch.log_softmax(logits, -1)[allowed]).sum()
                    sums["w_label"] += w
                elif label in allowed.tolist():
                    sums["ce"] = sums["ce"] - w * torch.log_softmax(logits, -1)[label]
                    sums["w_label"] += w
                z = drafter.confidence_logits(h[j], previous)
                sums["bce"] = sums["bce"] + w * functional.binary_cross_entropy_with_logits(z, 1 - l1.detach() / 2)
                sums["l1"] = sums["l1"] + w * l1
                sums["w"] += w
    return (
        settings.cross_entropy * sums["ce"] / sums["w_label"]
        + settings.l1 * sums["l1"] / sums["w"]
        + settings.confidence * sums["bce"] / sums["w"]
    )


def found(drafter, sequences, settings, ids):
    columns = None if ids is None else draft_columns(ids, drafter.config.vocab_size)
    batch = make_batch(sequences, [np.array(a) for a in ANCHORS], drafter.config.gamma, columns)
    objective = TrainingObjective(drafter, settings, low_precision=False)
    return objective(batch, objective.denominators(batch))


@pytest.mark.parametrize("labels", ["hard", "soft"])
@pytest.mark.parametrize(("kind", "reduced"), [("vanilla", False), ("vanilla", True), ("gated", False), ("rnn", False)])
@pytest.mark.parametrize("changes", [{}, GEMMA4], ids=["qwen3", "gemma4"])
def test_the_objective_and_all_gradients_equal_the_plain_one(config, target, sequences, changes, kind, reduced, labels):
    settings = LossSettings(labels=labels)
    drafter, ids = make(config.model_copy(update=changes), target, reduced, kind)
    for sequence in sequences:
        logits = capped(sequence.last_hidden @ target[1].T, drafter.config.logit_cap)
        sequence.logsumexp = torch.logsumexp(logits, -1)
    value, sums, _, _ = found(drafter, sequences, settings, ids)
    losses = mean_losses(sums.stacked())
    assert value.item() == pytest.approx(0.1 * losses["cross_entropy"] + 0.9 * losses["l1"] + losses["confidence"])
    expected = plain(drafter, target, sequences, settings, ids)
    assert value.item() == pytest.approx(expected.item(), abs=1e-5)
    names = [name for name, _ in drafter.named_parameters()]
    ours = torch.autograd.grad(value, list(drafter.parameters()))
    theirs = torch.autograd.grad(expected, list(drafter.parameters()))
    for name, one, two in zip(names, ours, theirs, strict=True):
        if reduced and "markov_w1" in name:
            one, two = one[:, 1:], two[:, 1:]  # the constant channel is not trained
        assert torch.allclose(one, two, atol=1e-5), name
        assert (one != 0).any(), name


@pytest.mark.parametrize("mutant", [{"label_shift": 1}, {"sees": 1}, {"offset": 1}, {"target_shift": 1}])
def test_shifted_labels_context_with_the_anchor_rope_off_by_one_and_shifted_targets_are_caught(
    config, target, sequences, mutant
):
    drafter, ids = make(config, target, False)
    value = found(drafter, sequences, LossSettings(), ids)[0].item()
    assert abs(value - plain(drafter, target, sequences, LossSettings(), ids, **mutant).item()) > 1e-3


def test_the_confidence_is_not_taught_from_sampled_tokens(config, target, sequences):
    """A mutant target, whether the drafter's own best token is the label, is far from the analytic acceptance."""
    drafter, ids = make(config, target, False)
    settings = LossSettings(cross_entropy=0, l1=0, confidence=1)
    _, _, slots, logits = found(drafter, sequences, settings, ids)
    analytic = functional.binary_cross_entropy_with_logits(logits, 1 - slots.l1 / 2)
    sampled = functional.binary_cross_entropy_with_logits(logits, (slots.l1 < 1).float())
    assert abs(analytic - sampled) > 1e-2


def test_the_confidence_gradient_reaches_the_backbone_and_the_context(config, target, sequences):
    drafter, ids = make(config, target, False)
    settings = LossSettings(cross_entropy=0, l1=0, confidence=1)
    found(drafter, sequences, settings, ids)[0].backward()
    for parameter in (drafter.fc.weight, drafter.norm.weight, drafter.markov_head.markov_w1.weight):
        assert (parameter.grad != 0).any()
    assert (drafter.markov_head.markov_w2.weight.grad == 0).all()


def test_bfloat16_stays_close(config, target, sequences):
    drafter, _ = make(config, target, False)
    batch = make_batch(sequences, [np.array(a) for a in ANCHORS], 3, None)
    values = []
    for low_precision in (False, True):
        objective = TrainingObjective(drafter, LossSettings(), low_precision=low_precision)
        values.append(objective(batch, objective.denominators(batch))[0].item())
    assert values[0] == pytest.approx(values[1], rel=0.02)
    assert values[0] != values[1]


def test_two_batches_with_common_denominators_add_up_to_the_whole(config, target, sequences):
    """What ranks do: each has its own batch, all divide by the sums of all."""
    drafter, _ = make(config, target, False)
    objective = TrainingObjective(drafter, LossSettings(), low_precision=False)
    anchors = [np.array(a) for a in ANCHORS]
    whole = make_batch(sequences, anchors, 3, None)
    parts = [make_batch(sequences[:1], anchors[:1], 3, None), make_batch(sequences[1:], anchors[1:], 3, None)]
    common = sum(objective.denominators(part) for part in parts)
    assert torch.allclose(common, objective.denominators(whole))
    total = sum(objective(part, common)[0] for part in parts)
    assert torch.allclose(total, objective(whole, common)[0], atol=1e-5)
