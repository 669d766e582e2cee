"""A released drafter through the whole pipeline: imported, not trained, and packaged with the release's own tensors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "drafters"))  # foreign_layouts.py

from foreign_layouts import moved, speculators, write

from dspark.config.models import DrafterSettings, MarkovSettings
from dspark.drafters.checkpoint import read_checkpoint
from dspark.drafters.config import DrafterConfig
from dspark.drafters.dspark import DSparkDrafter
from dspark.targets.catalogue import read_target
from dspark.targets.ends import read_ends
from dspark.targets.materialise import materialise

if TYPE_CHECKING:
    from sandbox import Sandbox

pytestmark = pytest.mark.long


def test_an_imported_drafter_is_packaged_without_training(sandbox: Sandbox, tmp_path: Path) -> None:
    root = sandbox.root
    record = materialise(read_target(root / "pipeline/targets", "tiny", root=root), root=root)
    ends = read_ends(record, root)
    settings = DrafterSettings(gamma=4, layers=1, markov=MarkovSettings(rank=8))
    drafter = moved(DSparkDrafter(DrafterConfig.of(record, settings), *ends, seed=5))
    stored = {name: value.bfloat16() for name, value in drafter.state_dict().items()}
    released = write(tmp_path / "released", speculators(drafter), stored)

    asked = ("import", str(released), "--target", "tiny", "--build", "tiny-released", "--json")
    imported = sandbox.dspark(*asked)
    assert imported.code == 0, imported.err
    digest = imported.json["imported"]
    done = sandbox.dspark(
        *("run", "--build", "tiny-released", "--no-publish", "--json", "--set", "export.onnx=false"), timeout=600
    )
    assert done.code == 0, done.err
    assert [stage["status"] for stage in done.json["stages"]] == ["ran"] * 10

    build = root / "builds/tiny-released"
    metrics = json.loads((build / "train/metrics.json").read_text())
    assert (metrics["schema"], metrics["imported"]) == ("dspark/train-imported/1", digest)
    assert len((build / "train/curves.csv").read_text().splitlines()) == 1
    for folder in ("train/drafter", "package/drafter"):
        read = read_checkpoint(build / folder, *ends, record=record)
        for name, value in read.state_dict().items():
            assert torch.equal(value.bfloat16(), stored[name]), (folder, name)
    manifest = json.loads((build / "package/manifest.json").read_text())
    assert manifest["inputs"]["recipe"]["training"]["imported"] == digest
    card = (build / "package/README.md").read_text()
    assert f"not trained here: imported from a local folder, files `{digest}`" in card
    assert str(tmp_path) not in (build / "package/manifest.json").read_text() + card
    assert sandbox.dspark("package", "verify", "builds/tiny-released/package").code == 0
    again = sandbox.dspark("run", "--build", "tiny-released", "--no-publish", "--json", "--set", "export.onnx=false")
    assert [stage["status"] for stage in again.json["stages"]] == ["up to date"] * 10
