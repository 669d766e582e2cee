from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # fake_build.py, resealing.py

import fake_build
from resealing import reseal

from dspark.package.assemble import assemble


@pytest.fixture(scope="session")
def pristine(tmp_path_factory) -> Path:
    """A package made by the real `assemble`; never changed."""
    root = tmp_path_factory.mktemp("build")
    assemble(fake_build.make(root), root / "package", card=fake_build.card)
    return root / "package"


@pytest.fixture
def package(pristine, tmp_path) -> Path:
    """A copy of the package, to be damaged."""
    return Path(shutil.copytree(pristine, tmp_path / "package"))


@pytest.fixture
def sources(tmp_path):
    """The outputs of a build, to be damaged before they become a package."""
    return fake_build.make(tmp_path / "build")


@pytest.fixture(name="reseal")
def _reseal():
    return reseal
