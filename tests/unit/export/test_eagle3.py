"""A chain goes through the same gate as a block: compared by its drafts, with faults that the gate has to notice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark.config.models import ExportSettings
from dspark.drafters.checkpoint import read_checkpoint
from dspark.drafters.eagle3 import Eagle3Drafter
from dspark.errors import DataError, GateError
from dspark.export import build as build_module
from dspark.export import export_build
from dspark.export.blocks import ProbeBlocks


@pytest.fixture(scope="module")
def chain(make: Any) -> Any:
    """A drafter that looks trained, on the target of the room's other tests."""
    made = make(draft_vocab_size=None)
    fields = {"kind": "eagle3", "layers": 1, "markov_type": "none", "markov_rank": 0, "confidence": False}
    config = made.drafter.config.model_copy(update=fields)
    drafter = Eagle3Drafter(config, made.embedding, made.head, seed=2).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for parameter in drafter.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * (0.2 if parameter.dim() > 1 else 0.1))
    return replace(made, drafter=drafter)


@pytest.fixture(scope="module")
def blocks(blocks_of: Any) -> ProbeBlocks:
    found = blocks_of(12)
    generator = np.random.default_rng(5)
    return replace(found, tokens=tuple(generator.integers(0, 61, length) for length in found.lengths))


def run(made: Any, blocks: ProbeBlocks, out: Path, **more: Any) -> Any:
    # Everything that an export can be asked for; what there is none of is said, not refused.
    settings = ExportSettings(deepspec=True)
    return export_build(
        made.drafter, made.record, settings, blocks, out, embedding=made.embedding, head=made.head, **more
    )


def test_a_chain_is_written_as_a_checkpoint_and_compared(chain: Any, blocks: ProbeBlocks, tmp_path: Path):
    report = run(chain, blocks, tmp_path, target_file=lambda: pytest.fail("nothing asks for the target's file"))
    assert {name: one.verdict for name, one in report.dialects.items()} == {"union": "equal", "deepspec": "equal"}
    assert report.dialects["union"].compared == ("draft_ids", "draft_logits")
    assert set(report.negative_controls) == {"taps shifted by one", "tokens shifted by one", "RoPE theta / 10"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deepspec", "drafter", "parity.json"]
    for dialect in ("onnx", "tensorrt", "gguf"):
        assert "kind eagle3 are written as a checkpoint alone" in report.why_absent(dialect)
    found = read_checkpoint(tmp_path / "drafter", chain.embedding, chain.head, record=chain.record)
    assert isinstance(found, Eagle3Drafter) and found.dtype == torch.bfloat16


def test_wrong_weights_of_a_chain_are_refused(
    chain: Any, blocks: ProbeBlocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def flipped(*arguments: Any, **more: Any) -> Any:
        drafter = read_checkpoint(*arguments, **more)
        weight = drafter.layers[0].self_attn.o_proj.weight
        weight.data = weight.data.flip(0)
        return drafter

    monkeypatch.setattr(build_module, "read_checkpoint", flipped)
    with pytest.raises(GateError, match=r"export union: \d+ of 12 blocks differ"):
        run(chain, blocks, tmp_path)


def test_blocks_without_their_tokens_are_no_ground_for_a_chain(chain: Any, blocks: ProbeBlocks, tmp_path: Path):
    with pytest.raises(DataError, match="read the tokens of their context"):
        run(chain, replace(blocks, tokens=()), tmp_path)
    with pytest.raises(DataError, match="not as many as their positions"):
        replace(blocks, tokens=blocks.tokens[1:])
