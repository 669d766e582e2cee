"""What a drafter's GGUF file holds for llama.cpp's `dflash` architecture, and what may be wrong with one.

llama.cpp notices little: shifted taps, a wrong RoPE base or a wrong mask token load without a word, and a missing key
ends the process (engine-formats.md, section 3). So everything is checked here, before an engine sees the file.

With a reduced draft vocabulary the file holds rows of the LM head of its own, and `d2t`, the target ids of these rows;
without one the engine takes the target's head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import ValidationError

from dspark.drafters.config import DrafterConfig
from dspark.errors import DataError
from dspark.io.gguffile import (
    ARCHITECTURE,
    HEAD_NORMS,
    INTEGERS,
    LAYER_TENSORS,
    MASK,
    TOKENS,
    GGUFFile,
    Integers,
    Key,
)
from dspark.io.jsonfile import validation_text
from dspark.targets.record import TargetRecord

DFLASH = "dflash"
_ENDS = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
}
_CONFIDENCE = {"confidence_head.proj.weight": "conf_proj.weight", "confidence_head.proj.bias": "conf_proj.bias"}
DRAFT_IDS = "d2t"
_REDUCED = {"head": "output.weight", "draft_token_ids": DRAFT_IDS}
_LAYER = LAYER_TENSORS | HEAD_NORMS
CONFIDENCE = tuple(_CONFIDENCE.values())


def tensor_names(config: DrafterConfig) -> dict[str, str]:
    """llama.cpp's name of each of the drafter's tensors, in the order that they are written in."""
    layers = {
        f"layers.{number}.{name}": f"blk.{number}.{stored}"
        for number in range(config.layers)
        for name, stored in _LAYER.items()
    }
    heads = _CONFIDENCE if config.confidence else {}
    return _ENDS | heads | ({} if config.draft_vocab_size is None else _REDUCED) | layers


def drafter_keys(config: DrafterConfig) -> dict[str, Key]:
    """The keys of the architecture, without the tokenizer's."""

    def count(value: int) -> Key:
        return Key(value, "UINT32")

    return {
        ARCHITECTURE: Key(DFLASH, "STRING"),
        "general.type": Key("model", "STRING"),
        "dflash.block_count": count(config.layers),
        "dflash.context_length": count(config.max_position),
        "dflash.embedding_length": count(config.hidden_size),
        "dflash.feed_forward_length": count(config.intermediate_size),
        "dflash.attention.head_count": count(config.num_attention_heads),
        "dflash.attention.head_count_kv": count(config.num_key_value_heads),
        "dflash.attention.key_length": count(config.head_dim),
        "dflash.attention.value_length": count(config.head_dim),
        "dflash.attention.layer_norm_rms_epsilon": Key(config.rms_norm_eps, "FLOAT32"),
        "dflash.rope.freq_base": Key(float(config.rope["rope_theta"]), "FLOAT32"),
        "dflash.block_size": count(config.gamma),
        # The layer whose input is taken: the output of the layer before it, which is the tap (package.md, rule 3).
        "dflash.target_layers": Key([tap + 1 for tap in config.taps], "INT32"),
        # Readers disagree on these defaults, so they are always written.
        "dflash.sample_from_anchor": Key(True, "BOOL"),
        "dflash.has_confidence_head": Key(config.confidence, "BOOL"),
        "dflash.attention.causal": Key(False, "BOOL"),
    }


def drafter_config(file: GGUFFile, record: TargetRecord) -> DrafterConfig:
    """The drafter that a file describes, as somebody else may have written it, for a target.

    Raises:
        DataError: not a DSpark drafter, one of a kind that is not known here, or another target's.
    """

    def refuse(what: str) -> DataError:
        return DataError(f"{file.path.name}: {what}", "certify works on DSpark drafters in llama.cpp's format")

    def value(name: str) -> Any:
        if (found := file.value(name)) is None:
            raise refuse(f"{name} is missing")
        return found

    if file.value(ARCHITECTURE) != DFLASH:
        raise refuse(f"its architecture is {file.value(ARCHITECTURE)!r}, not {DFLASH!r}")
    if (markov := file.shapes.get("markov_w1.weight")) is None:
        raise refuse("it has no Markov head (markov_w1.weight): this is a DFlash drafter, not a DSpark one")
    if file.value("dflash.sample_from_anchor") is False:
        raise refuse("sample_from_anchor is false: its first slot drafts nothing, which is not supported")
    if file.value("dflash.attention.causal"):
        raise refuse("its blocks attend causally, which is not supported")
    if file.value("dflash.attention.sliding_window"):
        raise refuse("it has a sliding window, which is not supported")
    if file.value("dflash.rope.scaling.type") not in (None, "none"):
        raise refuse("its RoPE is scaled, which is not supported")
    present = [name for name in CONFIDENCE if name in file.shapes]
    if len(present) == 1:
        raise refuse(f"it has half a confidence head: {present[0]} alone")
    try:
        return DrafterConfig(
            gamma=value("dflash.block_size"),
            layers=value("dflash.block_count"),
            taps=tuple(layer - 1 for layer in value("dflash.target_layers")),
            mask_token_id=value(MASK),
            hidden_size=value("dflash.embedding_length"),
            intermediate_size=value("dflash.feed_forward_length"),
            num_attention_heads=value("dflash.attention.head_count"),
            num_key_value_heads=value("dflash.attention.head_count_kv"),
            head_dim=value("dflash.attention.key_length"),
            rms_norm_eps=value("dflash.attention.layer_norm_rms_epsilon"),
            rope={"rope_type": "default", "rope_theta": value("dflash.rope.freq_base")},
            max_position=value("dflash.context_length"),
            vocab_size=markov[0],
            markov_rank=markov[1],
            confidence=bool(present),
            draft_vocab_size=file.shapes[DRAFT_IDS][0] if DRAFT_IDS in file.shapes else None,
            target_model_type=record.model_type,
            num_target_layers=record.num_layers,
        )
    except ValidationError as reason:
        raise refuse(validation_text(reason)) from None


def file_problems(file: GGUFFile, config: DrafterConfig, target: GGUFFile) -> list[str]:
    """Everything about a drafter's file that llama.cpp would stumble over or, worse, not notice.

    Args:
        file: the drafter's.
        config: the drafter that it should hold.
        target: the file of the target that it should run with.
    """
    return [
        *_key_problems(file, config),
        *_target_problems(file, target),
        *_tokenizer_problems(file, target),
        *tensor_problems(file, config),
        *_confidence_problems(file),
    ]


def _key_problems(file: GGUFFile, config: DrafterConfig) -> list[str]:
    problems = []
    for name, expected in {**drafter_keys(config), MASK: Key(config.mask_token_id, "UINT32")}.items():
        found = file.keys.get(name)
        if found is None:
            problems.append(f"{name} is missing")
        elif found.kind != expected.kind:
            problems.append(f"{name} is of type {found.kind}, not {expected.kind}")
        elif not _same(found, expected):
            problems.append(f"{name} is {found.value}, not {expected.value}")
    return problems


def _same(found: Key, expected: Key) -> bool:
    if expected.kind == "FLOAT32":
        return bool(np.float32(found.value) == np.float32(expected.value))
    return bool(found.value == expected.value)


def _target_problems(file: GGUFFile, target: GGUFFile) -> list[str]:
    family = target.value(ARCHITECTURE)
    layers, width = target.value(f"{family}.block_count"), target.value(f"{family}.embedding_length")
    problems = []
    inputs = file.value("dflash.target_layers")
    # A layer's input is asked for, so that the largest one is the last layer's; it holds the last tap but one layer.
    if isinstance(inputs, list) and isinstance(layers, int):
        outside = [layer for layer in inputs if not 1 <= layer <= layers - 1]
        if outside:
            problems.append(f"dflash.target_layers: {outside} are not inputs of layers 1 to {layers - 1} of the target")
    if file.value("dflash.embedding_length") != width:
        problems.append(f"dflash.embedding_length is {file.value('dflash.embedding_length')}, the target's is {width}")
    return problems


def _tokenizer_problems(file: GGUFFile, target: GGUFFile) -> list[str]:
    def of(one: GGUFFile) -> Mapping[str, Key]:
        # The target may name a mask token of its own or none: the drafter's is the one that counts here.
        return {name: key for name, key in one.tokenizer().items() if name != MASK}

    mine, theirs = of(file), of(target)
    problems = [
        f"{name} differs from the target's"
        for name in sorted(mine.keys() | theirs)
        if mine.get(name) != theirs.get(name)
    ]
    tokens, mask = file.value(TOKENS) or [], file.value(MASK)
    if isinstance(mask, int) and not 0 <= mask < len(tokens):
        problems.append(f"{MASK} {mask} is outside the vocabulary of {len(tokens)}")
    rows = file.shapes.get("markov_w1.weight")
    if rows is not None and rows[0] != len(tokens):
        problems.append(f"markov_w1.weight has {rows[0]} rows, the vocabulary {len(tokens)} tokens")
    return problems


def _confidence_problems(file: GGUFFile) -> list[str]:
    # Only where the file should be ours: llama.cpp's converter stores this matrix like the others, and it runs.
    name = CONFIDENCE[0]
    kind = file.types.get(name, "F32")
    return [] if kind == "F32" else [f"tensor {name} is {kind}, it must be F32"]


def tensor_problems(file: GGUFFile, config: DrafterConfig) -> list[str]:
    """What is wrong with a file's tensors: their names, shapes and types."""
    expected = tensor_shapes(config)
    problems = [f"tensor {name} is missing" for name in expected if name not in file.shapes]
    problems += [f"tensor {name} is unexpected" for name in file.shapes if name not in expected]
    problems += [
        f"tensor {name} is {list(shape)}, not {list(expected[name])}"
        for name, shape in file.shapes.items()
        if name in expected and shape != expected[name]
    ]
    problems += [
        f"tensor {name} is {kind}, it must be F32"
        for name, kind in file.types.items()
        if kind != "F32" and name != DRAFT_IDS and len(file.shapes[name]) < 2
    ]
    problems += [
        f"tensor {name} is {kind}, {'it must be I64' if name == DRAFT_IDS else 'which are integers'}"
        for name, kind in file.types.items()
        if (kind != INTEGERS if name == DRAFT_IDS else kind in ("I8", "I16", "I32", INTEGERS))
    ]
    present = all(name in file.shapes for name in CONFIDENCE)
    if file.value("dflash.has_confidence_head") is not present:
        problems.append(
            f"dflash.has_confidence_head is {file.value('dflash.has_confidence_head')}, "
            f"but conf_proj is {'there' if present else 'not there'}"
        )
    return problems


def draft_id_problems(ids: Integers, config: DrafterConfig) -> list[str]:
    """What is wrong with the values of d2t, which are ids of the target in any order.

    Offsets from a row's own number, as safetensors checkpoints have them, repeat wherever neighbours are drafted.
    """
    problems = []
    if outside := ids[(ids < 0) | (ids >= config.vocab_size)].tolist():
        problems.append(f"{DRAFT_IDS}: {outside[:3]} are no ids in a vocabulary of {config.vocab_size}")
    if twice := len(ids) - len(np.unique(ids)):
        problems.append(f"{DRAFT_IDS}: {twice} of {len(ids)} ids are there already (they must be ids, not offsets)")
    return problems


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Row-major shapes of a drafter's tensors, by llama.cpp's names."""
    d, r, inner = config.hidden_size, config.markov_rank, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = {
        "attn_norm.weight": (d,),
        "ffn_norm.weight": (d,),
        "attn_q.weight": (queries, d),
        "attn_k.weight": (keys, d),
        "attn_v.weight": (keys, d),
        "attn_output.weight": (d, queries),
        "attn_q_norm.weight": (config.head_dim,),
        "attn_k_norm.weight": (config.head_dim,),
        "ffn_gate.weight": (inner, d),
        "ffn_up.weight": (inner, d),
        "ffn_down.weight": (d, inner),
    }
    proposed = config.proposed_vocab_size
    reduced: dict[str, tuple[int, ...]] = {"output.weight": (proposed, d), DRAFT_IDS: (proposed,)}
    ends = {
        "fc.weight": (d, config.context_size),
        "enc.output_norm.weight": (d,),
        "output_norm.weight": (d,),
        "markov_w1.weight": (config.vocab_size, r),
        "markov_w2.weight": (proposed, r),
    }
    if config.confidence:
        ends |= {"conf_proj.weight": (1, d + r), "conf_proj.bias": (1,)}
    layers = {f"blk.{number}.{name}": shape for number in range(config.layers) for name, shape in layer.items()}
    return ends | ({} if config.draft_vocab_size is None else reduced) | layers
