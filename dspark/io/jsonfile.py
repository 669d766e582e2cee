"""JSON files: no NaN, no duplicate keys, one canonical form, a `schema` field that names the format.

Every file that another stage or a user reads is a pydantic model with a `schema` (architecture.md, section 5);
`read_model` and `write_model` are its one reader and one writer.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from dspark.errors import DataError, DsparkError
from dspark.io.atomic import write_text

Model = TypeVar("Model", bound=BaseModel)


def canonical_json(value: Any) -> str:
    """The one spelling of a value: sorted keys, no spaces, UTF-8, no NaN or Infinity (ValueError)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def pretty_json(value: Any) -> str:
    """JSON for people: sorted keys, two spaces, a final newline, no NaN or Infinity (ValueError)."""
    return json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def strict_loads(text: str) -> Any:
    """Parse JSON, refusing duplicate keys, NaN or Infinity, numbers too large for a float, and nesting without end.

    Raises:
        ValueError: naming the key or the constant.
    """
    try:
        return json.loads(
            text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite_float
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: Path, error: type[DsparkError] = DataError, hint: str = "") -> Any:
    """Read a JSON file strictly.

    Raises:
        error: if it is missing or does not parse; names file and reason.
    """
    try:
        return strict_loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"{path}: file not found", hint) from None
    except (OSError, ValueError) as reason:
        raise error(f"{path}: not valid JSON: {reason}", hint) from None


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically, in the form for people."""
    write_text(path, pretty_json(value))


def read_model(path: Path, model: type[Model], error: type[DsparkError] = DataError, hint: str = "") -> Model:
    """Read and validate a JSON file whose `schema` field must be the one that `model` declares as its default.

    Raises:
        error: missing file, bad JSON, another schema (both named), or fields that do not validate (all named).
    """
    value = read_json(path, error, hint)
    expected = model.model_fields["schema_"].default if "schema_" in model.model_fields else None
    if expected is not None:
        found = value.get("schema") if isinstance(value, dict) else None
        if found != expected:
            raise error(
                f"{path}: schema is {found!r}, this version of dspark reads {expected!r}",
                hint or "use the dspark version that wrote the file, or make it again with `dspark run`",
            )
    try:
        return model.model_validate(value)
    except ValidationError as reason:
        raise error(f"{path}: {validation_text(reason)}", hint) from None


def write_model(path: Path, value: BaseModel) -> None:
    """Write a model as JSON, atomically; absent optional values are left out."""
    write_json(path, model_json(value))


def model_json(value: BaseModel) -> dict[str, Any]:
    """The JSON object of a model: aliases as keys, absent optional values left out."""
    result: dict[str, Any] = value.model_dump(mode="json", by_alias=True, exclude_none=True)
    return result


def validation_text(error: ValidationError) -> str:
    """All mistakes of a pydantic error in one line: `key: what; key: what`."""
    return "; ".join(
        f"{'.'.join(str(part) for part in item['loc']) or 'value'}: {item['msg']}" for item in error.errors()
    )


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"duplicate key {key if len(key) <= 40 else key[:40] + '...'!r}")
        result[key] = value
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not allowed")


def _finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text if len(text) <= 40 else text[:40] + '...'} is too large a number")
    return value
