"""What the `config.json` of a drafter says, whoever wrote it (engine-formats.md, 1.6, 4 and 5); loads no torch.

Four layouts describe a drafter with a checkpoint of its own: DeepSpec's flat one, SpecForge's with everything one level
down, speculators', and our own, which is a union of them. A fifth is no drafter's: a DeepSeek-V4 target that brings its
drafter along. Engines disagree on what a missing field means, so what would be guessed is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from dspark.drafters.config import DrafterConfig, rope_parameters
from dspark.errors import DataError
from dspark.io.jsonfile import validation_text

if TYPE_CHECKING:
    from dspark.targets.record import TargetRecord

Layout = Literal["dspark", "deepspec", "specforge", "speculators", "bundled"]

NESTED = ("dflash_config", "dspark_config")  # SpecForge keeps everything in the first
# Names that stand for one class, with Qwen3's layers, wherever they are loaded.
ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel")
# A target's keys for the drafter inside it; engines take a target with all four for one that needs no other.
BUNDLED = ("dspark_block_size", "dspark_markov_rank", "dspark_noise_token_id", "dspark_target_layer_ids")
BUNDLED_FAMILY = "DeepseekV4"
KNOWN = (
    "what can be imported: drafters of DeepSpec (Qwen3DSparkModel), SpecForge and speculators (dspark), "
    "and packages' own `drafter` folders"
)


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
    if not set(names) & set(ARCHITECTURES):
        raise DataError(f"{where}: architectures is {names or None}, which is no drafter that is known here", KNOWN)
    nested = [value[name] for name in NESTED if isinstance(value.get(name), dict)]
    for kind in (inner.get("projector_type", "dspark") for inner in nested):
        if kind != "dspark":
            raise DataError(f"{where}: projector_type is {kind!r}, not 'dspark'", KNOWN)
    if not nested and "block_size" not in value:
        raise DataError(f"{where}: no block_size, neither here nor in {' or '.join(NESTED)}", KNOWN)
    return "specforge" if nested else "deepspec"


def foreign_config(value: Any, record: TargetRecord, where: str) -> DrafterConfig:
    """The architecture that a foreign `config.json` describes; whether it has a confidence head, its weights say.

    Args:
        where: for messages.
    Raises:
        DataError: a field is missing, or says something that is not supported; names it.
    """
    if not isinstance(value, dict):
        raise DataError(f"{where}: not a JSON object")
    fields = flattened(value)
    if problems := unsupported(fields, flat="model_type" in value):
        raise DataError(f"{where}: {'; '.join(problems)}", "only drafters of the published DSpark layout can be loaded")
    try:
        config = DrafterConfig(
            gamma=fields["block_size"],
            layers=fields["num_hidden_layers"],
            taps=taps(fields),
            mask_token_id=fields["mask_token_id"],
            hidden_size=fields["hidden_size"],
            intermediate_size=fields["intermediate_size"],
            num_attention_heads=fields["num_attention_heads"],
            num_key_value_heads=fields["num_key_value_heads"],
            head_dim=fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"],
            rms_norm_eps=fields["rms_norm_eps"],
            rope=rope_parameters(fields),
            max_position=fields["max_position_embeddings"],
            vocab_size=fields["vocab_size"],
            markov_type=fields.get("markov_head_type", "vanilla") if fields["markov_rank"] else "none",
            markov_rank=fields["markov_rank"],
            confidence=bool(fields["markov_rank"]),
            draft_vocab_size=_reduced(fields),
            attention_bias=bool(fields.get("attention_bias", False)),
            target_model_type=record.model_type,
            num_target_layers=record.num_layers,
        )
    except KeyError as missing:
        raise DataError(f"{where}: {missing} is missing", "engines would guess it: add it to the file") from None
    except ValidationError as reason:
        raise DataError(f"{where}: {validation_text(reason)}") from None
    config.require_target(record, where)
    return config


def flattened(value: Mapping[str, Any]) -> dict[str, Any]:
    """All fields on one level; what stands at the top wins."""
    fields: dict[str, Any] = {}
    for name in ("transformer_layer_config", *NESTED):
        if isinstance(nested := value.get(name), dict):
            fields |= nested
    return fields | {key: inner for key, inner in value.items() if inner is not None}


def unsupported(fields: Mapping[str, Any], *, flat: bool) -> list[str]:
    """What of the flattened fields no drafter here has.

    Args:
        flat: the file has a `model_type` of its own, by which readers tell the layouts apart.
    """
    problems = []
    # The one default on which readers disagree by layout.
    if not fields.get("sample_from_anchor", flat):
        problems.append(
            "sample_from_anchor is false or left out: its first slot drafts nothing, which is not supported"
        )
    if fields.get("is_causal") or "sliding_attention" in (fields.get("layer_types") or ()):
        problems.append("its blocks attend causally or through a window, which is not supported")
    if (activation := fields.get("hidden_act", "silu")) not in ("silu", "swish"):
        problems.append(f"hidden_act is {activation!r}, only 'silu' is supported")
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
