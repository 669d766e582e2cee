from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "package"))  # fake_build.py
sys.path.insert(0, str(Path(__file__).parent))  # full_build.py

import fake_build
import full_build

from dspark.package.assemble import assemble
from dspark.report import render_card
from dspark.report.build_plots import PlotSources
from dspark.workspace.layout import Workspace


@pytest.fixture(scope="session")
def pristine(tmp_path_factory) -> Path:
    """A package with its real model card; never changed."""
    root = tmp_path_factory.mktemp("build")
    assemble(fake_build.make(root), root / "package", card=render_card)
    return root / "package"


@pytest.fixture(scope="session")
def whole(tmp_path_factory) -> Path:
    """A package with every figure and record; never changed."""
    root = tmp_path_factory.mktemp("whole")
    assemble(full_build.make(root), root / "package", card=render_card)
    return root / "package"


@pytest.fixture(scope="session")
def weaker(tmp_path_factory) -> Path:
    """Another package of the same target, whose drafts were accepted less often; never changed."""
    root = tmp_path_factory.mktemp("weaker")
    sources = full_build.make(root, accepted=(0, 1))
    sources.lineage.versions["numpy"] = "2.0.0"
    cost = sources.costs[fake_build.CPU]
    cost.write_text(cost.read_text().replace("60.0", "61.0"))
    assemble(sources, root / "package", card=render_card)
    return root / "package"


@pytest.fixture
def sources(tmp_path: Path) -> PlotSources:
    """A build with every file in its real format."""
    made = full_build.make(tmp_path / "build")
    return PlotSources(
        made.evaluate, made.calibrate, dict(made.certificates), dict(made.costs), tmp_path, train=made.train
    )


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    root = tmp_path / "workspace"
    files = {
        "dvc.yaml": "",
        "stages/x.py": "",
        "params.yaml": f"defaults: {{recipe: dspark, serving_profiles: [{fake_build.CPU}], domains: [math]}}\n",
        "pipeline/targets/tiny.yaml": "source: {kind: folder, path: /x}\n",
        "pipeline/builds/demo.yaml": "target: tiny\n",
        "pipeline/recipes/dspark.yaml": "drafter: {gamma: 3, layers: 1}\n",
        "pipeline/domains/math.yaml": "source: {kind: jsonl, path: rows.jsonl}\n",
        "pipeline/domains/rows.jsonl": '{"prompt": "hello"}\n',
        f"serving_profiles/{fake_build.CPU}.yaml": "engine: reference\naccess: local\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Workspace(root)
