"""Placeholders for what a released reader imports and does not need for reading.

Only to be used in a process that does nothing but read: an import of a named module, or of anything below it, gives a
module whose every name is a class that fails when it is used. It may be inherited from and stand in annotations.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterable
from typing import Any


def put_in_place_of(names: Iterable[str]) -> None:
    """From now on these modules are placeholders, whether they are installed or not."""
    sys.meta_path.insert(0, _Finder(frozenset(names)))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        parts = name.split(".")
        if not any(".".join(parts[:length]) in self.names for length in range(1, len(parts) + 1)):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: _placeholder(spec.name, name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to execute."""


def _placeholder(module: str, name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError(f"the reader used {module}.{name}, which is a placeholder")

    def schema(*_: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(fail)

    methods = {"__new__": fail, "__get_pydantic_core_schema__": classmethod(schema)}
    return type(name, (), {"__module__": module, **methods})
