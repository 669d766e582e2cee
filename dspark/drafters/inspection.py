"""What a released drafter is, from its `config.json` and the headers of its files: no weight is read, no torch loaded.

Nothing is filled in: a field that the files leave out is shown as absent, and what keeps a drafter from being imported
whatever its target is said beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dspark.config.models import DrafterKind
from dspark.drafters.bundled import BundledDrafter, bundled_drafter
from dspark.drafters.dialects import (
    CONFIDENCE,
    Layout,
    flattened,
    head_geometry,
    kind_of,
    layout_of,
    taps,
    unsupported,
)
from dspark.drafters.weights import CONFIG, StoredWeights, dtypes, has_weights, stored_weights
from dspark.errors import DataError
from dspark.io.jsonfile import read_json, validation_text

_EMBEDDING, _HEAD, _OFFSETS = "embed_tokens.weight", "lm_head.weight", "d2t"
# Without these no reader would run it.
_NEEDED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "rms_norm_eps", "max_position_embeddings"),
)
_NEEDED_OF_BLOCKS = ("block_size", "mask_token_id", "markov_rank")


class Weights(BaseModel):
    """What headers and index say of the weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    files: int
    absent: tuple[str, ...] = ()  # files that are not here
    bytes: int  # of those that are
    tensors: int
    described: int  # tensors whose shape is known: their file is here
    parameters: int  # of those
    dtypes: dict[str, int]  # elements of those, by dtype

    @classmethod
    def of(cls, weights: StoredWeights) -> Weights:
        """The summary of what was read."""
        described = [tensor for tensor in weights.tensors.values() if tensor is not None]
        counts = dtypes(described)
        return cls(
            files=len(weights.files),
            absent=weights.absent,
            bytes=weights.bytes,
            tensors=len(weights.tensors),
            described=len(described),
            parameters=sum(counts.values()),
            dtypes=counts,
        )


class Inspection(BaseModel):
    """A drafter with a checkpoint of its own."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    schema_: Literal["dspark/drafter-inspection/1"] = Field(default="dspark/drafter-inspection/1", alias="schema")
    layout: Layout
    kind: DrafterKind = "dspark"
    architectures: tuple[str, ...] = ()
    target: str | None = None  # what the file calls it
    gamma: int | None = None
    layers: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    attention_heads: int | None = None
    key_value_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int | None = None
    draft_vocab_size: int | None = None
    taps: tuple[int, ...] | None = None  # 0-based layers of the target whose outputs it reads
    target_layers: int | None = None
    mask_token_id: int | None = None
    markov_type: str | None = None  # none: rank 0
    markov_rank: int | None = None
    confidence_head: bool | None = None  # whether its tensors are there; None: no file or index here
    stores_target_ends: tuple[str, ...] = ()  # copies of the target's matrices among its tensors
    weights: Weights | None = None  # None: neither files nor an index here
    problems: tuple[str, ...] = ()  # why it cannot be imported, whatever its target


class BundledInspection(BaseModel):
    """A target that brings its drafter along."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    schema_: Literal["dspark/bundled-drafter/1"] = Field(default="dspark/bundled-drafter/1", alias="schema")
    layout: Literal["bundled"] = "bundled"
    drafter: BundledDrafter
    weights: Weights | None = None  # of the whole checkpoint
    drafter_weights: Weights | None = None  # of the tensors under `mtp.` among them
    stages: int | None = None  # of the drafter: different numbers N in names `mtp.N.`
    problems: tuple[str, ...] = ()


def inspect_folder(folder: Path) -> Inspection | BundledInspection:
    """Describe the drafter of a folder that holds at least a `config.json`.

    Raises:
        DataError: no `config.json`, no drafter of a known layout, or a file of weights that is none.
    """
    where = str(folder / CONFIG)
    value = read_json(folder / CONFIG, DataError, "name the folder of a drafter's checkpoint")
    layout = layout_of(value, where)
    weights = _weights(folder)
    if layout == "bundled":
        return _bundled(bundled_drafter(value, where), weights)
    try:
        return _standalone(layout, value, weights)
    except ValidationError as reason:
        raise DataError(f"{where}: {validation_text(reason)}") from None


def _weights(folder: Path) -> StoredWeights | None:
    """What is known of the weights; None where nothing of them is here, not even an index."""
    return stored_weights(folder) if has_weights(folder) else None


def _standalone(layout: Layout, value: dict[str, Any], weights: StoredWeights | None) -> Inspection:
    fields, kind = flattened(value), kind_of(value)
    chains = kind == "eagle3"
    # A package's checkpoint holds a head for engines where none was trained.
    headless = chains or (layout == "dspark" and value["dspark"].get("markov_type") == "none")
    rank = 0 if headless else fields.get("markov_rank")
    names = {name.removeprefix("model.") for name in weights.tensors} if weights is not None else set()
    heads, kv, width = _heads(fields)
    tapped: tuple[int, ...] | None
    try:
        tapped = taps(fields)
    except (KeyError, TypeError):
        tapped = None
    confidence = [name in names for name in CONFIDENCE]
    needed = _NEEDED if chains else (*_NEEDED_OF_BLOCKS, *_NEEDED)
    problems = [f"{key} is missing" for key in needed if fields.get(key) is None]
    problems += ["target_layer_ids is missing"] if tapped is None else []
    problems += unsupported(value)
    if any(confidence) and not all(confidence):
        problems.append("its confidence head is not whole")
    if any(confidence) and rank == 0:
        problems.append("it stores a confidence head without the sequential head that such a head reads")
    inspected: dict[str, Any] = {
        "layout": layout,
        "kind": kind,
        "architectures": tuple(value.get("architectures") or ()),
        "target": _target_name(value),
        "gamma": fields.get("block_size", fields.get("ttt_length") if chains else None),
        "layers": fields.get("num_hidden_layers"),
        "hidden_size": fields.get("hidden_size"),
        "intermediate_size": fields.get("intermediate_size"),
        "attention_heads": heads,
        "key_value_heads": kv,
        "head_dim": width,
        "vocab_size": fields.get("vocab_size"),
        "draft_vocab_size": fields.get("draft_vocab_size"),
        "taps": tapped,
        "target_layers": fields.get("num_target_layers"),
        "mask_token_id": fields.get("mask_token_id"),
        "markov_type": "none" if rank == 0 else fields.get("markov_head_type"),
        "markov_rank": rank,
        "confidence_head": all(confidence) if weights is not None else None,
        "stores_target_ends": tuple(name for name in (_EMBEDDING, _HEAD) if name in names and _OFFSETS not in names),
        "weights": None if weights is None else Weights.of(weights),
        "problems": tuple(problems),
    }
    return Inspection.model_validate(inspected)


def _heads(fields: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Query heads, key-value heads and width of a head; where the file says too little, what it says."""
    try:
        return head_geometry(fields)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return fields.get("num_attention_heads"), fields.get("num_key_value_heads"), fields.get("head_dim")


def _target_name(value: dict[str, Any]) -> str | None:
    """What a file in speculators' layout calls its target; the others do not say."""
    speculative = value.get("speculators_config")
    verifier = speculative.get("verifier") if isinstance(speculative, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return name if isinstance(name, str) else None


def _bundled(drafter: BundledDrafter, weights: StoredWeights | None) -> BundledInspection:
    if weights is None:
        return BundledInspection(drafter=drafter)
    prefix = drafter.tensor_prefix
    own = {name: tensor for name, tensor in weights.tensors.items() if name.startswith(prefix)}
    stages = {name.removeprefix(prefix).partition(".")[0] for name in own}
    problems = []
    if not own:
        problems.append(
            f"none of its {len(weights.tensors)} tensors is called {prefix}...: the drafter is not among them"
        )
    for part in ("markov_head", "confidence_head"):
        if own and not any(f".{part}." in name for name in own):
            problems.append(f"no tensor of a {part} is among those called {prefix}...")
    of_drafter = StoredWeights(files=weights.files, absent=weights.absent, bytes=weights.bytes, tensors=own)
    return BundledInspection(
        drafter=drafter,
        weights=Weights.of(weights),
        drafter_weights=Weights.of(of_drafter),
        stages=len(stages) or None,
        problems=tuple(problems),
    )
