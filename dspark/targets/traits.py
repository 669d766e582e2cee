"""Which model families can be targets, and what a target's config must say.

A family is a decoder with `model.embed_tokens`, `model.layers`, `model.norm` and `lm_head`, full attention in every
layer, and nothing between head and softmax. Differences between families are data here, not copies of code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# model_type -> the class that transformers loads for it
FAMILIES: dict[str, str] = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")


def unsupported(config: Mapping[str, Any]) -> str | None:
    """Why a target with this `config.json` cannot be used, or None if it can."""
    model_type = config.get("model_type")
    known = ", ".join(f"{family} ({architecture})" for family, architecture in FAMILIES.items())
    if model_type not in FAMILIES:
        return f"model_type {model_type!r} is not supported; supported are {known}"
    architectures = config.get("architectures") or [FAMILIES[model_type]]
    if FAMILIES[model_type] not in architectures:
        return f"architectures {architectures} is not supported; supported are {known}"
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown method")
        return f"its weights are quantised ({method}); supply the model before quantisation"
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        return "it has sliding-window layers; only full attention in every layer is supported"
    absent = [key for key in _NEEDED if not isinstance(config.get(key), int)]
    if absent:
        return f"config.json lacks {', '.join(absent)}"
    if config["num_hidden_layers"] < 2:
        return "it has fewer than two layers, and the last layer is never tapped"
    return None
