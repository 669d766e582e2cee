"""What speculators 0.9.0 makes of our checkpoint of a chain; executed is what `test_speculators.py` says, and its
training-time test with eager attention."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.config.models import DrafterSettings, MarkovSettings
from dspark.drafters.checkpoint import write_union
from dspark.drafters.config import DrafterConfig
from dspark.drafters.eagle3 import Eagle3Drafter

WHEELS = ("speculators-0.9.0-*.whl", "hs_connectors-0.9.0-*.whl", "loguru-*.whl")
LENGTH, GAMMA = 16, 4


@pytest.fixture(scope="module")
def reader(released: Any, ask_reader: Any) -> Callable[..., Any]:
    path = [released(*WHEELS)]
    return lambda *folders: ask_reader("read_speculators.py", *folders, path=path)


@pytest.fixture(scope="module")
def chain(made: Any) -> Any:
    """A chain on the target of the other tests, no tensor of which is trivial."""
    settings = DrafterSettings(
        kind="eagle3", gamma=GAMMA, layers=1, markov=MarkovSettings(type="none"), confidence=False
    )
    config = DrafterConfig.of(made.record, settings)
    drafter = Eagle3Drafter(config, made.target.embedding.float(), made.target.head.float(), seed=2)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return replace(made, drafter=drafter.eval().requires_grad_(False))


@torch.no_grad()
def ours(drafter: Eagle3Drafter, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Draft logits of the chains from every position, [S, steps, V]; a token beyond the text is 0."""
    tokens = torch.cat([inputs["tokens"], torch.zeros(GAMMA + 1, dtype=torch.int64)])[None]
    projected = drafter.project(inputs["taps"])[None]
    anchors = torch.arange(1, LENGTH + 1)[None]
    chains = drafter.chains(drafter.pairs(projected, tokens[:, 1 : LENGTH + 1]), projected, anchors)
    steps = [drafter.base_logits(drafter.step(chains, tokens.gather(1, anchors + j)))[0] for j in range(GAMMA)]
    return torch.stack(steps, 1)


def test_the_checkpoint_of_a_chain_loads_and_its_steps_give_our_logits(chain: Any, reader: Any, tmp_path: Path):
    generator = torch.Generator().manual_seed(4)
    inputs = {
        "taps": torch.randn(LENGTH, chain.drafter.config.context_size, generator=generator),
        "tokens": torch.randint(0, chain.drafter.config.vocab_size, (LENGTH,), generator=generator),
    }
    write_union(tmp_path / "made", chain.drafter, chain.record, dtype="float32")
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(chain.folder)
    (tmp_path / "made" / "config.json").write_text(json.dumps(config))
    cases = {name: tmp_path / name for name in ("right", "swapped")}
    for folder in cases.values():
        folder.mkdir()
        shutil.copytree(tmp_path / "made", folder / "drafter")
    save_file(inputs, cases["right"] / "inputs.safetensors")
    # The negative control: the two taps in the other order, which nothing notices but the logits.
    halves = inputs["taps"].chunk(2, dim=-1)
    save_file(inputs | {"taps": torch.cat(halves[::-1], dim=-1)}, cases["swapped"] / "inputs.safetensors")

    answer = reader(*cases.values())["right"]
    assert answer["class"] == "Eagle3DraftModel"
    assert answer["aux_hidden_state_layer_ids"] == [2, 4]  # the residuals that enter the layers after taps 1 and 3
    assert (answer["speculative_tokens"], answer["draft_vocab_size"]) == (GAMMA, 320)
    loaded = load_file(cases["right"] / "loaded.safetensors")
    assert all(torch.equal(loaded[name], value) for name, value in chain.drafter.state_dict().items())
    assert torch.equal(loaded["embed_tokens.weight"].float(), chain.target.embedding.float())
    assert torch.equal(loaded["verifier_lm_head.weight"].float(), chain.target.head.float())
    expected = ours(chain.drafter, inputs)
    found = load_file(cases["right"] / "outputs.safetensors")["logits"]
    assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4)
    wrong = load_file(cases["swapped"] / "outputs.safetensors")["logits"]
    assert not torch.allclose(wrong, expected, atol=0.1, rtol=0.1)
