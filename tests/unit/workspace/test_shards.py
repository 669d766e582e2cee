"""Which stages would miss feature shards."""

from __future__ import annotations

from pathlib import Path

from dspark.config.stages import STAGES
from dspark.workspace import shards

SCRIPTS = Path(__file__).resolve().parents[3] / "stages"


def test_the_stages_that_read_shards_are_those_whose_scripts_do() -> None:
    found = [stage.name for stage in STAGES if "open_split(" in (SCRIPTS / f"{stage.script}.py").read_text()]
    assert sorted(found) == sorted(shards.READERS)
    assert shards.reads("train@demo") and not shards.reads("dvc") and not shards.reads("features@demo")
