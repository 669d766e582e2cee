"""The files of a model folder in the transformers layout: which belong to a target, and which are missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dspark.errors import PreflightError
from dspark.targets.traits import FAMILIES, unsupported

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIGS = ("config.json", "generation_config.json")
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
TEMPLATE = ("chat_template.jinja", "chat_template.json")
# What a complete download holds, in the hub's pattern language.
PATTERNS = (*CONFIGS, *TOKENIZER, *TEMPLATE, SINGLE, INDEX, "model-*.safetensors")
_LAYOUT = "give a model folder in the transformers layout: dspark targets add NAME PATH"

_COPY = "copy or download it again, then give the same command again"


def missing(folder: Path) -> list[str]:
    """Names of the files that a target needs and `folder` does not have; loads no torch."""
    absent = [name for name in ("config.json",) if not (folder / name).is_file()]
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        absent.append("tokenizer.json")
    if (folder / INDEX).is_file():
        return absent + [name for name in _indexed(folder) if not (folder / name).is_file()]
    return absent if (folder / SINGLE).is_file() else [*absent, f"{SINGLE} (or {INDEX} and its shards)"]


def weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files, sorted."""
    return _indexed(folder) if (folder / INDEX).is_file() else [SINGLE]


def target_files(folder: Path) -> list[str]:
    """Names of all files that decide what the target says, sorted."""
    names = [name for name in (*CONFIGS, *TOKENIZER, *TEMPLATE, INDEX) if (folder / name).is_file()]
    return sorted({*names, *weight_files(folder)})


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` as it stands.

    Raises:
        PreflightError: missing, or not a JSON object.
    """
    path = folder / "config.json"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PreflightError(f"{path}: file not found", _LAYOUT) from None
    except (OSError, ValueError) as reason:
        raise PreflightError(f"{path}: not valid JSON: {reason}", _COPY) from None
    if not isinstance(value, dict):
        raise PreflightError(f"{path}: not a JSON object", _COPY)
    return value


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The tensors of a model folder by name, from the headers of its weights alone.

    Raises:
        PreflightError: a file that was cut off or is none.
    """
    return {name: shape for file in weight_files(folder) for name, shape in _header(folder / file).items()}


def check_folder(folder: Path) -> dict[str, Any]:
    """Refuse a folder that cannot be a target, with the reason; loads no torch and reads headers of weights only.

    Returns:
        its config.
    Raises:
        PreflightError: not a folder, files missing or cut off, only pickled weights, or an unsupported architecture.
    """
    if not folder.is_dir():
        raise PreflightError(f"{folder} is not a folder", _LAYOUT)
    config = read_config(folder)
    reason = unsupported(config)
    if reason:
        raise PreflightError(
            f"{folder}: {reason}", f"name another: dspark targets add NAME PATH; types that work: {', '.join(FAMILIES)}"
        )
    absent = missing(folder)
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles and not any(folder.glob("*.safetensors")):
        raise PreflightError(
            f"{folder}: its weights are pickled ({pickles[0]}); pickles can run code and are never loaded",
            "supply the model in safetensors",
        )
    if absent:
        raise PreflightError(f"{folder}: missing {', '.join(absent)}", "complete the folder")
    for name in weight_files(folder):
        _header(folder / name)
    return config


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name; a file that is not as long as its header says, a copy or download cut off, is refused."""
    size = path.stat().st_size
    try:
        with path.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if not 0 < length <= size - 8:
                raise ValueError("it has no header")
            header = json.loads(handle.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if 8 + length + end != size:
            raise ValueError(f"its header speaks of {8 + length + end} bytes, it has {size}")
        return {name: tuple(map(int, entry["shape"])) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, IndexError, AttributeError, TypeError) as reason:
        raise PreflightError(f"{path}: not a whole safetensors file: {reason}", _COPY) from None


def _indexed(folder: Path) -> list[str]:
    """The shards that the index names; a name that leaves the folder is refused."""
    path = folder / INDEX
    try:
        names = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as reason:
        raise PreflightError(f"{path}: not an index of weights: {reason}", _COPY) from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise PreflightError(f"{path}: names {name!r}, which is not a safetensors file beside it", _COPY)
    return names
