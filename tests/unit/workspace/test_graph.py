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
from dspark.config.studies import resolve_study
from dspark.errors import SettingsError
from dspark.io.jsonfile import write_model
from dspark.workspace.graph import all_settings, feeds, instances, leading_to, write_dag
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


def test_what_leads_to_an_evaluation_is_made_and_nothing_else() -> None:
    """Of a build with two serving profiles: only the first one's costs are read before certification."""
    chosen = resolve(CHECKOUT, build="smollm2-135m").chosen
    stages = [instance.stage.name for instance in leading_to("evaluate", [chosen])]
    assert stages == ["prompts", "responses", "features", "train", "calibrate", "profile", "export", "evaluate"]
    assert leading_to("package", [chosen]) == instances(chosen)


def test_what_several_builds_share_is_made_once_and_before_them() -> None:
    study = resolve_study(CHECKOUT, "depth", build="tiny")
    planned = leading_to("evaluate", study.pipeline.wanted)
    assert len(planned) == 3 + 5 * len(study.variants) == len({instance.name for instance in planned})
    for place, instance in enumerate(planned):
        assert not any(feeds(later, instance) for later in planned[place:])


def test_variants_are_in_the_dag_beside_the_builds_of_the_workspace(tmp_path: Path) -> None:
    pipeline = resolve_study(CHECKOUT, "depth", build="tiny").pipeline
    write_dag(Workspace(tmp_path), pipeline)
    builds = json.loads((tmp_path / ".dspark/dag.json").read_text())["builds"]
    assert {"tiny", "smollm2-135m", *(f"tiny.depth.layers-{layers}" for layers in range(1, 6))} <= builds.keys()
    assert {builds[f"tiny.depth.layers-{layers}"]["corpus"] for layers in range(1, 6)} == {"tiny"}
