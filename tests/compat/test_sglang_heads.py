"""SGLang's own Markov heads on our checkpoints, step by step. `make test-compat` fetches the wheel.

The heads' classes are plain torch, but their module imports most of the engine: they are taken out of it and run alone.
"""

from __future__ import annotations

import ast
import json
import zipfile
from abc import ABC, abstractmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dspark.config.models import DrafterSettings
from dspark.drafters.checkpoint import write_union
from dspark.drafters.config import DrafterConfig
from dspark.drafters.dspark import DSparkDrafter
from dspark.engines.sglang import VERSION
from dspark.evaluation.tiny import tiny_target

WHEELS = sorted((Path(__file__).resolve().parents[2] / ".compat").glob(f"sglang-{VERSION}-*.whl"))
pytestmark = pytest.mark.skipif(not WHEELS, reason=f"the wheel of SGLang {VERSION} is not here: make test-compat")
HEADS = {"BaseDSparkMarkovHead", "VanillaMarkov", "GatedMarkovHead", "RNNHead", "build_markov_head"}
PREFIX = "markov_head."


@pytest.fixture(scope="module")
def build_markov_head() -> Any:
    module = ast.parse(zipfile.ZipFile(WHEELS[-1]).read("sglang/srt/models/dspark.py"))
    future = [node for node in module.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    kept = [node for node in module.body if getattr(node, "name", None) in HEADS]
    assert {node.name for node in kept} == HEADS
    names: dict[str, Any] = {"torch": torch, "nn": nn, "F": nn.functional, "ABC": ABC, "abstractmethod": abstractmethod}
    exec(compile(ast.Module([*future, *kept], []), "sglang/srt/models/dspark.py", "exec"), names)
    return names["build_markov_head"]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_sglang_says_what_our_head_says_at_every_slot(build_markov_head: Any, tmp_path: Path, kind: str):
    target = tiny_target(50)
    settings = DrafterSettings.model_validate({"gamma": 5, "layers": 1, "markov": {"type": kind, "rank": 8}})
    drafter = DSparkDrafter(DrafterConfig.of(target.record, settings), target.embedding, target.head).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in drafter.parameters():
        parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    write_union(tmp_path, drafter, target.record, dtype="float32")
    theirs = build_markov_head(SimpleNamespace(**json.loads((tmp_path / "config.json").read_text())))
    tensors = load_file(tmp_path / "model.safetensors")
    own = {name.removeprefix(PREFIX): value for name, value in tensors.items() if name.startswith(PREFIX)}
    theirs.load_state_dict(own)  # strict: names and shapes are theirs
    hidden = torch.randn(3, 5, target.record.hidden_size, generator=generator)
    previous = torch.randint(0, 50, (3, 5), generator=generator)
    chain, state = drafter.chain(), theirs.init_state(hidden[:, 0])
    for slot in range(5):
        expected, state = theirs.step_bias(previous[:, slot], hidden_states=hidden[:, slot], state=state)
        torch.testing.assert_close(chain.bias(previous[:, slot], hidden[:, slot]), expected, atol=1e-6, rtol=1e-5)
