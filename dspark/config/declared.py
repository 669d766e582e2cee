"""Reading what a user declares in YAML: all mistakes at once, each with its line and the name that was meant.

One reader for targets, domains, recipes, builds, serving profiles and `params.yaml`.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dspark.config.models import NAME_PATTERN, Settings
from dspark.config.names import declared_names as declared_names
from dspark.config.wording import options_of, wording
from dspark.errors import SettingsError
from dspark.io.yamlfile import key_line, read_yaml

Declared = TypeVar("Declared", bound=Settings)

NAME = re.compile(NAME_PATTERN)
_LOOK = "correct it, then see what the settings come to: dspark config show --target NAME"


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong in the settings.

    Args:
        where: `file:line`, an environment variable or a flag.
        what: what is wrong, with key and value.
        hint: the change or the command that mends it.
    """

    where: str
    what: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class Mistakes(SettingsError):
    """Everything that is wrong in the settings, raised together so that one round of mending suffices."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        self.mistakes = tuple(dict.fromkeys(mistakes))
        if len(self.mistakes) == 1:
            super().__init__(str(self.mistakes[0]), self.mistakes[0].hint or _LOOK)
            return
        lines = [f"{len(self.mistakes)} mistakes in the settings"]
        for mistake in self.mistakes:
            lines.append(f"  {mistake}")
            if mistake.hint:
                lines.append(f"    {mistake.hint}")
        super().__init__("\n".join(lines))


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant, or None."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def suggestion(name: str, known: Iterable[str], listing: str = "") -> str:
    """The hint for an unknown name: `did you mean 'x'?`, then where all names are listed."""
    names = sorted(known)
    near = closest(name, names)
    parts = [f"did you mean {near!r}?"] if near else []
    parts.append(listing or ("known: " + ", ".join(names) if names else "there are none yet"))
    return "  ".join(parts)


def read_mapping(path: Path, display: str) -> dict[str, Any]:
    """A YAML file whose top level is a mapping with string keys; an empty file is an empty mapping.

    Args:
        display: how messages call the file (its path below the workspace).
    Raises:
        SettingsError: missing, not YAML, or no mapping.
    """
    try:
        value = read_yaml(path)
    except SettingsError as error:
        raise SettingsError(error.message.replace(str(path), display, 1), error.hint) from None
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise SettingsError(f"{display}: expected `key: value` lines, found {_kind(value)}")
    return value


def read_declared(folder: Path, name: str, model: type[Declared], *, word: str, root: Path | None = None) -> Declared:
    """Read and validate `<folder>/<name>.yaml`; its `name` may be left out and must agree with the file's if given.

    Args:
        word: what the file declares, for messages: `target`, `recipe`, ...
        root: the workspace; messages name files below it.
    Raises:
        Mistakes: everything that is wrong, with lines.
        SettingsError: no such file (with did-you-mean), or not YAML.
    """
    path = folder / f"{name}.yaml"
    names = declared_names(folder)
    if name not in names:
        raise SettingsError(
            f"{word} {name!r} does not exist ({relative(folder, root)}/)",
            suggestion(name, names, _listing(word, names)),
        )
    display = relative(path, root)
    value = read_mapping(path, display)
    stated = value.setdefault("name", name)
    if stated != name:
        line = key_line(path, "name")
        raise Mistakes([Mistake(_at(display, line), f"name is {stated!r} but the file is called {path.name}")])
    return validated(value, model, path, display)


def validated(value: dict[str, Any], model: type[Declared], path: Path, display: str) -> Declared:
    """What a file declares, as a model.

    Args:
        value: the file's mapping.
        path: where lines are looked up.
        display: how messages call the file.
    Raises:
        Mistakes: everything that is wrong, with lines.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise Mistakes(
            [
                Mistake(
                    _at(display, key_line(path, *keys_of(item, model))), describe(item, model), hint_for(item, model)
                )
                for item in error.errors()
            ]
        ) from None


def keys_of(item: ErrorDetails, model: type[BaseModel]) -> list[str]:
    """The keys of the file at a pydantic error's location, without list indices and tags of unions."""
    return _walk(model, item["loc"])[0]


def describe(item: ErrorDetails, model: type[BaseModel], prefix: str = "") -> str:
    """One pydantic error in our words, with its key; `prefix` stands before the key."""
    key = prefix + ".".join(keys_of(item, model))
    if item["type"] == "extra_forbidden":
        return f"unknown key {key!r}"
    if item["type"] == "missing":
        return f"key {key!r} is missing"
    text = wording(item)
    given = item.get("input")
    shown = f", not {given!r}" if isinstance(given, str | int | float | bool) or given is None else ""
    return f"{key}: {text}{shown}" if key else text


def hint_for(item: ErrorDetails, model: type[BaseModel]) -> str:
    """Did-you-mean for one of a few values, or for an unknown key, from the fields of the model it was meant for."""
    if isinstance(item.get("input"), str) and (near := closest(item["input"], options_of(item))):
        return f"did you mean {near!r}?"
    if item["type"] != "extra_forbidden":
        return ""
    *parents, key = item["loc"]
    fields = {name for found in _walk(model, parents)[1] for name in found.model_fields}
    return suggestion(str(key), fields) if fields else ""


def _plural(word: str) -> str:
    """Several of what a declaration declares."""
    return f"{word[:-1]}ies" if word.endswith("y") else f"{word}s"


def relative(path: Path, root: Path | None) -> str:
    """The path as messages show it: below the workspace where it lies there."""
    if root is not None and path.is_relative_to(root):
        return path.relative_to(root).as_posix()
    return str(path)


def _walk(model: type[BaseModel], location: Sequence[str | int]) -> tuple[list[str], list[type[BaseModel]]]:
    """The keys of a file along a location inside `model`, and the models that may stand at its end."""
    keys: list[str] = []
    models = [model]
    for part in location:
        tagged = [found for found in models if _tag(found) == part]
        if tagged and not any(part in found.model_fields for found in models):
            models = tagged  # the tag of a discriminated union, not a key
        elif isinstance(part, str):
            keys.append(part)
            fields = [found.model_fields[part] for found in models if part in found.model_fields]
            models = [inner for field in fields for inner in _models_in(field.annotation)]
    return keys, models


def _tag(model: type[BaseModel]) -> str | None:
    """The value by which a discriminated union chooses a model."""
    field = model.model_fields.get("kind")
    options = typing.get_args(field.annotation) if field is not None else ()
    return options[0] if len(options) == 1 and isinstance(options[0], str) else None


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is not None:
        return [found for part in typing.get_args(annotation) for found in _models_in(part)]
    return []


def _listing(word: str, names: Sequence[str]) -> str:
    listed = ", ".join(names) or "none yet"
    return f"all {_plural(word)}: {listed}"


def _at(display: str, line: int | None) -> str:
    return f"{display}:{line}" if line else display


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else "text" if isinstance(value, str) else type(value).__name__
