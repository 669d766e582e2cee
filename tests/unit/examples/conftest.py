from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "package"))  # fake_build.py

import fake_build

from dspark.package.assemble import assemble

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound package with made-up figures, whose expected values are worked out by hand."""
    root = tmp_path_factory.mktemp("example")
    assemble(fake_build.make(root), root / "package", card=fake_build.card)
    return root / "package"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs a script of examples/ in this process as it is run by hand, and returns its names."""

    def run(script: str, *arguments: object, name: str = "__main__") -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        return runpy.run_path(str(CHECKOUT / "examples" / script), run_name=name)

    return run
