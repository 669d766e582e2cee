"""Which model families can be targets, and in what they differ: data, not copies of code.

A target is a causal decoder with `embed_tokens`, `layers` and `norm`, and an `lm_head` beside it. Its attention is over
keys and values that stay what they are once computed, all of them or those within a window, so that rejected drafts can
be taken back. Between head and softmax there is nothing, or a soft cap. Everything else is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

DrafterLayers = Literal["qwen3", "gemma4"]  # the kinds of layers that drafters are made of (`drafters.styles`)
HEAD = "lm_head.weight"

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Family:
    """What is particular about a family.

    Attributes:
        architecture: the class that transformers loads; by it records name the family.
        decoder: where in the loaded model the decoder is, and what its weights' names begin with.
        masks: what the decoder takes as an explicit attention mask: one for all layers, or one by kind of layer.
        drafter: the layers of drafters for it.
    """

    architecture: str
    decoder: str = "model"
    masks: Literal["one", "by_kind"] = "one"
    drafter: DrafterLayers = "qwen3"

    @property
    def embedding(self) -> str:
        """Name of the input embedding among the weights."""
        return f"{self.decoder}.embed_tokens.weight"


# By the model_type at the top of config.json.
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM"),
    "olmo2": Family("Olmo2ForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", masks="by_kind"),
    "qwen3": Family("Qwen3ForCausalLM", masks="by_kind"),
    "qwen3_moe": Family("Qwen3MoeForCausalLM"),
    "smollm3": Family("SmolLM3ForCausalLM", masks="by_kind"),
    "gemma4_text": Family("Gemma4ForCausalLM", masks="by_kind", drafter="gemma4"),
    "gemma4_unified_text": Family("Gemma4UnifiedForCausalLM", masks="by_kind", drafter="gemma4"),
    # Of models that see and hear, only the text part runs.
    "gemma4": Family("Gemma4ForConditionalGeneration", "model.language_model", "by_kind", "gemma4"),
    "gemma4_unified": Family("Gemma4UnifiedForConditionalGeneration", "model.language_model", "by_kind", "gemma4"),
}
_BY_ARCHITECTURE = {family.architecture: family for family in FAMILIES.values()}
# Names that the input embedding has among the weights of one family or another; no model has two of them.
EMBEDDINGS = tuple(dict.fromkeys(family.embedding for family in FAMILIES.values()))

_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")

_STATEFUL = frozenset(
    [
        *(
            "mamba",
            "mamba2",
            "falcon_mamba",
            "falcon_h1",
            "rwkv",
            "xlstm",
            "recurrent_gemma",
            "jamba",
            "zamba",
            "zamba2",
        ),
        *("bamba", "nemotron_h", "granitemoehybrid", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "minimax"),
        *("kimi_linear", "lfm2", "lfm2_moe", "olmo_hybrid", "bailing_hybrid"),
    ]
)
_ENCODER_DECODER = frozenset(
    ["t5", "mt5", "umt5", "bart", "mbart", "pegasus", "m2m_100", "marian", "t5gemma", "whisper", "longt5"]
)
_SCALED = "it scales logits between head and softmax, which is not known here"
_LAID_OUT = "its decoder is not laid out as embed_tokens, layers and norm, where taps are read"
_REFUSED = {
    "gpt_oss": "its attention has sinks beside the keys, which the attention here does not know",
    "gemma2": "it caps attention scores, which the attention here does not do",
    **dict.fromkeys(("granite", "granitemoe", "cohere", "cohere2"), _SCALED),
    **dict.fromkeys(("gpt2", "gptj", "gpt_neo", "gpt_neox", "bloom", "opt", "mpt", "falcon"), _LAID_OUT),
}


def family_of(architecture: str) -> Family:
    """The family of a record, by its `architecture`."""
    return _BY_ARCHITECTURE[architecture]


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What of a `config.json` is about text: all of it, or the part of a model that also sees or hears."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def windows(family: Family, text: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """How many positions each layer sees, the token's own included; None: all before it.

    Args:
        text: the text part of the config, as transformers completes it.
    """
    window = text.get("sliding_window")
    if family.masks == "one":
        return (window,) * layers
    kinds = text.get("layer_types") or [FULL] * layers
    return tuple(window if kind == SLIDING else None for kind in kinds)


def logit_cap(text: Mapping[str, Any]) -> float | None:
    """The soft cap c of logits, c tanh(u / c), or None."""
    cap = text.get("final_logit_softcapping")
    return None if cap is None else float(cap)


def global_attention(text: Mapping[str, Any]) -> tuple[int, int, int]:
    """Query heads, key-value heads and width of a head in the layers of full attention.

    Gemma 4 has fewer and wider heads there. transformers tells it layer by layer, released configs by `global_...`.

    Raises:
        KeyError: the config says too little.
    """
    heads = int(text["num_attention_heads"])
    per_layer = {int(number): changes for number, changes in (text.get("per_layer_config") or {}).items()}
    kinds = list(text.get("layer_types") or ())
    own = per_layer.get(kinds.index(FULL), {}) if FULL in kinds else {}
    shared = text.get("num_global_key_value_heads") if text.get("attention_k_eq_v") else None
    kv = own.get("num_key_value_heads") or shared or text.get("num_key_value_heads") or heads
    width = own.get("head_dim") or text.get("global_head_dim") or text.get("head_dim")
    return heads, int(kv), int(width or text["hidden_size"] // heads)


def unsupported(config: Mapping[str, Any]) -> str | None:
    """Why a target with this `config.json` cannot be used, or None if it can."""
    model_type, text = config.get("model_type"), text_part(config)
    reason = _not_a_decoder(config, text) or _REFUSED.get(str(model_type))
    if reason:
        return f"{reason} (model_type {model_type!r})"
    if model_type not in FAMILIES:
        return _unknown(config, text)
    architectures = config.get("architectures") or [FAMILIES[model_type].architecture]
    if FAMILIES[model_type].architecture not in architectures:
        return (
            f"architectures {architectures} is not supported, only {FAMILIES[model_type].architecture} of {model_type}"
        )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown method")
        return f"its weights are quantised ({method}); supply the model before quantisation"
    # Inside another config, transformers leaves out what equals its defaults.
    absent = [key for key in _NEEDED if not isinstance(text.get(key), int)] if text is config else []
    if absent:
        return f"config.json lacks {', '.join(absent)}"
    if text.get("num_hidden_layers", 2) < 2:
        return "it has fewer than two layers, and the last layer is never tapped"
    return None


def _not_a_decoder(config: Mapping[str, Any], text: Mapping[str, Any]) -> str | None:
    """What keeps a model from continuing a text token by token with rollback, whatever its family."""
    names = {str(part.get("model_type")) for part in (config, text)}
    if config.get("is_encoder_decoder") or names & _ENCODER_DECODER:
        return "it is an encoder and a decoder: what is drafted for is one causal text"
    kinds = set(text.get("layer_types") or ())
    if "chunked_attention" in kinds or text.get("attention_chunk_size"):
        return "it attends within chunks, only full attention and sliding windows are known here"
    others = sorted(str(kind) for kind in kinds - {FULL, SLIDING})
    if others or names & _STATEFUL:
        what = f" ({', '.join(others)})" if others else ""
        return f"it carries a state from token to token{what}, which cannot be put back when drafts are rejected"
    if text.get("is_causal") is False or text.get("use_bidirectional_attention") in (True, "all"):
        return "its attention is not causal: tokens see what comes after them"
    if text.get("attn_logit_softcapping") is not None:
        return "it caps attention scores, which the attention here does not do"
    return None


def _unknown(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    model_type, inner = config.get("model_type"), text.get("model_type")
    if text is not config and inner in FAMILIES:
        return (
            f"model_type {model_type!r} wraps a text model of type {inner!r}, which is supported by itself: "
            f"supply it as {FAMILIES[str(inner)].architecture}"
        )
    if text is config and any(key in config for key in ("vision_config", "audio_config", "thinker_config")):
        return (
            f"model_type {model_type!r} is a multimodal model without a text model of its own; none can be drafted for"
        )
    architectures = config.get("architectures") or []
    if architectures and not any("CausalLM" in name or "ConditionalGeneration" in name for name in architectures):
        return f"architectures {architectures} has no head that continues a text"
    return f"model_type {model_type!r} is not supported" if model_type else "its config.json names no model_type"
