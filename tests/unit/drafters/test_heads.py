"""The sequential heads against their equations, written out in numpy (deepspec.md, section 1.2)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark.decoding.drafting import TorchProposer
from dspark.decoding.draws import CounterDraws
from dspark.drafters.checkpoint import read_checkpoint, write_deepspec, write_training_checkpoint, write_union
from dspark.errors import IntegrityError

KINDS = ["vanilla", "gated", "rnn"]
RANK, WIDTH, GAMMA, BLOCKS = 4, 32, 4, 3


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def weights_of(drafter):
    return {name: value.double().numpy() for name, value in drafter.markov_head.state_dict().items()}


def by_hand(drafter, hidden, previous, mutant=None):
    """Bias of every slot of one block.

    Args:
        hidden: [gamma, d].
        previous: the token before each slot, [gamma].
        mutant: a mistake to make.
    Returns:
        [gamma, V].
    """
    w, state, found = weights_of(drafter), np.zeros(RANK), []
    if mutant == "state starts at one":
        state = np.ones(RANK)
    for h, token in zip(np.asarray(hidden, np.float64), previous, strict=True):
        e = w["markov_w1.weight"][token]
        if drafter.config.markov_type == "vanilla":
            z = e
        elif drafter.config.markov_type == "gated":
            joined = [e, h] if mutant == "inputs swapped" else [h, e]
            z = sigmoid(w["gate_proj.weight"] @ np.concatenate(joined) + w["gate_proj.bias"]) * e
            if mutant == "tanh gate":
                z = np.tanh(w["gate_proj.weight"] @ np.concatenate(joined) + w["gate_proj.bias"]) * e
        else:
            joined = [e, state, h] if mutant == "inputs swapped" else [state, e, h]
            out = w["joint_proj.weight"] @ np.concatenate(joined) + w["joint_proj.bias"]
            gate, candidate, output = out[:RANK], out[RANK : 2 * RANK], out[2 * RANK :]
            if mutant == "outputs swapped":
                gate, output = output, gate
            after = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
            z = np.tanh(output)
            state = np.zeros(RANK) if mutant == "state forgotten" else after
        found.append(w["markov_w2.weight"] @ z)
    return np.stack(found)


def inputs():
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(BLOCKS, GAMMA, WIDTH, generator=generator)
    return hidden, torch.randint(0, 40, (BLOCKS, GAMMA), generator=generator)


def along(drafter, hidden, previous):
    """The chain of the drafter over some blocks at once, [blocks, gamma, V]."""
    chain = drafter.chain()
    return torch.stack([chain.bias(previous[:, slot], hidden[:, slot]) for slot in range(GAMMA)], 1)


@pytest.mark.parametrize("kind", KINDS)
def test_each_head_is_its_equation(make_drafter, kind):
    drafter = make_drafter(markov_type=kind)
    hidden, previous = inputs()
    expected = np.stack([by_hand(drafter, h, u) for h, u in zip(hidden, previous, strict=True)])
    assert np.allclose(along(drafter, hidden, previous).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "mutant"),
    [
        ("gated", "inputs swapped"),
        ("gated", "tanh gate"),
        ("rnn", "inputs swapped"),
        ("rnn", "outputs swapped"),
        ("rnn", "state forgotten"),
        ("rnn", "state starts at one"),
    ],
)
def test_another_order_or_memory_is_another_head(make_drafter, kind, mutant):
    drafter = make_drafter(markov_type=kind)
    hidden, previous = inputs()
    wrong = np.stack([by_hand(drafter, h, u, mutant) for h, u in zip(hidden, previous, strict=True)])
    assert np.abs(along(drafter, hidden, previous).numpy() - wrong).max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_slot_hears(make_drafter, kind):
    """Every head its own previous token; gated and rnn the slot's state; rnn alone the slots before."""
    drafter = make_drafter(markov_type=kind)
    hidden, previous = inputs()
    before = along(drafter, hidden, previous)
    other, moved = previous.clone(), hidden.clone()
    other[:, 1] = (other[:, 1] + 1) % 40
    moved[:, 1] += 1
    by_token = (along(drafter, hidden, other) != before).any(-1).any(0).tolist()
    by_state = (along(drafter, moved, previous) != before).any(-1).any(0).tolist()
    later = kind == "rnn"
    assert by_token == [False, True, later, later]
    assert by_state == [False, kind != "vanilla", later, later]


def test_a_new_chain_remembers_nothing(make_drafter):
    drafter = make_drafter(markov_type="rnn")
    hidden, previous = inputs()
    chain = drafter.chain()
    first = chain.bias(previous[:, 0], hidden[:, 0])
    assert not torch.equal(chain.bias(previous[:, 0], hidden[:, 0]), first)
    assert torch.equal(drafter.chain().bias(previous[:, 0], hidden[:, 0]), first)


def test_further_parameters_are_named_and_shaped_as_deepspec_names_them(make_drafter):
    """deepspec.md, section 1.2, with d 32, r 4: [r, d + r] and [3 r, 2 r + d], both with a bias."""
    plain = {name for name, _ in make_drafter().named_parameters()}
    for kind, shapes in (
        ("gated", {"markov_head.gate_proj.weight": (4, 36), "markov_head.gate_proj.bias": (4,)}),
        ("rnn", {"markov_head.joint_proj.weight": (12, 40), "markov_head.joint_proj.bias": (12,)}),
    ):
        found = {name: tuple(value.shape) for name, value in make_drafter(markov_type=kind).named_parameters()}
        assert {name: shape for name, shape in found.items() if name not in plain} == shapes
        assert plain <= set(found)


@pytest.mark.parametrize("kind", KINDS)
def test_drafting_follows_the_equations_token_by_token(make_drafter, kind):
    """Greedy drafts and confidences by hand; the confidence hears the row of W1, whatever the head makes of it."""
    drafter = make_drafter(markov_type=kind)
    features = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(2))
    proposer = TorchProposer(drafter)
    proposer.begin(1, 8)
    proposer.extend(features, np.array([6]))
    found = proposer.propose(torch.tensor([9]), 0.0, CounterDraws([0]), np.array([0]))
    cache = drafter.new_cache(1, 8)
    drafter.extend(cache, features, torch.tensor([6]))
    hidden = drafter.block_from_cache(torch.tensor([9]), cache)[0]
    head, w1 = drafter.head.double().numpy(), weights_of(drafter)["markov_w1.weight"]
    confidence = drafter.confidence_head.proj
    tokens = [9]
    for slot in range(GAMMA):
        # The bias of the last slot of the block so far: a memory goes through all of them anew.
        bias = by_hand(drafter, hidden[: slot + 1], tokens)[-1]
        joined = np.concatenate([hidden[slot].numpy(), w1[tokens[-1]]])
        logit = float(confidence.weight[0].double().numpy() @ joined + float(confidence.bias))
        assert float(found.confidence_logits[0, slot]) == pytest.approx(logit, abs=1e-4)
        tokens.append(int((head @ hidden[slot].double().numpy() + bias).argmax()))
    assert found.tokens[0].tolist() == tokens[1:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dialect", ["training", "union", "deepspec"])
def test_every_dialect_gives_back_the_head(tmp_path, make_drafter, record, kind, dialect):
    drafter = make_drafter(markov_type=kind)
    write = {
        "training": lambda: write_training_checkpoint(tmp_path, drafter, record),
        "union": lambda: write_union(tmp_path, drafter, record, dtype="float32"),
        "deepspec": lambda: write_deepspec(tmp_path, drafter, record, drafter.head, dtype="float32"),
    }
    write[dialect]()
    again = read_checkpoint(tmp_path, drafter.embedding, drafter.head, record=record)
    assert again.config == drafter.config and again.config.markov_type == kind
    before, after = drafter.state_dict(), again.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    hidden, previous = inputs()
    assert torch.equal(along(again, hidden, previous), along(drafter, hidden, previous))


def test_a_head_of_another_type_than_its_weights_is_refused(tmp_path, make_drafter, record):
    drafter = make_drafter(markov_type="gated")
    write_union(tmp_path, drafter, record)
    text = (tmp_path / "config.json").read_text()
    for kind, said in (
        ("rnn", r"joint_proj\.weight is missing.*gate_proj\.weight is unexpected"),
        ("vanilla", r"gate_proj\.weight is unexpected"),
        ("lstm", "markov_type"),
    ):
        (tmp_path / "config.json").write_text(
            text.replace('"markov_head_type": "gated"', f'"markov_head_type": "{kind}"')
        )
        with pytest.raises(IntegrityError, match=said):
            read_checkpoint(tmp_path, drafter.embedding, drafter.head)


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_a_reduced_vocabulary_goes_with_vanilla_heads_alone(make_config, kind):
    with pytest.raises(ValueError, match=f"vanilla Markov head alone, not with '{kind}'"):
        make_config(markov_type=kind, draft_vocab_size=10)


def test_a_head_of_another_type_costs_otherwise(make_config):
    """Cost curves are looked up by geometry."""
    names = [make_config(markov_type=kind).geometry for kind in KINDS]
    assert names == ["dspark-g4-l2-r4-v40", "dspark-gated-g4-l2-r4-v40", "dspark-rnn-g4-l2-r4-v40"]
