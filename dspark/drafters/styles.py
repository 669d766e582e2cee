"""The kinds of layers that drafters are made of: how they differ, as data (deepspec.md, sections 1.2 and 1.5).

A drafter's layers are of the kind that engines expect beside its target: Qwen3's for most, Gemma 4's for Gemma 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dspark.config.models import DrafterKind
from dspark.targets.traits import DrafterLayers

Activation = Literal["silu", "gelu_pytorch_tanh"]


@dataclass(frozen=True)
class LayerStyle:
    """One kind of layer.

    Attributes:
        name: the family that they come from.
        model_type: of the config that describes the layers.
        activation: of the gate; `activation_key` is what that config calls it.
        kinds: of drafters that are made of such layers.
        sandwich: norms also behind attention and MLP, and a scalar on the layer's output.
        norms_values: values are normed per head, without a weight.
        scales_scores: by 1 / sqrt(head_dim); where not, the norms of queries and keys have to do.
        scales_embedding: by sqrt(hidden_size).
        rope: types of RoPE beyond those that every style knows.
    """

    name: str
    model_type: str
    activation: Activation
    activation_key: str
    kinds: tuple[DrafterKind, ...]
    sandwich: bool = False
    norms_values: bool = False
    scales_scores: bool = True
    scales_embedding: bool = False
    rope: tuple[str, ...] = ()

    def has_activation(self, named: object) -> bool:
        """Whether a config that names this activation means the one of these layers."""
        return named == self.activation or (self.activation, named) == ("silu", "swish")


STYLES: dict[DrafterLayers, LayerStyle] = {
    "qwen3": LayerStyle("Qwen3", "qwen3", "silu", "hidden_act", kinds=("dspark", "eagle3")),
    "gemma4": LayerStyle(
        "Gemma 4",
        "gemma4_text",
        "gelu_pytorch_tanh",
        "hidden_activation",
        kinds=("dspark",),
        sandwich=True,
        norms_values=True,
        scales_scores=False,
        scales_embedding=True,
        rope=("proportional",),
    ),
}


def style_named(model_type: object) -> DrafterLayers | None:
    """The kind of layers that a config of this model_type describes, or None."""
    return next((name for name, style in STYLES.items() if style.model_type == model_type), None)
