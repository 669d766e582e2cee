"""The catalogue of targets: `pipeline/targets/<name>.yaml`, one file each. Only adding one loads transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dspark.config.declared import NAME, declared_names, read_declared
from dspark.config.models import DType, Sampling, TargetSpec
from dspark.errors import SettingsError
from dspark.io.atomic import write_text
from dspark.io.jsonfile import validation_text
from dspark.targets.layout import TEMPLATE, check_folder
from dspark.targets.weights import check_weights


def list_targets(folder: Path) -> list[str]:
    """Names of the declared targets, sorted."""
    return declared_names(folder)


def read_target(folder: Path, name: str, *, root: Path | None = None) -> TargetSpec:
    """Read `<folder>/<name>.yaml`.

    Args:
        root: the workspace; messages name files below it.
    Raises:
        SettingsError: no such target (the nearest is named), or mistakes in the file (all are named, with lines).
    """
    return read_declared(folder, name, TargetSpec, word="target", root=root)


def add_target(folder: Path, name: str, model: Path) -> Path:
    """Declare a local model folder as the target `name`; nothing is copied.

    Of the weights only headers are read. dtype, sampling and thinking mode are taken from the model's own files and
    written out, to be read and changed.

    Returns:
        the YAML file written.
    Raises:
        SettingsError: a name that is taken or cannot be one.
        PreflightError: the folder cannot be a target, or its weights are not those of its config, with the reason.
    """
    path = folder / f"{name}.yaml"
    if not NAME.match(name):
        raise SettingsError(f"{name!r} cannot be a name", "use lower-case letters, digits, dots and hyphens")
    if path.exists():
        hint = "choose another name (dspark targets add NAME PATH), or edit that file"
        raise SettingsError(f"{path}: target {name!r} exists", hint)
    model = model.expanduser().resolve()
    config = check_folder(model)
    check_weights(model, config)
    lines = [
        f"# Declared by `dspark targets add {name}`. The files stay where they are.",
        "source:",
        "  kind: folder",
        f"  path: {json.dumps(str(model), ensure_ascii=False)}",
        f"dtype: {_dtype(config)}",
        *_sampling(model),
    ]
    if _knows_thinking(model):
        lines.append('thinking_mode: "off"')
    write_text(path, "\n".join(lines) + "\n")
    return path


def _dtype(config: dict[str, Any]) -> DType:
    declared = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return declared if declared in ("float32", "bfloat16", "float16") else "bfloat16"  # type: ignore[return-value]


def _sampling(model: Path) -> list[str]:
    """What the model's authors recommend, as YAML lines."""
    path = model / "generation_config.json"
    declared = read_optional_json(path)
    if not declared.get("do_sample"):
        return []
    keys = {key: declared[key] for key in ("temperature", "top_k", "top_p") if declared.get(key) is not None}
    try:
        chosen = Sampling.model_validate(keys)
    except ValidationError as error:
        raise SettingsError(
            f"{path}: {validation_text(error)}", "correct that file, then add the target again"
        ) from None
    return ["sampling:", *(f"  {key}: {value}" for key, value in chosen.model_dump().items())]


def _knows_thinking(model: Path) -> bool:
    """True if the chat template has the switch that `thinking_mode` sets."""
    names = (*TEMPLATE, "tokenizer_config.json")
    texts = [(model / name).read_text(encoding="utf-8") for name in names if (model / name).is_file()]
    return any(re.search(r"\benable_thinking\b", text) for text in texts)


def read_optional_json(path: Path) -> dict[str, Any]:
    """A JSON object of somebody else's, or {} if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as reason:
        raise SettingsError(f"{path}: not valid JSON: {reason}", "copy or download it again") from None
    return value if isinstance(value, dict) else {}
