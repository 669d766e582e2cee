"""Drafters that others wrote: DeepSpec's flat layout, SpecForge's nested one, speculators' (engine-formats.md, 1.6, 4).

Engines disagree on what a missing field means and hardly any of them notices a missing tensor. Here what would be
guessed is refused: only a drafter whose forward pass is known in full is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, arange, equal

from dspark.drafters.base import Drafter
from dspark.drafters.checkpoint import CONFIG, EMBEDDING, HEAD, read_checkpoint, tensor_problems
from dspark.drafters.config import DrafterConfig, rope_parameters
from dspark.drafters.dspark import DSparkDrafter
from dspark.errors import DataError
from dspark.io.jsonfile import read_json, validation_text

if TYPE_CHECKING:
    from dspark.targets.record import TargetRecord

_NESTED = ("dflash_config", "dspark_config")  # SpecForge keeps everything in the first
_CONFIDENCE = ("confidence_head.proj.weight", "confidence_head.proj.bias")
_OFFSETS = "d2t"  # target id of draft token v, minus v
_IGNORED = (EMBEDDING, "t2d")  # of the target, or derived: engines skip them as well


def load_drafter(folder: Path, record: TargetRecord, embedding: Tensor, head: Tensor) -> Drafter:
    """The drafter of a checkpoint folder, whoever wrote it, for a target; in float32.

    One of our own is checked to the byte.

    Args:
        embedding, head: of the target, [V, d].
    Raises:
        DataError: no checkpoint, or one of a kind that is not known here.
        IntegrityError: one of our own that is damaged, or another target's.
    """
    value = read_json(folder / CONFIG, DataError)
    if isinstance(value, dict) and isinstance(value.get("dspark"), dict):
        drafter = read_checkpoint(folder, embedding, head, record=record)
    else:
        config = foreign_config(value, record, str(folder / CONFIG))
        tensors = _tensors(folder)
        # Fields disagree on whether there is a confidence head; its weights do not.
        config = config.model_copy(update={"confidence": any(name in tensors for name in _CONFIDENCE)})
        ids = _draft_token_ids(folder, tensors, config, head)
        drafter = DSparkDrafter(config, embedding, head, ids)
        _check(folder, tensors, drafter)
        drafter.load_state_dict(tensors)
    return drafter.float().eval().requires_grad_(False)


def foreign_config(value: Any, record: TargetRecord, where: str) -> DrafterConfig:
    """The architecture that a foreign `config.json` describes; whether it has a confidence head, its weights say.

    Args:
        where: for messages.
    Raises:
        DataError: a field is missing, or says something that is not supported; names it.
    """
    if not isinstance(value, dict):
        raise DataError(f"{where}: not a JSON object")
    fields = _flattened(value)
    if problems := _unsupported(fields, flat="model_type" in value):
        raise DataError(f"{where}: {'; '.join(problems)}", "only drafters of the published DSpark layout can be loaded")
    try:
        config = DrafterConfig(
            gamma=fields["block_size"],
            layers=fields["num_hidden_layers"],
            taps=_taps(fields),
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


def _flattened(value: Mapping[str, Any]) -> dict[str, Any]:
    """All fields on one level; what stands at the top wins."""
    fields: dict[str, Any] = {}
    for name in ("transformer_layer_config", *_NESTED):
        if isinstance(nested := value.get(name), dict):
            fields |= nested
    return fields | {key: inner for key, inner in value.items() if inner is not None}


def _unsupported(fields: Mapping[str, Any], *, flat: bool) -> list[str]:
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


def _taps(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers whose outputs are tapped: as such, or as indices of layer inputs, one higher."""
    if "target_layer_ids" in fields:
        return tuple(fields["target_layer_ids"])
    return tuple(index - 1 for index in fields["aux_hidden_state_layer_ids"])


def _reduced(fields: Mapping[str, Any]) -> int | None:
    size: int = fields.get("draft_vocab_size", fields["vocab_size"])
    return None if size == fields["vocab_size"] else size


def _draft_token_ids(folder: Path, tensors: dict[str, Tensor], config: DrafterConfig, head: Tensor) -> Tensor | None:
    """Target ids of a reduced draft vocabulary, int64 [Vd]; None for the whole one.

    Raises:
        DataError: they are missing, or the drafter has a head of its own that is not the target's rows of them.
    """
    offsets, own = tensors.pop(_OFFSETS, None), tensors.pop(HEAD, None)
    if config.draft_vocab_size is None:
        return None
    if offsets is None or own is None or offsets.shape != (config.draft_vocab_size,):
        raise DataError(
            f"{folder}: a draft vocabulary of {config.draft_vocab_size} needs {_OFFSETS} and {HEAD} of as many rows",
            "fetch the drafter again",
        )
    ids = offsets.long() + arange(len(offsets))
    if not bool(((ids >= 0) & (ids < config.vocab_size)).all()):
        raise DataError(f"{folder}: {_OFFSETS} leads outside the vocabulary of {config.vocab_size}")
    if not equal(own, head.cpu()[ids].to(own.dtype)):
        raise DataError(f"{folder}: its {HEAD} is not made of the target's rows, which is not supported")
    return ids


def _tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, without a prefix.

    Raises:
        DataError: none, or unreadable ones.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(f"{folder}: no .safetensors files", "name the folder of the drafter's checkpoint")
    found: dict[str, Tensor] = {}
    for path in files:
        try:
            found |= {name.removeprefix("model."): value for name, value in load_file(path).items()}
        except (SafetensorError, OSError) as reason:
            raise DataError(f"{path}: not a safetensors file: {reason}", "fetch the drafter again") from None
    return {name: value for name, value in found.items() if name not in _IGNORED and "rotary_emb" not in name}


def _check(folder: Path, kept: dict[str, Tensor], drafter: DSparkDrafter) -> None:
    """Refuse other tensors than the drafter's own.

    Raises:
        DataError: names them all.
    """
    problems = tensor_problems(kept, drafter)
    problems += [f"{name} is not finite" for name, value in kept.items() if not bool(value.isfinite().all())]
    if problems:
        raise DataError(f"{folder}: {'; '.join(problems)}", "fetch the drafter again, or name the target it is for")
