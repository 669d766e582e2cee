"""The layouts in which others write a drafter, for tests that read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def flat(drafter: Any) -> dict[str, Any]:
    """DeepSpec's layout."""
    config = drafter.config
    return {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.layers,
        "num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim, "vocab_size": config.vocab_size, "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position, "rope_theta": config.rope["rope_theta"],
        "block_size": config.gamma, "mask_token_id": config.mask_token_id, "target_layer_ids": list(config.taps),
        "markov_rank": config.markov_rank, "markov_head_type": config.markov_type, "enable_confidence_head": True,
    }  # fmt: skip


def chain(drafter: Any) -> dict[str, Any]:
    """DeepSpec's of an EAGLE-3: how far it was trained to draft, and neither masks nor heads."""
    value = flat(drafter)
    own = ("block_size", "mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head")
    return {
        **{key: inner for key, inner in value.items() if key not in own},
        "architectures": ["Qwen3Eagle3Model"],
        "ttt_length": value["block_size"],
        "step_loss_decay": 0.8,
        "draft_num_hidden_layers": 1,
    }


def nested(drafter: Any) -> dict[str, Any]:
    """SpecForge's: everything of the drafter one level down."""
    value = flat(drafter)
    own = ("block_size", "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")
    return {
        **{key: inner for key, inner in value.items() if key not in own},
        "architectures": ["DSparkDraftModel"],
        "dflash_config": {"projector_type": "dspark", **{k: value[k] for k in own}},
    }


def speculators(drafter: Any) -> dict[str, Any]:
    """speculators': the layers one level down, taps as inputs of layers, the slot layout always spelled out."""
    value = flat(drafter)
    own = ("block_size", "mask_token_id", "markov_rank", "markov_head_type")
    return {
        **{key: value[key] for key in own},
        "architectures": ["DSparkDraftModel"],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in value["target_layer_ids"]],
        "draft_vocab_size": value["vocab_size"],
        "sample_from_anchor": True,
        "speculators_model_type": "dspark",
        "speculators_config": {"algorithm": "dspark", "verifier": {"name_or_path": "org/target"}},
        "transformer_layer_config": {
            key: inner for key, inner in value.items() if key not in (*own, "target_layer_ids", "architectures")
        },
    }


LAYOUTS = {"deepspec": flat, "specforge": nested, "speculators": speculators}


def write(folder: Path, value: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(value))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def moved(drafter: Any, seed: int = 3) -> Any:
    """The drafter with every tensor off its initial value, as training leaves it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        if hasattr(drafter, "markov_head"):
            drafter.markov_head.reset_constant_channel()
    return drafter.eval().requires_grad_(False)
