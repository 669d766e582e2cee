"""What speculators 0.9.0 makes of our checkpoint: its own loader, its own forward, in a process of its own.

Executed are `SpeculatorModelConfig.from_pretrained`, `SpeculatorModel.from_pretrained` (which reads the target's
embedding and head from the folder that `verifier.name_or_path` names) and the model's training forward with eager
attention and losses. Not executed: its default attention, which is compiled, and everything that makes training data.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.drafters.checkpoint import read_checkpoint
from dspark.errors import IntegrityError

WHEELS = ("speculators-0.9.0-*.whl", "hs_connectors-0.9.0-*.whl", "loguru-*.whl")
ANCHORS, LENGTH = (3, 9), 16


def local(folder: Path, target: Path, **changes: Any) -> Path:
    """The checkpoint as a user of speculators with the target on disk has it: our config names the public id."""
    config = json.loads((folder / "config.json").read_text()) | changes
    config["speculators_config"]["verifier"]["name_or_path"] = str(target)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def reader(released: Any, ask_reader: Any) -> Callable[..., Any]:
    path = [released(*WHEELS)]
    return lambda *folders: ask_reader("read_speculators.py", *folders, path=path)


@pytest.fixture
def inputs(made: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {
        "taps": torch.randn(LENGTH, made.drafter.config.context_size, generator=generator),
        "tokens": torch.randint(0, made.drafter.config.vocab_size, (LENGTH,), generator=generator),
        "anchors": torch.tensor(ANCHORS),
    }


def ours(drafter: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft and confidence logits of the same blocks: slot j of anchor p has the token at p + j before it."""
    gamma, anchors = drafter.config.gamma, inputs["anchors"]
    positions = torch.arange(LENGTH)
    block_positions = anchors[:, None] + torch.arange(gamma)
    context = drafter.project(inputs["taps"]).unsqueeze(0)
    block_ids = drafter.block_inputs(inputs["tokens"][anchors]).unsqueeze(0)
    visible = (positions < anchors[:, None]).unsqueeze(0)
    hidden = drafter.block_hidden(block_ids, context, positions.unsqueeze(0), block_positions.unsqueeze(0), visible)[0]
    previous = inputs["tokens"][block_positions]
    logits = drafter.base_logits(hidden) + drafter.chain().bias(previous, hidden)
    return logits, drafter.confidence_logits(hidden, previous)


def test_the_checkpoint_loads_and_its_forward_gives_our_logits(
    made: Any, checkpoint: Any, reader: Any, inputs: dict[str, torch.Tensor], tmp_path: Path
):
    cases = {name: tmp_path / name for name in ("right", "swapped")}
    for folder in cases.values():
        folder.mkdir()
        shutil.copytree(local(checkpoint(dtype="float32"), made.folder), folder / "drafter")
    save_file(inputs, cases["right"] / "inputs.safetensors")
    # The negative control: the two taps in the other order, which nothing notices but the logits.
    halves = inputs["taps"].chunk(2, dim=-1)
    save_file(inputs | {"taps": torch.cat(halves[::-1], dim=-1)}, cases["swapped"] / "inputs.safetensors")

    answer = reader(*cases.values())["right"]
    assert answer == {
        "class": "DSparkDraftModel",
        "aux_hidden_state_layer_ids": [2, 4],  # the residuals that enter the layers after our taps 1 and 3
        "speculative_tokens": 4,
        "block_size": 4,
        "mask_token_id": made.record.mask_token_id,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "sample_from_anchor": True,
        "draft_vocab_size": 320,
    }
    logits, confidences = ours(made.drafter, inputs)
    found = load_file(cases["right"] / "outputs.safetensors")
    assert torch.allclose(found["logits"], logits, atol=1e-4, rtol=1e-4)
    assert torch.allclose(found["confidences"], confidences, atol=1e-4, rtol=1e-4)
    wrong = load_file(cases["swapped"] / "outputs.safetensors")
    assert not torch.allclose(wrong["logits"], logits, atol=0.1, rtol=0.1)


def test_every_tensor_arrives_and_the_targets_are_added(made: Any, checkpoint: Any, reader: Any, tmp_path: Path):
    folder = tmp_path / "case"
    folder.mkdir()
    stored = load_file(shutil.copytree(local(checkpoint(), made.folder), folder / "drafter") / "model.safetensors")
    reader(folder)
    loaded = load_file(folder / "loaded.safetensors")
    own = {name: value for name, value in loaded.items() if name in stored}
    assert own.keys() == stored.keys()
    assert all(torch.equal(own[name], value) for name, value in stored.items())
    assert torch.equal(loaded["embed_tokens.weight"], made.target.embedding)
    assert torch.equal(loaded["lm_head.weight"], made.target.head)
    assert loaded.keys() - stored.keys() <= {
        "embed_tokens.weight",
        "lm_head.weight",
        "verifier_lm_head.weight",
        "verifier_norm.weight",
    }


WRONG = {
    "block": ({"block_size": 0}, r"gamma"),
    "mask": ({"mask_token_id": 320}, r"mask_token_id 320 is outside the vocabulary of 320"),
    "rnn": ({"markov_head_type": "rnn"}, r"markov_head\.joint_proj\.weight is missing"),
    "anchor": ({"sample_from_anchor": False}, r"sample_from_anchor is False, not True"),
    "causal": ({"is_causal": True}, r"is_causal is True, not False"),
}


def test_wrong_configs_are_refused_by_us_and_load_there(made: Any, checkpoint: Any, reader: Any, tmp_path: Path):
    """speculators checks none of this on loading; a head of another kind gets random weights (4.3 of the formats)."""
    for name, (changes, reason) in WRONG.items():
        folder = tmp_path / "wrong" / name
        folder.mkdir(parents=True)
        shutil.copytree(local(checkpoint(name, **changes), made.folder), folder / "drafter")
        with pytest.raises(IntegrityError, match=reason):
            read_checkpoint(folder / "drafter", made.drafter.embedding, made.drafter.head)
    answers = reader(*(tmp_path / "wrong" / name for name in WRONG))
    assert {name for name, answer in answers.items() if "error" not in answer} == set(WRONG)
    assert answers["mask"]["mask_token_id"] == 320
