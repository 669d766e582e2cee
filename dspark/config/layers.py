"""Values from several layers merged into one tree that remembers where each leaf came from.

Later layers win: built-in < `params.yaml` < recipe < build YAML < what a verb lays over it (`dspark retrain`) <
environment `DSPARK_<SECTION>__<KEY>` < flag `--set section.key=value`. Lists are replaced, mappings are merged. A few
keys stand in no section: `--set against=...`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from dspark.config.declared import Mistake, suggestion
from dspark.io.yamlfile import key_line, problem

Keys = tuple[str, ...]
ENVIRONMENT_PREFIX = "DSPARK_"


@dataclass(frozen=True)
class Origin:
    """Where a value came from.

    Args:
        layer: `built-in`, `params.yaml`, `recipe`, `build`, `verb`, `environment` or `flag`.
        source: the file as messages show it, the variable or the flag.
        path: the YAML file, to look up lines in; None for variables and flags.
        prefix: keys of the file under which the merged tree starts.
    """

    layer: str
    source: str
    path: Path | None = None
    prefix: Keys = ()

    def at(self, keys: Sequence[str]) -> str:
        """`file:line` of a key, or the variable or flag."""
        if self.path is None:
            return self.source
        line = key_line(self.path, *self.prefix, *keys)
        return f"{self.source}:{line}" if line else self.source


BUILT_IN = Origin("built-in", "built-in")


@dataclass
class Layered:
    """A tree of settings and, for every leaf, its origin."""

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[Keys, Origin] = field(default_factory=dict)

    def merge(self, values: Mapping[str, Any], origin: Origin) -> None:
        """Lay `values` over what is there."""
        self._merge(self.tree, values, origin, ())

    def origin(self, keys: Sequence[str]) -> Origin:
        """The origin of a key, or of the nearest key above or below it; built-in if nothing was declared."""
        wanted = tuple(keys)
        for length in range(len(wanted), 0, -1):
            if wanted[:length] in self.origins:
                return self.origins[wanted[:length]]
        below = [origin for known, origin in self.origins.items() if known[: len(wanted)] == wanted]
        return below[-1] if below else BUILT_IN

    def where(self, keys: Sequence[str]) -> str:
        """`file:line`, variable or flag that a message about `keys` should name."""
        return self.origin(keys).at(keys)

    def _merge(self, tree: dict[str, Any], values: Mapping[str, Any], origin: Origin, above: Keys) -> None:
        for key, value in values.items():
            keys = (*above, key)
            if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
                self._merge(tree[key], value, origin, keys)
                continue
            self._forget(keys)
            if isinstance(value, Mapping) and value:
                tree[key] = {}
                self._merge(tree[key], value, origin, keys)
            else:
                tree[key] = value
                self.origins[keys] = origin

    def _forget(self, keys: Keys) -> None:
        for known in [known for known in self.origins if known[: len(keys)] == keys]:
            del self.origins[known]


@dataclass(frozen=True)
class Override:
    """One value from the environment or a flag."""

    keys: Keys
    value: Any
    origin: Origin

    def tree(self) -> dict[str, Any]:
        """The value inside its nested mappings."""
        result: Any = self.value
        for key in reversed(self.keys):
            result = {key: result}
        return dict(result)


@dataclass(frozen=True)
class Overlay:
    """What a verb lays over a build's file, without touching it: keys as in the file."""

    values: Mapping[str, Any]
    origin: Origin


def flag_overrides(
    flags: Iterable[str], sections: Mapping[str, Sequence[str]], alone: Sequence[str] = ()
) -> tuple[list[Override], list[Mistake]]:
    """Parse `section.key=value` flags; values are YAML (`3`, `1e-3`, `[a, b]`, `null`).

    Args:
        sections: with their keys.
        alone: keys that stand in no section.
    """
    found: list[Override] = []
    mistakes: list[Mistake] = []
    for flag in flags:
        name, separator, text = flag.partition("=")
        keys = tuple(name.strip().split("."))
        source = f"--set {flag}"
        if not separator or not all(keys):
            mistakes.append(Mistake(source, "expected section.key=value", "for instance --set training.steps=500"))
            continue
        _collect(keys, text, Origin("flag", source), sections, alone, found, mistakes)
    return found, mistakes


def environment_overrides(
    environment: Mapping[str, str], sections: Mapping[str, Sequence[str]], alone: Sequence[str] = ()
) -> tuple[list[Override], list[Mistake]]:
    """Parse `DSPARK_<SECTION>__<KEY>` variables; further keys follow after more double underscores.

    Args:
        sections: with their keys.
        alone: keys that stand in no section: `DSPARK_<KEY>`.
    """
    found: list[Override] = []
    mistakes: list[Mistake] = []
    for variable in sorted(environment):
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if not variable.startswith(ENVIRONMENT_PREFIX) or ("__" not in variable and name not in alone):
            continue
        keys = tuple(name.split("__"))
        _collect(keys, environment[variable], Origin("environment", variable), sections, alone, found, mistakes)
    return found, mistakes


def _collect(
    keys: Keys,
    text: str,
    origin: Origin,
    sections: Mapping[str, Sequence[str]],
    alone: Sequence[str],
    found: list[Override],
    mistakes: list[Mistake],
) -> None:
    if keys not in {(key,) for key in alone} and (keys[0] not in sections or len(keys) < 2):
        if keys[0] in sections:
            hint = f"keys of {keys[0]}: {', '.join(sections[keys[0]])}"
            mistakes.append(Mistake(origin.source, f"a key of {keys[0]!r} is missing", hint))
            return
        listing = ", ".join([*sections, *(f"{key} (alone)" for key in alone)])
        hint = suggestion(keys[0], [*sections, *alone], f"sections: {listing}")
        mistakes.append(Mistake(origin.source, f"unknown section {keys[0]!r}", hint))
        return
    if not text.strip():
        hint = "give one, `null` for none" if origin.layer == "flag" else "give one, `null` for none, or unset it"
        mistakes.append(Mistake(origin.source, "it has no value", hint))
        return
    try:
        value = YAML(typ="safe", pure=True).load(text)
    except YAMLError as reason:
        mistakes.append(Mistake(origin.source, f"value is not valid YAML: {problem(reason)}"))
        return
    found.append(Override(keys, value, origin))
