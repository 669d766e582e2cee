"""Equality with DeepSpec's own code, to 1e-5: `tests/data/deepspec/` holds what it computed (README.md there)."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from dspark.config.models import LossSettings
from dspark.decoding.draws import CounterDraws
from dspark.decoding.proposers import torch_proposer
from dspark.drafters.attention import Packing
from dspark.drafters.base import Drafter
from dspark.drafters.config import DrafterConfig, rope_parameters
from dspark.drafters.kinds import build_drafter
from dspark.training.batches import make_batch
from dspark.training.chains import ChainBatch, ChainObjective
from dspark.training.losses import SlotTargets
from dspark.training.objective import TrainingObjective

DATA = Path(__file__).parents[1] / "data" / "deepspec"
BLOCKS = ["dspark", "dspark-gated", "dspark-rnn", "dflash"]
STARTS = (4, 7)  # context positions of the two blocks that were drafted
EXACT = {"atol": 1e-5, "rtol": 1e-5}


@dataclass(frozen=True)
class Recorded:
    """What one recipe's file holds, in float32; `drafter` has the recorded weights."""

    drafter: Drafter
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]

    @property
    def lengths(self) -> list[int]:
        return self.inputs["attention_mask"].sum(-1).tolist()


def read(name: str) -> Recorded:
    with safe_open(DATA / f"{name}.safetensors", "pt") as file:
        config = json.loads(file.metadata()["config"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    parts: dict[str, dict[str, Tensor]] = {"weights": {}, "inputs": {}, "outputs": {}}
    for key, value in tensors.items():
        part, _, rest = key.partition("/")
        parts[part][rest] = value.float() if value.is_floating_point() else value.long()
    weights = parts["weights"]
    embedding, head = weights.pop("embed_tokens.weight"), weights.pop("lm_head.weight")
    drafter = build_drafter(drafter_config(config), embedding, head)
    drafter.load_state_dict(weights)  # strict: every name and shape is DeepSpec's
    return Recorded(drafter.eval().requires_grad_(False), parts["inputs"], parts["outputs"])


def drafter_config(value: dict[str, Any]) -> DrafterConfig:
    eagle3 = value["architectures"] == ["Qwen3Eagle3Model"]
    return DrafterConfig(
        kind="eagle3" if eagle3 else "dspark",
        gamma=value["ttt_length"] if eagle3 else value["block_size"],
        layers=value["num_hidden_layers"],
        taps=tuple(value["target_layer_ids"]),
        mask_token_id=value.get("mask_token_id", 0),
        hidden_size=value["hidden_size"],
        intermediate_size=value["intermediate_size"],
        num_attention_heads=value["num_attention_heads"],
        num_key_value_heads=value["num_key_value_heads"],
        head_dim=value["head_dim"],
        rms_norm_eps=value["rms_norm_eps"],
        rope=rope_parameters(value),
        max_position=value["max_position_embeddings"],
        vocab_size=value["vocab_size"],
        markov_type=value["markov_head_type"] if value.get("markov_rank") else "none",
        markov_rank=value.get("markov_rank", 0),
        confidence=value.get("enable_confidence_head", False),
        target_model_type="qwen3",
        num_target_layers=value["num_target_layers"],
    )


def sequences(recorded: Recorded) -> list[Any]:
    """The recorded sequences without their padding, as training reads them."""
    rows = []
    for index, length in enumerate(recorded.lengths):
        last = recorded.inputs["target_last_hidden_states"][index, :length]
        rows.append(
            SimpleNamespace(
                token_ids=recorded.inputs["input_ids"][index, :length],
                prompt_length=int(recorded.inputs["loss_mask"][index].argmax()),
                taps=recorded.inputs["target_hidden_states"][index, :length],
                last_hidden=last,
                logsumexp=torch.logsumexp(last @ recorded.drafter.head.T, -1),
            )
        )
    return rows


# ---------------------------------------------------------------- blocks


@pytest.fixture(scope="module", params=BLOCKS)
def blocks(request: pytest.FixtureRequest) -> Recorded:
    return read(request.param)


def block_logits(drafter: Any, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor | None]:
    """Draft and confidence logits of blocks with states [..., K, d] and previous tokens [..., K]."""
    chain = drafter.chain()
    bias = [chain.bias(previous[..., j], hidden[..., j, :]) for j in range(hidden.shape[-2])]
    base = drafter.base_logits(hidden)
    logits = torch.stack([base[..., j, :] + added for j, added in enumerate(bias)], -2)
    return logits, drafter.confidence_logits(hidden, previous)


def test_a_training_forward_equals_deepspecs(blocks: Recorded):
    drafter: Any = blocks.drafter
    anchors, kept = blocks.outputs["anchors"], blocks.outputs["kept"].bool()
    ids, taps = blocks.inputs["input_ids"], blocks.inputs["target_hidden_states"]
    slots = torch.arange(drafter.config.gamma)
    positions = anchors.unsqueeze(-1) + slots
    steps = torch.arange(ids.shape[1])
    hidden = drafter.block_hidden(
        drafter.block_inputs(ids.gather(1, anchors)),
        drafter.project(taps),
        steps.expand(ids.shape),
        positions,
        steps < anchors.unsqueeze(-1),
    )
    previous = ids.gather(1, positions.clamp(max=ids.shape[1] - 1).flatten(1)).view(positions.shape)
    logits, confidence = block_logits(drafter, hidden, previous)
    supervised = blocks.outputs["supervised"].bool()
    assert 0 < int(supervised.sum()) < supervised.numel() and not kept.all()
    torch.testing.assert_close(logits[supervised], blocks.outputs["draft_logits"][supervised], **EXACT)
    assert (confidence is None) == ("confidence_logits" not in blocks.outputs)
    if confidence is not None:
        torch.testing.assert_close(confidence[supervised], blocks.outputs["confidence_logits"][supervised], **EXACT)


@pytest.mark.parametrize("alone", ["cross_entropy", "l1", "confidence"])
def test_each_loss_equals_deepspecs(blocks: Recorded, alone: str):
    rows = sequences(blocks)
    kept = blocks.outputs["kept"].bool()
    anchors = [found[there].numpy() for found, there in zip(blocks.outputs["anchors"], kept, strict=True)]
    gamma = blocks.drafter.config.gamma
    batch = make_batch(rows, anchors, gamma, None)
    there = torch.zeros(blocks.outputs["supervised"].shape, dtype=torch.bool).flatten()
    there[batch.slot_rows] = True
    assert torch.equal(there.view(kept.shape[0], -1, gamma), blocks.outputs["supervised"].bool())
    weights = {"cross_entropy": 0.0, "l1": 0.0, "confidence": 0.0} | {alone: 1.0}
    objective = TrainingObjective(blocks.drafter, LossSettings(**weights), low_precision=False)
    found = objective(batch, objective.denominators(batch))[0]
    torch.testing.assert_close(found, blocks.outputs[f"loss/{alone}"], **EXACT)


def test_drafting_with_a_cache_equals_deepspecs(blocks: Recorded):
    drafter: Any = blocks.drafter
    ids, taps = blocks.inputs["input_ids"][:1], blocks.inputs["target_hidden_states"][:1]
    cache, known = drafter.new_cache(1, 16), 0
    proposer = torch_proposer(drafter)
    proposer.begin(1, 16)
    for number, start in enumerate(STARTS):
        drafter.extend(cache, taps[:, known:start], torch.tensor([start - known]))
        tokens = blocks.outputs["decoding/tokens"][number : number + 1]
        hidden = drafter.block_from_cache(ids[:, start], cache)
        logits, confidence = block_logits(drafter, hidden, torch.cat([ids[:, start : start + 1], tokens[:, :-1]], 1))
        torch.testing.assert_close(logits[0], blocks.outputs["decoding/logits"][number], **EXACT)
        if confidence is not None:
            torch.testing.assert_close(confidence[0], blocks.outputs["decoding/confidence_logits"][number], **EXACT)
        proposer.extend(taps[:, known:start], np.array([start - known]), ids[:, known:start])
        proposal = proposer.propose(ids[:, start], 0.0, CounterDraws([0]), np.arange(1))
        assert torch.equal(proposal.tokens, tokens)
        known = start


# ---------------------------------------------------------------- chains


@pytest.fixture(scope="module")
def chains() -> Recorded:
    return read("eagle3")


def padded_ids(recorded: Recorded) -> Tensor:
    """The sequences' tokens and as many zeros as a chain from the last position would read."""
    ids = recorded.inputs["input_ids"]
    return torch.cat([ids, ids.new_zeros(len(ids), 1 + recorded.drafter.config.gamma)], 1)


def test_training_time_test_equals_deepspecs(chains: Recorded):
    """DeepSpec runs one chain from every position: the chain from t has its anchor at t + 1."""
    drafter: Any = chains.drafter
    ids, rows, length = padded_ids(chains), *chains.inputs["input_ids"].shape
    projected = drafter.project(chains.inputs["target_hidden_states"])
    anchors = torch.arange(1, length + 1).expand(rows, length)
    walk = drafter.chains(drafter.pairs(projected, ids[:, 1 : length + 1]), projected, anchors)
    found = [drafter.base_logits(drafter.step(walk, ids.gather(1, anchors + j))) for j in range(drafter.config.gamma)]
    steps = torch.arange(length)[:, None] + torch.arange(drafter.config.gamma)
    inside = torch.stack([steps < there for there in chains.lengths])  # DeepSpec masks the others out of everything
    assert not inside.all()
    torch.testing.assert_close(torch.stack(found, 2)[inside], chains.outputs["draft_logits"][inside], **EXACT)


def test_the_loss_of_every_step_equals_deepspecs(chains: Recorded):
    """DeepSpec supervises other ends of sequences than we do (from the prompt's last position, up to the last token's
    distribution), so the batch is put together from its own mask."""
    drafter: Any = chains.drafter
    rows, length = chains.inputs["input_ids"].shape
    supervised = chains.outputs["supervised"].bool()
    row, start, step = supervised.nonzero(as_tuple=True)
    hidden = chains.inputs["target_last_hidden_states"][row, start + 1 + step]
    there = chains.inputs["attention_mask"].bool()
    assert not supervised[~there].any()
    sequence, position = there.nonzero(as_tuple=True)  # a chain starts at every position of the text
    anchors, lengths, ids = position + 1, tuple(there.sum(1).tolist()), padded_ids(chains)
    batch = ChainBatch(
        features=chains.inputs["target_hidden_states"][there],
        positions=position,
        anchor_ids=ids[sequence, anchors],
        anchors=anchors,
        packing=Packing(lengths, lengths, anchors),
        slot_rows=supervised[there].flatten().nonzero().squeeze(-1),
        previous_ids=ids[row, start + 1 + step],
        targets=SlotTargets(
            labels=torch.zeros_like(row),
            target_hidden=hidden,
            logsumexp=torch.logsumexp(hidden @ drafter.head.T, -1),
            slots=step,
        ),
        following_ids=ids[sequence, anchors],
        starts=torch.arange(len(position)),
        chain_ids=ids[sequence.unsqueeze(1), anchors.unsqueeze(1) + torch.arange(drafter.config.gamma)],
        shares=torch.full((len(position),), 1 / length),  # of the padded length, which DeepSpec divides by
    )
    settings = LossSettings(labels="soft", cross_entropy=1, l1=0, confidence=0, decay=-1 / math.log(0.8))
    objective = ChainObjective(drafter, settings, low_precision=False)
    total, sums, slots, confidence = objective(batch, objective.denominators(batch))
    assert confidence is None
    torch.testing.assert_close(total, chains.outputs["loss/total"], **EXACT)
    torch.testing.assert_close(sums.cross_entropy / sums.weight, total, **EXACT)
    steps = torch.zeros(drafter.config.gamma).index_add(0, step, slots.cross_entropy) / (rows * length)
    torch.testing.assert_close(steps, chains.outputs["loss/steps"], **EXACT)


def test_drafting_chains_with_a_cache_equals_deepspecs(chains: Recorded):
    """Four positions of the prompt; then a block of which two drafts were accepted, with the rejected ones behind."""
    drafter: Any = chains.drafter
    ids, taps = chains.inputs["input_ids"][:1], chains.inputs["target_hidden_states"][:1]
    cache = drafter.new_cache(1, 16)
    proposer = torch_proposer(drafter)
    proposer.begin(1, 16)
    for number, (first, end, kept) in enumerate(((0, 4, 4), (4, 9, 3))):
        drafter.extend(cache, taps[:, first:end], ids[:, first:end], torch.tensor([kept]))
        proposer.extend(taps[:, first:end], np.array([kept]), ids[:, first:end])
        tokens = chains.outputs["decoding/tokens"][number : number + 1]
        anchor = ids[:, first + kept]
        walk = drafter.chains_from_cache(cache)
        previous = torch.cat([anchor[:, None], tokens[:, :-1]], 1)
        logits = [drafter.base_logits(drafter.step(walk, previous[:, j : j + 1]))[0, 0] for j in range(tokens.shape[1])]
        torch.testing.assert_close(torch.stack(logits), chains.outputs["decoding/logits"][number], **EXACT)
        proposal = proposer.propose(anchor, 0.0, CounterDraws([0]), np.arange(1))
        assert torch.equal(proposal.tokens, tokens) and proposal.confidence_logits is None
