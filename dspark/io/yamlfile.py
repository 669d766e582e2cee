"""The one YAML parser (YAML 1.2, as DVC reads it: `1e-5` is a number, `on` is a string)."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from dspark.errors import SettingsError

_AGAIN = "correct it, then give the same command again"


def parse_yaml(text: str) -> Any:
    """Parse YAML text into plain Python values.

    Raises:
        ValueError: not YAML, or a key twice; names line and reason.
    """
    try:
        return YAML(typ="safe", pure=True).load(text)
    except YAMLError as reason:
        mark = getattr(reason, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark is not None else ""
        raise ValueError(f"{where}not valid YAML: {problem(reason)}") from None


def problem(reason: Exception) -> str:
    """What is wrong with a text that is no YAML, in one line, without the lines around it."""
    said = str(getattr(reason, "problem", None) or reason)
    twice = re.match(
        r'found duplicate key "(.*?)" with value', said
    )  # the values that are told then are not the file's
    return f"key {twice[1]!r} stands there twice" if twice else said


def read_yaml(path: Path) -> Any:
    """Read a YAML file into plain Python values.

    Raises:
        SettingsError: missing file, or not YAML; names file, line and reason.
    """
    try:
        with path.open(encoding="utf-8") as handle:
            return YAML(typ="safe", pure=True).load(handle)
    except FileNotFoundError:
        raise SettingsError(f"{path}: file not found") from None
    except (YAMLError, UnicodeDecodeError) as reason:
        mark = getattr(reason, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise SettingsError(f"{where}: not valid YAML: {problem(reason)}", _AGAIN) from None


def key_line(path: Path, *keys: str) -> int | None:
    """The 1-based line on which a nested key stands, for error messages; None if it is not found."""
    try:
        with path.open(encoding="utf-8") as handle:
            node = YAML(typ="rt", pure=True).load(handle)
    except (OSError, YAMLError):
        return None
    line: int | None = None
    for key in keys:
        if not hasattr(node, "lc") or not hasattr(node, "get") or key not in node:
            return line
        line = int(node.lc.key(key)[0]) + 1
        node = node[key]
    return line


def yaml_text(value: Any) -> str:
    """Plain Python values as YAML, in their order."""
    yaml = YAML(typ="rt", pure=True)
    yaml.default_flow_style = False
    yaml.width = 4096  # long texts stay on one line
    text = io.StringIO()
    yaml.dump(value, text)
    return text.getvalue()
