from types import SimpleNamespace

import pytest
import torch

from dspark.drafters.config import DrafterConfig
from dspark.drafters.dspark import DSparkDrafter

VOCAB, WIDTH = 40, 32


@pytest.fixture
def make_config():
    def make(**changes):
        fields = {
            "gamma": 4,
            "layers": 2,
            "taps": (1, 3),
            "mask_token_id": 5,
            "hidden_size": WIDTH,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 6,
            "rms_norm_eps": 1e-5,
            "rope": {"rope_type": "default", "rope_theta": 10000.0},
            "max_position": 512,
            "vocab_size": VOCAB,
            "markov_rank": 4,
            "target_model_type": "llama",
            "num_target_layers": 6,
        }
        return DrafterConfig(**fields | changes)

    return make


@pytest.fixture
def make_drafter(make_config):
    """Drafters whose every parameter is random, norms and biases included, so that each one shows in the output."""

    def make(**changes):
        config = make_config(**changes)
        generator = torch.Generator().manual_seed(3)
        embedding = torch.randn(VOCAB, WIDTH, generator=generator)
        head = torch.randn(VOCAB, WIDTH, generator=generator)
        ids = None
        if config.draft_vocab_size is not None:
            ids = torch.randperm(VOCAB, generator=generator)[: config.draft_vocab_size].sort().values
        drafter = DSparkDrafter(config, embedding, head, ids, seed=1)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
            drafter.markov_head.reset_constant_channel()
        return drafter.requires_grad_(False).eval()

    return make


@pytest.fixture
def record():
    """What of a target record the drafters read."""
    return SimpleNamespace(
        name="tiny",
        public_id="org/tiny",
        architecture="LlamaForCausalLM",
        model_type="llama",
        revision="abc",
        embedding_digest="e" * 64,
        head_digest="f" * 64,
        eos_token_ids=(2,),
        hidden_size=WIDTH,
        num_layers=6,
        vocab_physical=VOCAB,
        max_position=512,
        taps=(1, 3),
        mask_token_id=5,
        text_config={
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
        },
    )
