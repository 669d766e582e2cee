"""A target as the GGUF file that llama.cpp serves: Llama and dense Qwen3, from the stored safetensors.

llama.cpp has its own names for tensors and keys and its own order of the rows of a Llama's queries and keys; the
vocabulary travels inside the file, with the name of the rule that cuts text into words.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dspark.errors import PreflightError, SettingsError
from dspark.io.gguffile import (
    ARCHITECTURE,
    FILE_TYPE,
    HEAD_NORMS,
    LAYER_TENSORS,
    TOKENS,
    Floats,
    GGUFFile,
    Key,
    Keys,
    Precision,
    TensorSource,
    file_type,
    precision_of,
    read_gguf,
    write_gguf,
)
from dspark.targets.pretokenizer import RULES, only_bytes, rule_of
from dspark.targets.record import TargetRecord

NORMAL, CONTROL, USER, UNUSED = 1, 3, 4, 5  # llama.cpp's kinds of tokens

_FAMILIES = frozenset(["llama", "qwen3"])
_ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_target_gguf(
    path: Path,
    record: TargetRecord,
    root: Path,
    *,
    precision: Precision = "F32",
    origin: Path | None = None,
) -> None:
    """Write a materialised target as GGUF.

    Args:
        path: the file to write.
        root: the workspace.
        precision: of the matrices; vectors stay F32.
        origin: a GGUF file that the target came from, whose tokenizer keys are copied; None: they are made from
            tokenizer.json.
    Raises:
        PreflightError: the target's files are not in the store, or the gguf package is missing.
        SettingsError: something of the target that the file cannot say: biases, scaled RoPE, an unknown tokenizer.
    """
    write_gguf(path, *_content(record, root, precision, origin))


def describe_target_gguf(
    record: TargetRecord, root: Path, *, precision: Precision = "F32", origin: Path | None = None
) -> GGUFFile:
    """What `write_target_gguf` would write, without its tensors' values; raises what it would raise."""
    keys, tensors = _content(record, root, precision, origin)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    types = {name: str(tensor.precision) for name, tensor in tensors.items()}
    return GGUFFile(Path(f"{record.name}.gguf"), dict(keys), shapes, types)


def _content(
    record: TargetRecord, root: Path, precision: Precision, origin: Path | None
) -> tuple[Keys, dict[str, TensorSource]]:
    if record.model_type not in _FAMILIES:
        raise SettingsError(
            f"target {record.name}: a target of type {record.model_type!r} is not written as GGUF, only "
            f"{', '.join(sorted(_FAMILIES))} are",
            "take a GGUF file that llama.cpp's own converter made of it",
        )
    folder = record.folder(root)
    if not (folder / "config.json").is_file():
        raise PreflightError(f"target {record.name!r} is not in {folder}", f"dspark targets fetch {record.name}")
    tokenizer = tokenizer_keys(record, folder) if origin is None else copied_tokenizer(origin)
    if len(tokenizer[TOKENS].value) != record.vocab_physical:
        raise SettingsError(
            f"target {record.name}: the tokenizer has {len(tokenizer[TOKENS].value)} tokens, "
            f"the embedding {record.vocab_physical}; llama.cpp needs as many of the one as of the other",
            "name the GGUF file that the target came from, or leave that out",
        )
    keys = {**_model_keys(record), FILE_TYPE: file_type(precision), **tokenizer}
    return keys, _tensors(record, folder, precision)


def copied_tokenizer(path: Path) -> dict[str, Key]:
    """The tokenizer of a GGUF file: all its keys below `tokenizer.`.

    Raises:
        IntegrityError: not a GGUF file.
        SettingsError: it has no tokens.
    """
    keys = read_gguf(path).tokenizer()
    if TOKENS not in keys:
        raise SettingsError(f"{path}: this GGUF file holds no tokenizer", "name the one that holds the target")
    return keys


def tokenizer_keys(record: TargetRecord, folder: Path) -> dict[str, Key]:
    """The tokenizer of a model folder in llama.cpp's keys; ids beyond the tokenizer's own get tokens nobody can say.

    Raises:
        SettingsError: not byte-level BPE, or its rule of cutting text is none that llama.cpp is known to have.
    """
    path = folder / "tokenizer.json"
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(
            f"target {record.name}: it has no tokenizer.json to make llama.cpp's keys from",
            "name a GGUF file of the target, whose tokenizer is copied",
        ) from None
    model = described["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise SettingsError(
            f"target {record.name}: its tokenizer is {model.get('type')!r}"
            f"{' with bytes as a fallback' if model.get('byte_fallback') else ''}, only byte-level BPE is written",
            "name a GGUF file of the target, whose tokenizer is copied",
        )
    tokens = [f"[unused {number}]" for number in range(record.vocab_physical)]
    kinds = [UNUSED] * record.vocab_physical
    for token, number in model["vocab"].items():
        tokens[number], kinds[number] = token, NORMAL
    for added in described.get("added_tokens", ()):
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    keys = {
        "tokenizer.ggml.model": Key("gpt2", "STRING"),
        "tokenizer.ggml.pre": Key(_rule(record, described.get("pre_tokenizer"), merges), "STRING"),
        TOKENS: Key(tokens, "STRING"),
        "tokenizer.ggml.token_type": Key(kinds, "INT32"),
        # llama.cpp refuses a BPE without merges; two zero bytes whose union is no token are never merged.
        "tokenizer.ggml.merges": Key(merges or ["Ā Ā"], "STRING"),
        "tokenizer.ggml.eos_token_id": Key(record.eos_token_ids[0], "UINT32"),
        # The chat template says where a text begins.
        "tokenizer.ggml.add_bos_token": Key(False, "BOOL"),
    }
    if (first := record.text_config.get("bos_token_id")) is not None:
        keys["tokenizer.ggml.bos_token_id"] = Key(int(first), "UINT32")
    template = folder / "chat_template.jinja"
    if template.is_file():
        keys["tokenizer.chat_template"] = Key(template.read_text(encoding="utf-8"), "STRING")
    return keys


def _rule(record: TargetRecord, described: dict[str, Any] | None, merges: list[str]) -> str:
    """llama.cpp's name for the rule by which text is cut into words before merging."""
    if not merges and only_bytes(described):
        return "gpt-2"  # without merges every byte is a token, wherever text is cut
    if (rule := rule_of(described)) is None:
        raise SettingsError(
            f"target {record.name}: llama.cpp has no known name for the way its tokenizer cuts text "
            f"({json.dumps(described)[:200]}); known are {', '.join(RULES)}",
            "name a GGUF file of the target, whose tokenizer is copied",
        )
    return rule


def _model_keys(record: TargetRecord) -> Keys:
    text, family = record.text_config, record.model_type
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise SettingsError(
            f"target {record.name}: RoPE of type {kind!r} is not written as GGUF, only unscaled RoPE is"
        )
    heads = int(text["num_attention_heads"])
    width = int(text.get("head_dim") or record.hidden_size // heads)
    theta = rope.get("rope_theta") or text.get("rope_theta") or 10000.0
    return {
        ARCHITECTURE: Key(family, "STRING"),
        "general.type": Key("model", "STRING"),
        "general.name": Key(record.public_id or record.name, "STRING"),
        f"{family}.block_count": Key(record.num_layers, "UINT32"),
        f"{family}.context_length": Key(record.max_position, "UINT32"),
        f"{family}.embedding_length": Key(record.hidden_size, "UINT32"),
        f"{family}.feed_forward_length": Key(int(text["intermediate_size"]), "UINT32"),
        f"{family}.attention.head_count": Key(heads, "UINT32"),
        f"{family}.attention.head_count_kv": Key(int(text.get("num_key_value_heads") or heads), "UINT32"),
        f"{family}.attention.key_length": Key(width, "UINT32"),
        f"{family}.attention.value_length": Key(width, "UINT32"),
        f"{family}.rope.dimension_count": Key(width, "UINT32"),
        f"{family}.rope.freq_base": Key(float(theta), "FLOAT32"),
        f"{family}.attention.layer_norm_rms_epsilon": Key(float(text.get("rms_norm_eps", 1e-6)), "FLOAT32"),
        f"{family}.vocab_size": Key(record.vocab_physical, "UINT32"),
    }


def _tensors(record: TargetRecord, folder: Path, precision: Precision) -> dict[str, TensorSource]:
    from safetensors import safe_open

    from dspark.targets.layout import weight_files

    where, shapes = {}, {}
    for file in weight_files(folder):
        with safe_open(folder / file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118
                where[name] = file
                shapes[name] = tuple(handle.get_slice(name).get_shape())
    if record.head_digest == record.embedding_digest:
        where.pop("lm_head.weight", None)  # llama.cpp takes the embedding where there is no head
    names = _names(record)
    _check_names(record, set(names), set(where))
    return {
        stored: TensorSource(
            shapes[name], _loader(record, folder / where[name], name), precision_of(shapes[name], precision)
        )
        for name, stored in names.items()
    }


def _names(record: TargetRecord) -> dict[str, str]:
    """llama.cpp's name of each tensor, in the order that they are written in."""
    ends = dict(_ENDS)
    if record.head_digest == record.embedding_digest:
        del ends["lm_head.weight"]
    layer = LAYER_TENSORS | (HEAD_NORMS if record.model_type == "qwen3" else {})
    return ends | {
        f"model.layers.{number}.{name}": f"blk.{number}.{stored}"
        for number in range(record.num_layers)
        for name, stored in layer.items()
    }


def _check_names(record: TargetRecord, expected: set[str], found: set[str]) -> None:
    problems = [f"{name} is missing" for name in sorted(expected - found)]
    problems += [f"{name} has no place in the file" for name in sorted(found - expected)]
    if problems:
        raise SettingsError(
            f"target {record.name}: cannot be written as GGUF: {'; '.join(problems[:5])}"
            f"{f' and {len(problems) - 5} more' if len(problems) > 5 else ''}",
            "only Llama and dense Qwen3 without biases can",
        )


def _loader(record: TargetRecord, file: Path, name: str) -> Callable[[], Floats]:
    text = record.text_config
    queries = int(text["num_attention_heads"])
    # llama.cpp rotates neighbouring rows of a Llama's head, transformers a row with the one half a head further on;
    # Qwen3 it rotates as transformers does.
    heads = {}
    if record.model_type == "llama":
        heads = {"q_proj.weight": queries, "k_proj.weight": int(text.get("num_key_value_heads") or queries)}
    turned = next((count for ending, count in heads.items() if name.endswith(ending)), None)

    def load() -> Floats:
        from safetensors import safe_open

        with safe_open(file, framework="pt") as handle:
            values: Floats = handle.get_tensor(name).float().numpy()
        return values if turned is None else neighbouring_pairs(values, turned)

    return load


def neighbouring_pairs(rows: Floats, heads: int) -> Floats:
    """Rows of each head reordered so that the two of a rotated pair (i, i + hd/2) stand beside each other.

    Args:
        rows: [heads * hd, d].
        heads: how many.
    """
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, rows.shape[1])
    return halves.transpose(0, 2, 1, 3).reshape(rows.shape)
