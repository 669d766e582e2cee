"""One tiny drafter with random weights, exported once for all tests of the room (tracing costs seconds)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from torch import Tensor

from dspark.config.models import ExportSettings
from dspark.drafters.config import DrafterConfig
from dspark.drafters.dspark import DSparkDrafter
from dspark.export.blocks import ProbeBlocks
from dspark.export.build import export_build
from dspark.targets.record import TargetRecord

VOCABULARY, HIDDEN = 61, 24


def drafter_config(**changes: Any) -> DrafterConfig:
    fields: dict[str, Any] = {
        "gamma": 3,
        "layers": 2,
        "taps": (0, 2),
        "mask_token_id": 3,
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position": 256,
        "vocab_size": VOCABULARY,
        "markov_rank": 6,
        "draft_vocab_size": 23,
        "target_model_type": "llama",
        "num_target_layers": 6,
    }
    return DrafterConfig(**(fields | changes))


@dataclass(frozen=True)
class Trained:
    """A drafter that looks trained (no tensor at its initial constant) and what it was made on."""

    drafter: DSparkDrafter
    record: TargetRecord
    embedding: Tensor
    head: Tensor


def make_trained(**changes: Any) -> Trained:
    generator = torch.Generator().manual_seed(1)
    config = drafter_config(**changes)
    embedding = torch.randn(VOCABULARY, HIDDEN, generator=generator).bfloat16()
    head = torch.randn(VOCABULARY, HIDDEN, generator=generator).bfloat16()
    ids = None
    if config.draft_vocab_size is not None:
        ids = torch.randperm(VOCABULARY, generator=generator)[: config.draft_vocab_size].sort().values
    drafter = DSparkDrafter(config, embedding, head, ids, seed=2).eval().requires_grad_(False)
    for parameter in drafter.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        # Large enough for attention to matter, or a wrong RoPE would go unnoticed.
        parameter.add_(noise * (0.2 if parameter.dim() > 1 else 0.1))
    drafter.markov_head.reset_constant_channel()
    record = TargetRecord(
        name="tiny",
        source={"kind": "random"},
        revision="seed-1",
        public_id="dspark/tiny",
        digest="1" * 64,
        weights_digest="2" * 64,
        embedding_digest="3" * 64,
        head_digest="4" * 64,
        tokenizer_digest="5" * 64,
        chat_template_digest="6" * 64,
        dtype="bfloat16",
        model_type="llama",
        architecture="LlamaForCausalLM",
        text_config={},
        hidden_size=HIDDEN,
        num_layers=6,
        vocab_logical=VOCABULARY,
        vocab_physical=VOCABULARY,
        max_position=256,
        taps=config.taps,
        mask_token_id=3,
        eos_token_ids=(2,),
    )
    return Trained(drafter, record, embedding, head)


def make_blocks(count: int, longest: int = 40, seed: int = 0) -> ProbeBlocks:
    """Random contexts of 1 to `longest` positions."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, longest + 1, count)
    lengths[0], lengths[-1] = 1, longest
    features = tuple(generator.standard_normal((length, 2 * HIDDEN)).astype(np.float32) for length in lengths)
    return ProbeBlocks(features, generator.integers(0, VOCABULARY, count))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make() -> Callable[..., Trained]:
    return make_trained


@pytest.fixture(scope="session")
def blocks_of() -> Callable[..., ProbeBlocks]:
    return make_blocks


@pytest.fixture(scope="session")
def trained() -> Trained:
    return make_trained()


@pytest.fixture(scope="session")
def built(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of everything that `trained` was exported to: made by whichever process of the tests is first."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / "exported"
    with FileLock(shared / "exported.lock"):
        if not folder.exists():
            unfinished = tmp_path_factory.mktemp("export") / "tiny"
            export_build(
                trained.drafter,
                trained.record,
                ExportSettings(),
                make_blocks(24),
                unfinished,
                embedding=trained.embedding,
                head=trained.head,
            )
            unfinished.rename(folder)
    return folder


@pytest.fixture(scope="session")
def exported(built: Path) -> Path:
    """The folder of its ONNX files."""
    return built / "onnxruntime"
