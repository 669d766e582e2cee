from __future__ import annotations

import json

import pytest
import torch

from dspark.config.models import TargetSpec
from dspark.targets.loading import load_target
from dspark.targets.materialise import materialise

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 280,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
}


def spec_of(name, family="llama", *, seed=0, dtype="float32", tie=False, **fields):
    config = {"model_type": family, **SHAPE, "tie_word_embeddings": tie}
    source = {"kind": "random", "seed": seed, "config": config}
    return TargetSpec.model_validate({"name": name, "source": source, "dtype": dtype, **fields})


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def random_spec():
    return spec_of


@pytest.fixture(scope="session")
def workspace(tmp_path_factory):
    return tmp_path_factory.mktemp("workspace")


@pytest.fixture(scope="session", params=["llama", "qwen3"])
def target(request, workspace):
    """A random target of each family, in float32; tied in one of them."""
    record = materialise(spec_of(request.param, request.param, tie=request.param == "llama"), root=workspace)
    return load_target(record, workspace)


@pytest.fixture
def make_folder(workspace, tmp_path):
    """A model folder as somebody else would hand it over; `config` changes its config.json."""

    def make(name="model", family="qwen3", *, drop=(), **config):
        from dspark.targets.synthetic import make_target

        folder = tmp_path / name
        make_target(spec_of("x", family).source, folder, "float32")
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        for file in drop:
            (folder / file).unlink()
        return folder

    return make
