"""`reference/settings.md` and `reference/files.md`: the pydantic models, a table each.

Types and limits come from the models' JSON schema, explanations from the comments beside the fields: they are written
once, where the field is.
"""

from __future__ import annotations

import importlib
import inspect
import io
import json
import re
import textwrap
import tokenize
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel

from dspark.config.gates import GatePolicy
from dspark.config.models import Build, DomainSpec, RecipeSpec, ServingProfile, TargetSpec
from dspark.config.studies import StudySpec
from dspark.config.suites import SuiteSpec
from dspark.package import contents
from dspark.package.manifest import Manifest

Model = type[BaseModel]

# What a user writes; what else they are made of follows behind each.
_DECLARED: dict[str, Model] = {
    "pipeline/targets/NAME.yaml": TargetSpec,
    "pipeline/domains/NAME.yaml": DomainSpec,
    "pipeline/recipes/NAME.yaml": RecipeSpec,
    "pipeline/builds/NAME.yaml, resolved": Build,
    "serving_profiles/NAME.yaml": ServingProfile,
    "pipeline/gates.yaml": GatePolicy,
    "pipeline/studies/NAME.yaml": StudySpec,
    "pipeline/suites/NAME.yaml": SuiteSpec,
}
_SETTINGS = """# Settings and declarations

Made from the models that read them (`dspark/config/`) when the site is built. Unknown keys are mistakes, and all
mistakes of a file are told at once. A later layer wins: built-in defaults, `params.yaml`, recipe, build, environment,
`--set section.key=value`. `dspark plan --target NAME --settings` shows what they come to, and where each value is from.
"""
_FILES = """# Files of a package

Made from the models that write and read them when the site is built. Every JSON file names its `schema`; a reader that
does not know it says so. A measured number is `{value, n, ci95}`, its unit is in its name, and what could not be
measured is absent with a reason beside it. Where each file stands: the package's own `manifest.json` lists them all.
"""


def settings_page() -> str:
    """Everything that a user declares."""
    return _page(_SETTINGS, _DECLARED)


def files_page() -> str:
    """Everything of dspark's own that lies in a package."""
    found: dict[str, Model] = {"manifest.json": Manifest}
    for pattern, name in contents._MODELS.items():
        module, _, attribute = name.partition(":")
        path = pattern.replace("\\.", ".").replace("[^/]+", "NAME")
        found[path] = getattr(importlib.import_module(module), attribute)
    return _page(_FILES, found)


def _page(head: str, roots: dict[str, Model]) -> str:
    parts, seen = [head], set(roots.values())
    for title, model in roots.items():
        parts += [f"## `{title}`\n", *_section(model, heading=False)]
        for part in _below(model, seen):
            parts += _section(part, heading=True)
    return "\n".join(parts)


def _below(model: Model, seen: set[Model]) -> Iterator[Model]:
    """Models of a model's fields that have no section yet, in the order in which they are met."""
    for field in model.model_fields.values():
        for part in _models_in(field.annotation):
            if part not in seen:
                seen.add(part)
                yield part
                yield from _below(part, seen)


def _models_in(annotation: Any) -> Iterator[Model]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _models_in(inner)


def _anchor(model: Model) -> str:
    return f"{model.__module__.rpartition('.')[2]}-{model.__name__}".lower().replace("_", "-")


def _section(model: Model, *, heading: bool) -> Iterator[str]:
    if heading:
        yield f"### {model.__name__} {{ #{_anchor(model)} }}\n"
    else:
        yield f'<span id="{_anchor(model)}"></span>\n'
    yield " ".join(inspect.cleandoc(model.__doc__ or "").split("\n\n")[0].split()) + "\n"
    schema = model.model_json_schema(by_alias=True, mode="validation")
    comments = comments_of(model)
    rows = []
    for name, field in model.model_fields.items():
        key = field.alias or name
        described = schema["properties"].get(key)
        if described is None:
            continue
        needed = key in schema.get("required", ())
        default = "needed" if needed else _default(described, field)
        kinds = list(_models_in(field.annotation))
        rows.append(f"| `{key}` | {_kind(described, schema, kinds)} | {default} | {_cell(comments.get(name, ''))} |")
    yield "\n".join(["| key | what it takes | if left out | |", "|---|---|---|---|", *rows]) + "\n"


def _default(described: dict[str, Any], field: Any) -> str:
    if "default" not in described:
        return "" if field.default_factory is None else "empty"
    value = described["default"]
    if value is None:
        return ""
    if isinstance(value, dict):
        return "its defaults" if value else "empty"
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def _kind(described: dict[str, Any], schema: dict[str, Any], kinds: list[Model]) -> str:
    """A JSON schema in words."""
    if "$ref" in described:
        name = described["$ref"].rpartition("/")[2]
        model = next((one for one in kinds if name == one.__name__ or name.endswith(f"__{one.__name__}")), None)
        if model is not None:
            return f"[{model.__name__}](#{_anchor(model)})"
        return _kind(schema["$defs"][name], schema, kinds)
    if "const" in described:
        return f"`{json.dumps(described['const'])}`"
    if "enum" in described:
        return "one of " + ", ".join(f"`{value}`" for value in described["enum"])
    for several in ("anyOf", "oneOf"):
        if several in described:
            options = [_kind(one, schema, kinds) for one in described[several] if one.get("type") != "null"]
            return " or ".join(dict.fromkeys(options))
    kind = described.get("type")
    if kind == "array":
        if "prefixItems" in described:
            return "[" + ", ".join(_kind(one, schema, kinds) for one in described["prefixItems"]) + "]"
        inner = _kind(described["items"], schema, kinds) if described.get("items") else "anything"
        return f"list of {inner}" + (", not empty" if described.get("minItems") else "")
    if kind == "object":
        extra = described.get("additionalProperties")
        return f"map to {_kind(extra, schema, kinds)}" if isinstance(extra, dict) and extra else "map"
    if kind in ("integer", "number"):
        limits = {"minimum": "&ge;", "exclusiveMinimum": ">", "maximum": "&le;", "exclusiveMaximum": "&lt;"}
        shown = [f"{sign} {described[name]:g}" for name, sign in limits.items() if name in described]
        return " ".join([{"integer": "whole number", "number": "number"}[kind], ", ".join(shown)]).strip()
    if kind == "string" and "pattern" in described:
        return _pattern(described["pattern"])
    return {"string": "text", "boolean": "`true` or `false`"}.get(str(kind), "anything")


def _pattern(pattern: str) -> str:
    from dspark.config.models import ADDRESS_PATTERN, DIGEST_PATTERN, NAME_PATTERN, VERSION_RANGE

    known = {
        NAME_PATTERN: "name",
        DIGEST_PATTERN: "sha256",
        ADDRESS_PATTERN: "http(s) address",
        VERSION_RANGE: "version range",
    }
    return known.get(pattern, "text of a form")


def comments_of(model: Model) -> dict[str, str]:
    """The comment of each field: beside it, or on the lines above it."""
    found: dict[str, str] = {}
    for one in reversed(model.__mro__):
        if isinstance(one, type) and issubclass(one, BaseModel) and one is not BaseModel:
            found |= _comments_in(textwrap.dedent(inspect.getsource(one)), inspect.get_annotations(one))
    return found


def _comments_in(source: str, names: Iterable[str]) -> dict[str, str]:
    """Comments by field, from the source of one class."""
    known = set(names)
    found: dict[str, str] = {}
    above: list[str] = []
    field, depth, fresh = "", 0, True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if fresh and token.string in ("def", "@"):
            break  # methods follow, and what stands in them is about them
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ")
            if fresh:
                above.append(text)
            elif field:
                found[field] = " ".join(filter(None, [found.get(field, ""), text]))
        elif token.type in (tokenize.NL, tokenize.NEWLINE):
            if token.type == tokenize.NL and not token.line.strip():
                above = []  # a blank line: what stood above is about something else
            if token.type == tokenize.NEWLINE:
                field, fresh = "", True
            continue
        elif token.type == tokenize.NAME and fresh and depth == 0:
            field = token.string if token.string in known else ""
            if field and above:
                found[field] = " ".join(above)
            above, fresh = [], False
        elif token.type not in (tokenize.INDENT, tokenize.DEDENT):
            fresh = False
    return found


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")
