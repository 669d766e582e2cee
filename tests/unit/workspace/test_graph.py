"""The settings of a build's stages: what cannot be made is refused before its first stage."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "package"))  # fake_build.py

import fake_build

from dspark.config.build import ResolvedBuild
from dspark.config.resolve import resolve
from dspark.errors import SettingsError
from dspark.io.jsonfile import write_model
from dspark.workspace.graph import all_settings
from dspark.workspace.layout import Workspace

CHECKOUT = Path(__file__).resolve().parents[3]
GEMMA4 = {"hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0}


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A workspace whose target `tiny` was found to be a Gemma 4."""
    (tmp_path / "pipeline/builds").mkdir(parents=True)
    for name in (
        "params.yaml",
        "serving_profiles",
        *(f"pipeline/{name}" for name in ("domains", "recipes", "targets")),
    ):
        (tmp_path / name).symlink_to(CHECKOUT / name)
    made = Workspace(tmp_path)
    record = fake_build.record()
    text = {key: value for key, value in record.text_config.items() if key != "hidden_act"} | GEMMA4
    changes = {"architecture": "Gemma4ForCausalLM", "model_type": "gemma4_text", "text_config": text}
    write_model(made.target_record("tiny"), record.model_copy(update=changes))
    return made


def resolved(workspace: Workspace, recipe: str) -> ResolvedBuild:
    build = {"name": "mine", "target": "tiny", "recipe": recipe, "domains": ["math"]}
    (workspace.root / "pipeline/builds/mine.yaml").write_text(json.dumps(build))  # JSON is YAML
    return resolve(workspace.root, build="mine").chosen


def test_eagle3_for_a_gemma4_target_is_refused_before_the_first_stage(workspace: Workspace) -> None:
    """Its layers are Qwen3's alone; a corpus that is answered first would be hours of work for nothing."""
    with pytest.raises(
        SettingsError, match=r"target tiny: .*Gemma 4's layers, and none of kind 'eagle3' is"
    ) as refused:
        list(all_settings(workspace, resolved(workspace, "eagle3")))
    assert "a recipe of kind dspark" in refused.value.hint and "dspark plan --build NAME" in refused.value.hint


@pytest.mark.parametrize("recipe", ["dspark", "dspark-gated", "dspark-rnn", "dflash", "dflash-tv", "mtp1"])
def test_every_other_recipe_fits_a_gemma4_target(workspace: Workspace, recipe: str) -> None:
    assert list(all_settings(workspace, resolved(workspace, recipe)))
