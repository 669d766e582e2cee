"""What the `config.json` of a drafter says, whoever wrote it (engine-formats.md, 1.6, 4 and 5); loads no torch.

Four layouts describe a drafter with a checkpoint of its own: DeepSpec's flat one, SpecForge's with everything one level
down, speculators', and our own, which is a union of them. A fifth is no drafter's: a DeepSeek-V4 target that brings its
drafter along. Engines disagree on what a missing field means, so what would be guessed is refused.

DeepSpec's DFlash is its DSpark with a Markov head of rank 0, and its EAGLE-3 with Qwen3's layers is our kind `eagle3`,
tensor by tensor (deepspec.md, section 4). DFlash and EAGLE-3 of others have other slots, layers and vocabularies and
are not read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from dspark.config.models import DrafterKind
from dspark.drafters.config import DrafterConfig, rope_parameters
from dspark.drafters.styles import STYLES, style_named
from dspark.errors import DataError
from dspark.io.jsonfile import validation_text
from dspark.targets.traits import DrafterLayers, global_attention, logit_cap

if TYPE_CHECKING:
    from dspark.targets.record import TargetRecord

Layout = Literal["dspark", "deepspec", "specforge", "speculators", "bundled"]

NESTED = ("dflash_config", "dspark_config")  # SpecForge keeps everything in the first
# Of drafters that draft blocks; the first two stand for one class wherever they are loaded.
ARCHITECTURES: Mapping[str, DrafterLayers] = {
    "Qwen3DSparkModel": "qwen3",
    "DSparkDraftModel": "qwen3",
    "Gemma4DSparkModel": "gemma4",
}
CHAINS = "Qwen3Eagle3Model"  # DeepSpec's EAGLE-3
# What a chain would have to norm besides, in the words of speculators' EAGLE-3.
CHAIN_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
CONFIDENCE = ("confidence_head.proj.weight", "confidence_head.proj.bias")
# A target's keys for the drafter inside it; engines take a target with all four for one that needs no other.
BUNDLED = ("dspark_block_size", "dspark_markov_rank", "dspark_noise_token_id", "dspark_target_layer_ids")
BUNDLED_FAMILY = "DeepseekV4"
KNOWN = (
    "what can be imported: drafters of DeepSpec (Qwen3DSparkModel, Gemma4DSparkModel, Qwen3Eagle3Model), SpecForge and "
    "speculators (dspark), and packages' own `drafter` folders"
)
# Of drafters that carry a known name and are laid out in another way: what is not read of them.
_ELSEWHERE = {
    "dflash": "DFlash is read as DeepSpec stores it: Qwen3DSparkModel with markov_rank 0, its first slot drafts",
    "eagle3": f"EAGLE-3 is read as DeepSpec stores it for Qwen3: {CHAINS}, with the whole vocabulary",
}


def layout_of(value: Any, where: str) -> Layout:
    """Which layout a `config.json` has.

    Args:
        where: for messages.
    Raises:
        DataError: none that is known here; says what was found.
    """
    if not isinstance(value, dict):
        raise DataError(f"{where}: not a JSON object", KNOWN)
    if isinstance(value.get("dspark"), dict):
        return "dspark"
    names = [name for name in value.get("architectures") or () if isinstance(name, str)]
    if any(name.startswith(BUNDLED_FAMILY) for name in names):
        return "bundled"
    if "speculators_model_type" in value or "speculators_config" in value:
        kind = value.get("speculators_model_type")
        if kind != "dspark":
            raise DataError(f"{where}: a drafter of speculators' of the kind {kind!r}, not 'dspark'", KNOWN)
        return "speculators"
    if CHAINS in names:
        if "ttt_length" not in value:
            raise DataError(f"{where}: no ttt_length, so it does not say how many tokens it drafts", KNOWN)
        return "deepspec"
    if not set(names) & ARCHITECTURES.keys():
        why = [text for part, text in _ELSEWHERE.items() if any(part in name.lower() for name in names)]
        raise DataError(
            f"{where}: architectures is {names or None}, which is no drafter that is known here"
            f"{''.join(f' ({text})' for text in why)}",
            KNOWN,
        )
    nested = [value[name] for name in NESTED if isinstance(value.get(name), dict)]
    for kind in (inner.get("projector_type", "dspark") for inner in nested):
        if kind != "dspark":
            raise DataError(f"{where}: projector_type is {kind!r}, not 'dspark'", KNOWN)
    if not nested and "block_size" not in value:
        raise DataError(f"{where}: no block_size, neither here nor in {' or '.join(NESTED)}", KNOWN)
    return "specforge" if nested else "deepspec"


def kind_of(value: Mapping[str, Any]) -> DrafterKind:
    """Of a `config.json` in a known layout: the kind of drafter."""
    own = value.get("dspark")
    chains = own.get("kind") == "eagle3" if isinstance(own, dict) else CHAINS in (value.get("architectures") or ())
    return "eagle3" if chains else "dspark"


def layers_of(value: Mapping[str, Any]) -> DrafterLayers:
    """Of a `config.json` in a known layout: the kind of the drafter's layers; no other name than the class tells it."""
    names = value.get("architectures") or ()
    return next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), "qwen3")


def foreign_config(value: Any, record: TargetRecord, where: str) -> DrafterConfig:
    """The architecture that a foreign `config.json` describes; what it says of a confidence head is not believed.

    Its weights tell whether it has one, see `with_confidence`.

    Args:
        where: for messages.
    Raises:
        DataError: a field is missing, or says something that is not supported; names it.
    """
    if not isinstance(value, dict):
        raise DataError(f"{where}: not a JSON object")
    fields, kind, layer_style = flattened(value), kind_of(value), layers_of(value)
    if problems := unsupported(value):
        raise DataError(f"{where}: {'; '.join(problems)}", "only drafters of the published DSpark layout can be loaded")
    try:
        rank = 0 if kind == "eagle3" else fields["markov_rank"]
        heads, kv, width = head_geometry(fields)
        config = DrafterConfig(
            kind=kind,
            # A chain of DeepSpec's drafts as many tokens as it was trained to.
            gamma=fields["ttt_length" if kind == "eagle3" else "block_size"],
            layers=fields["num_hidden_layers"],
            taps=taps(fields),
            # A chain has no masks.
            mask_token_id=record.mask_token_id if kind == "eagle3" else fields["mask_token_id"],
            hidden_size=fields["hidden_size"],
            intermediate_size=fields["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=kv,
            head_dim=width,
            rms_norm_eps=fields["rms_norm_eps"],
            rope=rope_parameters(fields),
            max_position=fields["max_position_embeddings"],
            vocab_size=fields["vocab_size"],
            markov_type=fields.get("markov_head_type", "vanilla") if rank else "none",
            markov_rank=rank,
            confidence=bool(rank),
            draft_vocab_size=_reduced(fields),
            attention_bias=bool(fields.get("attention_bias", False)),
            layer_style=layer_style,
            shared_key_value=bool(fields.get("attention_k_eq_v", False)),
            logit_cap=logit_cap(fields),
            target_model_type=record.model_type,
            num_target_layers=record.num_layers,
        )
    except KeyError as missing:
        raise DataError(f"{where}: {missing} is missing", "engines would guess it: add it to the file") from None
    except ValidationError as reason:
        raise DataError(f"{where}: {validation_text(reason)}") from None
    except (TypeError, ValueError, ZeroDivisionError) as reason:
        raise DataError(f"{where}: it does not say how its layers are shaped: {reason}") from None
    config.require_target(record, where)
    return config


def with_confidence(config: DrafterConfig, names: Collection[str], where: str) -> DrafterConfig:
    """The architecture with a confidence head if its tensors are there: fields disagree on it, weights do not.

    Args:
        names: of the drafter's tensors, without a prefix.
        where: for messages.
    Raises:
        DataError: there is one, and no sequential head for it to read.
    """
    confidence = any(name in names for name in CONFIDENCE)
    if confidence and config.markov_type == "none":
        raise DataError(f"{where}: it stores a confidence head without the sequential head that such a head reads")
    return config.model_copy(update={"confidence": confidence})


def flattened(value: Mapping[str, Any]) -> dict[str, Any]:
    """All fields on one level; what stands at the top wins."""
    fields: dict[str, Any] = {}
    for name in ("transformer_layer_config", *NESTED):
        if isinstance(nested := value.get(name), dict):
            fields |= nested
    return fields | {key: inner for key, inner in value.items() if inner is not None}


def head_geometry(fields: Mapping[str, Any]) -> tuple[int, int, int]:
    """Query heads, key-value heads and width of a head, of flattened fields: those of global attention.

    Raises:
        KeyError: one of the fields is missing that readers would guess.
    """
    for key in ("num_attention_heads", "num_key_value_heads", "hidden_size"):
        if key not in fields:
            raise KeyError(key)
    return global_attention(fields)


def unsupported(value: Mapping[str, Any]) -> list[str]:
    """What a `config.json` in a known layout says that no drafter of its kind here has."""
    fields, kind, style = flattened(value), kind_of(value), STYLES[layers_of(value)]
    problems = []
    # The one default on which readers disagree by layout: they tell the flat one by its `model_type`.
    if kind == "dspark" and not fields.get("sample_from_anchor", "model_type" in value):
        problems.append(
            "sample_from_anchor is false or left out: its first slot drafts nothing, which is not supported"
        )
    windowed = "sliding_attention" in (fields.get("layer_types") or ())
    if kind == "dspark" and (fields.get("is_causal") or windowed):
        problems.append("its blocks attend causally or through a window, which is not supported")
    if kind == "eagle3":
        problems += ["its chains attend through a window, which is not supported"] if windowed else []
        problems += [f"{key} is set, which is not supported" for key in CHAIN_NORMS if fields.get(key)]
    if style_named(fields.get("model_type")) not in (None, layers_of(value)):
        problems.append(f"model_type is {fields['model_type']!r}, its class is made of {style.name}'s layers")
    if not style.has_activation(activation := fields.get(style.activation_key, style.activation)):
        problems.append(f"{style.activation_key} is {activation!r}, only {style.activation!r} is supported")
    if fields.get("enable_moe_block") or fields.get("hidden_size_per_layer_input"):
        problems.append("its layers have experts or embeddings of their own, which is not supported")
    return problems


def taps(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers whose outputs are tapped: as such, or as indices of layer inputs, one higher.

    Raises:
        KeyError: neither is there.
    """
    if "target_layer_ids" in fields:
        return tuple(fields["target_layer_ids"])
    return tuple(index - 1 for index in fields["aux_hidden_state_layer_ids"])


def _reduced(fields: Mapping[str, Any]) -> int | None:
    size: int = fields.get("draft_vocab_size", fields["vocab_size"])
    return None if size == fields["vocab_size"] else size
