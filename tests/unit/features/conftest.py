from __future__ import annotations

import random

import pytest
import torch

from dspark.config.models import FeatureSettings, TargetSpec
from dspark.corpus.sequences import TokenSequence
from dspark.targets.loading import load_target
from dspark.targets.materialise import materialise

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 280,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("workspace")
    source = {"kind": "random", "config": CONFIG}
    spec = TargetSpec.model_validate({"name": "tiny", "source": source, "dtype": "float32"})
    return load_target(materialise(spec, root=root), root)


@pytest.fixture(scope="session")
def make_sequences():
    def make(domain, count, seed=0, longest=30):
        draw = random.Random(f"{domain} {seed}")
        rows = []
        for number in range(count):
            ids = [draw.randrange(4, 260) for _ in range(draw.randint(6, longest))]
            rows.append(TokenSequence(f"{domain}-{number}#0", domain, ids, draw.randint(1, 5), "stop"))
        return rows

    return make


@pytest.fixture
def settings():
    return FeatureSettings(dtype="float32", sequences_per_shard=4, batch_tokens=64)
