from __future__ import annotations

import functools
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


_PARTICULARS = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "gemma4_unified": {
        "layer_types": [
            "sliding_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
        ],
        "sliding_window": 4,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 8.0,
    },
}


def config_of(family, tie=False):
    shape = {**SHAPE, **_PARTICULARS.get(family, {})}
    if family == "gemma4_unified":  # it also sees and hears
        return {"model_type": family, "text_config": {**shape, "tie_word_embeddings": tie}, "tie_word_embeddings": tie}
    return {"model_type": family, **shape, "tie_word_embeddings": tie}


def spec_of(name, family="llama", *, seed=0, dtype="float32", tie=False, **fields):
    config = config_of(family, tie)
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


@pytest.fixture(scope="session")
def family(workspace):
    """A random target of a family, in float32; some of them tied."""

    @functools.cache
    def load(name):
        record = materialise(spec_of(name, name, tie=name in ("llama", "gemma4_unified")), root=workspace)
        return load_target(record, workspace)

    return load


@pytest.fixture(scope="session", params=["llama", "qwen3", "gemma4_unified"])
def target(request, family):
    return family(request.param)


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
