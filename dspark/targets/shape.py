"""How large a target is: parameters, work per token and cache per token, from its config alone. Loads no torch.

The layouts are those of the transformers classes in `traits.FAMILIES`; a test holds the counts against those classes.
Of a model that also sees or hears, the text part is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from dspark.targets.traits import FAMILIES, FULL

Biases = Literal["none", "inputs", "all"]  # of the attention's projections; inputs: queries, keys and values
HeadNorms = Literal["none", "head", "whole"]  # of queries and keys: one weight per channel of a head, or of all heads


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer.

    Attributes:
        heads, kv_heads, head_dim: of its attention.
        keys: whether it makes keys and values of its own, rather than reading an earlier layer's.
        values: whether values have a projection of their own, rather than being the keys.
        full: whether it sees everything, not a window.
        intermediate_size: of the dense feed-forward network; 0: it has none.
        experts, experts_per_token, expert_size: of the mixture of experts; 0: it has none.
    """

    heads: int
    kv_heads: int
    head_dim: int
    keys: bool = True
    values: bool = True
    full: bool = True
    intermediate_size: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0


@dataclass(frozen=True)
class TargetShape:
    """A target's sizes.

    Attributes:
        model_type: of its text part.
        tie_word_embeddings: whether the LM head is the input embedding.
        intermediate_size: as configured; with experts, what a dense layer would have.
        layers: the first one first.
        attention_bias, mlp_bias: which projections have biases.
        head_norms: norms of queries and keys.
        norms: of width `hidden_size`, per layer.
        layer_input_size, layer_input_vocab: of embeddings that every layer reads beside its input; 0: none.
    """

    model_type: str
    hidden_size: int
    vocab_size: int
    tie_word_embeddings: bool
    intermediate_size: int
    layers: tuple[LayerShape, ...]
    attention_bias: Biases = "none"
    mlp_bias: bool = False
    head_norms: HeadNorms = "none"
    norms: int = 2
    layer_input_size: int = 0
    layer_input_vocab: int = 0

    @property
    def parameters(self) -> int:
        """All weights, the embedding and an LM head of its own included."""
        width, own = self.hidden_size, self.layer_input_size * len(self.layers)
        ends = self.vocab_size * width * (1 if self.tie_word_embeddings else 2) + width
        beside = self.layer_input_vocab * own + width * own + self.layer_input_size
        return ends + beside + sum(map(self.layer_parameters, range(len(self.layers))))

    def layer_parameters(self, number: int) -> int:
        """Weights of one layer, all its experts included."""
        return self._layer(self.layers[number], self.layers[number].experts)

    @property
    def products_per_token(self) -> int:
        """Multiplications of weights with a token's states, without LM head: of experts, the chosen ones alone."""
        beside = self.hidden_size * self.layer_input_size * len(self.layers)
        return beside + sum(self._matrices(layer, layer.experts_per_token) for layer in self.layers)

    @property
    def head_products(self) -> int:
        """The same of the LM head, per token of which logits are asked for."""
        return self.vocab_size * self.hidden_size

    @property
    def attended_width(self) -> int:
        """Multiplications with one earlier position: scores and sums of all layers, as if each saw everything."""
        return sum(2 * layer.heads * layer.head_dim for layer in self.layers)

    @property
    def cached_values(self) -> int:
        """Numbers that the cache of keys and values holds per token, all layers together."""
        return sum(2 * layer.kv_heads * layer.head_dim for layer in self.layers if layer.keys)

    @property
    def widest_layer(self) -> int:
        """Numbers per token that are alive at once inside the layer where these are most."""

        def values(layer: LayerShape) -> int:
            attention = 2 * self.hidden_size + 2 * (layer.heads + layer.kv_heads) * layer.head_dim
            gate = max(layer.intermediate_size, layer.experts_per_token * layer.expert_size)
            return max(attention, 2 * self.hidden_size + 3 * gate)

        return max(values(layer) for layer in self.layers)

    def _matrices(self, layer: LayerShape, experts: int) -> int:
        width, queries, keys = self.hidden_size, layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
        attention = 2 * width * queries + (width * keys * (2 if layer.values else 1) if layer.keys else 0)
        dense = 3 * width * layer.intermediate_size
        mixture = 3 * width * layer.expert_size * experts + width * layer.experts
        return attention + dense + mixture + 2 * width * self.layer_input_size

    def _layer(self, layer: LayerShape, experts: int) -> int:
        width, queries, keys = self.hidden_size, layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
        vectors = self.norms * width
        if self.attention_bias != "none":
            vectors += queries + 2 * keys + (width if self.attention_bias == "all" else 0)
        if self.mlp_bias:
            vectors += 2 * layer.intermediate_size + width
        if self.head_norms == "head":
            vectors += layer.head_dim * (2 if layer.keys else 1)
        elif self.head_norms == "whole":
            vectors += queries + keys
        if self.layer_input_size:
            vectors += width
        if layer.experts and layer.intermediate_size:  # Gemma 4: experts beside the dense network, scales and norms
            vectors += 4 * width + layer.experts
        return self._matrices(layer, experts) + vectors


def shape_of(config: Mapping[str, Any]) -> TargetShape:
    """The shape that a text config describes.

    Args:
        config: complete, as `completion.complete` or a target's record has it.
    Raises:
        KeyError: a key is missing.
        ValueError: the family is none of `traits.FAMILIES`.
    """
    kind = str(config["model_type"])
    if kind not in FAMILIES:
        raise ValueError(f"model_type {kind!r} is not supported; supported are {', '.join(FAMILIES)}")
    gemma = kind.startswith("gemma4")
    bias: Biases = "all" if config.get("attention_bias") else "none"
    norms: dict[str, HeadNorms] = {"qwen3": "head", "qwen3_moe": "head", "olmo2": "whole"}
    beside = int(config.get("hidden_size_per_layer_input") or 0) if gemma else 0
    return TargetShape(
        model_type=kind,
        hidden_size=int(config["hidden_size"]),
        vocab_size=int(config["vocab_size"]),
        tie_word_embeddings=bool(config["tie_word_embeddings"]),
        intermediate_size=int(config["intermediate_size"]),
        layers=tuple(_layer(config, number, gemma=gemma) for number in range(int(config["num_hidden_layers"]))),
        attention_bias="inputs" if kind == "qwen2" else bias if kind != "mistral" else "none",
        mlp_bias=bool(config.get("mlp_bias")) and kind in ("llama", "smollm3"),
        head_norms="head" if gemma else norms.get(kind, "none"),
        norms=4 if gemma else 2,
        layer_input_size=beside,
        layer_input_vocab=int(config.get("vocab_size_per_layer_input") or 0) if beside else 0,
    )


def differences(declared: TargetShape, real: TargetShape) -> list[str]:
    """What a declared shape says otherwise than the real one; each names both values. Empty if they agree.

    Two model types with the same layout agree: families are released under several names.
    """
    found = [
        f"{field.name} is declared as {getattr(declared, field.name)}, the model's is {getattr(real, field.name)}"
        for field in fields(TargetShape)
        if field.name not in ("layers", "model_type") and getattr(declared, field.name) != getattr(real, field.name)
    ]
    if len(declared.layers) != len(real.layers):
        count = len(declared.layers)
        return [*found, f"num_hidden_layers is declared as {count}, the model's is {len(real.layers)}"]
    for field in fields(LayerShape):
        for number, (mine, its) in enumerate(zip(declared.layers, real.layers, strict=True)):
            one, other = getattr(mine, field.name), getattr(its, field.name)
            if one != other:
                found.append(f"{field.name} of layer {number} is declared as {one}, the model's is {other}")
                break  # what is wrong in one layer is most often wrong in all
    return found


def _layer(config: Mapping[str, Any], number: int, *, gemma: bool) -> LayerShape:
    heads, count = int(config["num_attention_heads"]), int(config["num_hidden_layers"])
    kv = int(config.get("num_key_value_heads") or heads)
    width = int(config.get("head_dim") or config["hidden_size"] // heads)
    dense = int(config["intermediate_size"])
    full = (config.get("layer_types") or [FULL] * count)[number] == FULL
    if gemma:
        return _gemma_layer(config, number, full=full)
    sparse = config["model_type"] == "qwen3_moe" and number not in (config.get("mlp_only_layers") or ())
    experts = int(config.get("num_local_experts") or config.get("num_experts") or 0)  # transformers' name, released one
    if sparse and experts and (number + 1) % int(config.get("decoder_sparse_step") or 1) == 0:
        return LayerShape(
            heads,
            kv,
            width,
            full=full,
            experts=experts,
            experts_per_token=int(config["num_experts_per_tok"]),
            expert_size=int(config["moe_intermediate_size"]),
        )
    return LayerShape(heads, kv, width, full=full, intermediate_size=dense)


def _gemma_layer(config: Mapping[str, Any], number: int, *, full: bool) -> LayerShape:
    """A layer of Gemma 4, told by `per_layer_config` (transformers) or by `global_...` (released configs)."""
    own: Mapping[str, Any] = {int(key): changes for key, changes in (config.get("per_layer_config") or {}).items()}.get(
        number, {}
    )
    shared = bool(config.get("attention_k_eq_v")) and full
    kv = own.get("num_key_value_heads") or (config.get("num_global_key_value_heads") if shared else None)
    width = own.get("head_dim") or (config.get("global_head_dim") if full else None)
    reuses = number >= int(config["num_hidden_layers"]) - int(config.get("num_kv_shared_layers") or 0)
    mixture = bool(config.get("enable_moe_block"))
    return LayerShape(
        heads=int(config["num_attention_heads"]),
        kv_heads=int(kv or config["num_key_value_heads"]),
        head_dim=int(width or config["head_dim"]),
        keys=not reuses,
        values=not shared,
        full=full,
        intermediate_size=int(config["intermediate_size"]) * (2 if reuses and config.get("use_double_wide_mlp") else 1),
        experts=int(config["num_experts"]) if mixture else 0,
        experts_per_token=int(config["top_k_experts"]) if mixture else 0,
        expert_size=int(config["moe_intermediate_size"]) if mixture else 0,
    )
