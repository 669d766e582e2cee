"""The architecture of one drafter, in one frozen description.

Widths, head geometry, RoPE and vocabulary are the target's; depth, block size, Markov rank and draft vocabulary are
the recipe's (DSpark, section 3.1; DeepSpec's config.json).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dspark.config.models import DrafterKind, DrafterSettings, MarkovType, drafter_family, misfits
from dspark.drafters.styles import STYLES, LayerStyle
from dspark.errors import DataError, SettingsError
from dspark.io.jsonfile import validation_text
from dspark.targets.traits import FULL, DrafterLayers, family_of, global_attention, logit_cap

if TYPE_CHECKING:
    from dspark.targets.record import TargetRecord

# Their frequencies don't depend on the length of the sequence, so that keys cached early stay valid.
SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")


class DrafterConfig(BaseModel):
    """Everything that fixes a drafter's shapes and its forward pass.

    Attributes:
        kind: of network.
        gamma: block size: drafted tokens; of kind dspark also the inputs of a block (anchor and masks).
        layers: draft layers.
        taps: 0-based target layers whose *output* feeds the drafter, ascending; never the last one.
        rope: the target's `rope_parameters` (with `rope_type` and `rope_theta`).
        vocab_size: the target's physical vocabulary, V.
        draft_vocab_size: tokens the drafter may propose, Vd; None: all V.
        markov_type: of the sequential head, "none" without one; gated and rnn heads have the whole vocabulary.
        markov_rank: r, 0 without a sequential head.
        confidence: whether a head says how likely each draft survives.
        layer_style: the kind of layers, a key of `styles.STYLES`.
        shared_key_value: one projection gives keys and values.
        logit_cap: soft cap c of the base logits, c tanh(u / c); the Markov bias is added behind it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kind: DrafterKind = "dspark"
    gamma: int = Field(ge=1)
    layers: int = Field(ge=1)
    taps: tuple[int, ...] = Field(min_length=1)
    mask_token_id: int = Field(ge=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    rms_norm_eps: float = Field(gt=0)
    rope: dict[str, Any]
    max_position: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    markov_type: MarkovType = "vanilla"
    markov_rank: int = Field(ge=0)
    confidence: bool = True
    draft_vocab_size: int | None = Field(default=None, gt=1)
    attention_bias: bool = False
    layer_style: DrafterLayers = "qwen3"
    shared_key_value: bool = False
    logit_cap: float | None = Field(default=None, gt=0)
    target_model_type: str
    num_target_layers: int = Field(gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> DrafterConfig:
        if list(self.taps) != sorted(set(self.taps)) or self.taps[0] < 0:
            raise ValueError(f"taps must be ascending, different and not negative, they are {list(self.taps)}")
        if self.taps[-1] >= self.num_target_layers - 1:
            raise ValueError(
                f"tap {self.taps[-1]} is the last of the target's {self.num_target_layers} layers or beyond it; "
                "the last layer is never a tap (implementations disagree whether its output is normed)"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if self.head_dim % 2:
            raise ValueError("head_dim must be even for RoPE")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}")
        if self.draft_vocab_size is not None and self.draft_vocab_size >= self.vocab_size:
            raise ValueError("draft_vocab_size must be smaller than vocab_size; leave it out for the whole vocabulary")
        if (self.markov_type == "none") != (self.markov_rank == 0) or self.markov_rank == 1:
            raise ValueError(f"markov_rank {self.markov_rank} does not go with a head of type {self.markov_type!r}")
        if self.confidence and self.markov_type == "none":
            raise ValueError("a confidence head reads the sequential head, and there is none")
        if self.draft_vocab_size is not None and self.markov_type in ("gated", "rnn"):
            # What keeps other tokens out of the checkpoints that engines load is a channel that no gate may touch.
            raise ValueError(f"draft_vocab_size goes with a vanilla Markov head alone, not with {self.markov_type!r}")
        if problems := misfits(self.kind, self.layers, self.markov_type, self.draft_vocab_size):
            raise ValueError("; ".join(problems))
        if self.kind not in self.style.kinds:
            raise ValueError(f"no drafter of kind {self.kind} is made of {self.style.name}'s layers")
        if self.layer_style == "qwen3" and (self.shared_key_value or self.logit_cap is not None):
            raise ValueError("Qwen3 layers have a projection of their own for values and no soft cap on logits")
        _check_rope(self.rope, self.style)
        return self

    @classmethod
    def of(cls, record: TargetRecord, settings: DrafterSettings) -> DrafterConfig:
        """The drafter that a recipe asks for on a target.

        A `draft_vocab_size` that is not smaller than the target's vocabulary means the whole vocabulary.

        Raises:
            SettingsError: if the target has a geometry that the drafter's layers cannot follow, or layers that no
                drafter of the recipe's kind is made of.
        """
        text, layer_style = record.text_config, family_of(record.architecture).drafter
        style = STYLES[layer_style]
        if settings.kind not in style.kinds:
            raise SettingsError(
                f"target {record.name}: its drafters are made of {style.name}'s layers, and none of kind "
                f"{settings.kind!r} is",
                f"name a recipe of kind {' or '.join(style.kinds)} in the build's file and see what it says: "
                "dspark plan --build NAME --settings",
            )
        activation = text.get(style.activation_key, style.activation)
        if not style.has_activation(activation):
            raise SettingsError(
                f"target {record.name}: {style.activation_key} is {activation!r}, the drafter's layers use "
                f"{style.activation!r}",
                "use a target of another family",
            )
        limited = settings.draft_vocab_size
        try:
            heads, kv, width = global_attention({"hidden_size": record.hidden_size, **text})
            return cls(
                gamma=settings.gamma,
                layers=settings.layers,
                taps=record.taps,
                mask_token_id=record.mask_token_id,
                hidden_size=record.hidden_size,
                intermediate_size=text["intermediate_size"],
                num_attention_heads=heads,
                num_key_value_heads=kv,
                head_dim=width,
                rms_norm_eps=text.get("rms_norm_eps", 1e-6),
                rope=rope_parameters(text),
                max_position=record.max_position,
                vocab_size=record.vocab_physical,
                kind=settings.kind,
                markov_type=settings.markov.type,
                markov_rank=settings.markov.rank,
                confidence=settings.confidence,
                draft_vocab_size=limited if limited is not None and limited < record.vocab_physical else None,
                attention_bias=bool(text.get("attention_bias", False)),
                layer_style=layer_style,
                shared_key_value=layer_style == "gemma4" and bool(text.get("attention_k_eq_v")),
                logit_cap=logit_cap(text),
                target_model_type=record.model_type,
                num_target_layers=record.num_layers,
            )
        except KeyError as missing:
            raise SettingsError(f"target {record.name}: its config has no {missing}, the drafter needs it") from None
        except ValidationError as reason:
            raise SettingsError(f"target {record.name}: no drafter fits it: {validation_text(reason)}") from None

    def require_target(self, record: TargetRecord, where: str) -> None:
        """Refuse a drafter of another target's vocabulary or width.

        Args:
            where: the drafter was read, for the message.
        Raises:
            DataError: names what differs.
        """
        for what, found, expected in (
            ("vocabulary", self.vocab_size, record.vocab_physical),
            ("hidden size", self.hidden_size, record.hidden_size),
        ):
            if found != expected:
                raise DataError(
                    f"{where}: its {what} is {found}, that of target {record.name} is {expected}",
                    "name the target that the drafter was trained for",
                )

    def require_same(self, other: DrafterConfig, where: str) -> None:
        """Refuse weights of another architecture: what differs cannot be carried over.

        Args:
            other: the architecture of the weights.
            where: they were read, for the message.
        Raises:
            SettingsError: names every difference.
        """
        mine, theirs = self.model_dump(mode="json"), other.model_dump(mode="json")
        different = [f"{key} is {theirs[key]}, here {mine[key]}" for key in mine if mine[key] != theirs[key]]
        if different:
            raise SettingsError(
                f"{where}: training cannot start from these weights: {'; '.join(different)}",
                "use the recipe and the target that they were trained with, or leave training.initial out",
            )

    def require_startable(self, earlier: DrafterConfig, where: str) -> None:
        """Refuse to start from weights of another architecture, but for heads that the earlier drafter does not have.

        Args:
            earlier: the architecture of the weights.
            where: they were read, for the message.
        Raises:
            SettingsError: names every other difference.
        """
        changes: dict[str, Any] = {}
        if earlier.markov_type == "none":
            changes |= {"markov_type": self.markov_type, "markov_rank": self.markov_rank}
        if not earlier.confidence:
            changes["confidence"] = self.confidence
        self.require_same(earlier.model_copy(update=changes), where)

    @property
    def style(self) -> LayerStyle:
        """How the layers differ from other kinds."""
        return STYLES[self.layer_style]

    @property
    def embedding_scale(self) -> float:
        """What embeddings are multiplied by."""
        return self.hidden_size**0.5 if self.style.scales_embedding else 1.0

    @property
    def score_scale(self) -> float:
        """What attention scores are multiplied by."""
        return self.head_dim**-0.5 if self.style.scales_scores else 1.0

    @property
    def context_size(self) -> int:
        """Width of the concatenated taps, m*d."""
        return len(self.taps) * self.hidden_size

    @property
    def proposed_vocab_size(self) -> int:
        """Columns of the draft logits: Vd, or V without a reduced vocabulary."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def family(self) -> str:
        """What papers call such a drafter: `dspark`, `dspark-rnn`, `dflash`, ..."""
        return drafter_family(self.kind, self.markov_type)

    @property
    def geometry(self) -> str:
        """What the cost of a drafter depends on besides its target: `dspark-g7-l2-r64-v8192`, `dflash-g7-l5-v49152`."""
        heads = f"-r{self.markov_rank}" if self.markov_rank else ""
        return f"{self.family}-g{self.gamma}-l{self.layers}{heads}-v{self.proposed_vocab_size}"


def rope_parameters(text_config: dict[str, Any]) -> dict[str, Any]:
    """RoPE in the one spelling used here, from either spelling of a transformers config.

    Newer configs nest everything in `rope_parameters`, some by kind of layer, of which that of full attention counts;
    older ones have `rope_theta` and `rope_scaling`.
    """
    nested = text_config.get("rope_parameters") or text_config.get("rope_scaling") or {}
    nested = nested.get(FULL) or nested
    rope = {key: value for key, value in nested.items() if value is not None and key != "type"}
    rope["rope_type"] = nested.get("rope_type") or nested.get("type") or "default"
    rope.setdefault("rope_theta", text_config.get("rope_theta") or 10000.0)
    partial = rope.get("partial_rotary_factor", text_config.get("partial_rotary_factor"))
    if partial is not None and float(partial) != 1.0:
        rope["partial_rotary_factor"] = float(partial)
    else:
        rope.pop("partial_rotary_factor", None)
    return rope


def _check_rope(rope: dict[str, Any], style: LayerStyle) -> None:
    kind, supported = rope.get("rope_type"), (*SUPPORTED_ROPE, *style.rope)
    if kind not in supported:
        raise ValueError(
            f"RoPE type {kind!r} is not supported (supported: {', '.join(supported)}): "
            "frequencies that change with the length of the sequence would make cached keys wrong"
        )
    if float(rope.get("rope_theta", 0)) <= 0:
        raise ValueError("rope_theta must be positive")
    if "partial_rotary_factor" in rope and kind != "proportional":
        raise ValueError("RoPE on a part of each head is not supported: the drafter's layers rotate whole heads")
