"""The catalogue of targets: `pipeline/targets/<name>.yaml`, one file each. Loads no torch."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dspark.config.models import DType, Name, Sampling, TargetSpec
from dspark.errors import SettingsError
from dspark.io.atomic import write_text
from dspark.io.jsonfile import validation_text
from dspark.io.yamlfile import key_line, read_yaml
from dspark.targets.layout import TEMPLATE, check_folder

_NAME: TypeAdapter[str] = TypeAdapter(Name)


def list_targets(folder: Path) -> list[str]:
    """Names of the declared targets, sorted."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def read_target(folder: Path, name: str) -> TargetSpec:
    """Read `<folder>/<name>.yaml`.

    Raises:
        SettingsError: no such target (the nearest is named), or mistakes in the file (all are named).
    """
    path = folder / f"{name}.yaml"
    if not path.is_file():
        near = difflib.get_close_matches(name, list_targets(folder), n=1)
        meant = f"did you mean {near[0]!r}?  " if near else ""
        raise SettingsError(f"{path}: target {name!r} does not exist", f"{meant}all targets: dspark targets list")
    value = read_yaml(path)
    if not isinstance(value, dict):
        raise SettingsError(f"{path}: a target is a mapping of keys, starting with `source:`")
    if value.get("name", name) != name:
        raise SettingsError(f"{path}: name is {value['name']!r}, the file says {name!r}", "leave `name` out")
    try:
        return TargetSpec.model_validate({**value, "name": name})
    except ValidationError as error:
        first = [str(part) for part in error.errors()[0]["loc"]]
        line = key_line(path, *first)
        where = f"{path}:{line}" if line else str(path)
        raise SettingsError(f"{where}: {validation_text(error)}", f"dspark targets show {name}") from None


def add_target(folder: Path, name: str, model: Path) -> Path:
    """Declare a local model folder as the target `name`; nothing is copied.

    dtype, sampling and thinking mode are taken from the model's own files and written out, to be read and changed.

    Returns:
        the YAML file written.
    Raises:
        SettingsError: a name that is taken or cannot be one.
        PreflightError: the folder cannot be a target, with the reason.
    """
    path = folder / f"{name}.yaml"
    try:
        _NAME.validate_python(name)
    except ValidationError:
        raise SettingsError(f"{name!r} cannot be a name", "use lower-case letters, digits, dots and hyphens") from None
    if path.exists():
        raise SettingsError(f"{path}: target {name!r} exists", "choose another name or edit the file")
    model = model.expanduser().resolve()
    config = check_folder(model)
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
        raise SettingsError(f"{path}: {validation_text(error)}") from None
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
        raise SettingsError(f"{path}: not valid JSON: {reason}") from None
    return value if isinstance(value, dict) else {}
