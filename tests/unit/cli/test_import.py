"""The command line of `dspark import`: one thing at a time, the same in text and JSON, nothing needed to look."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "drafters"))  # foreign_layouts.py

from foreign_layouts import nested, write

from dspark.cli.boundary import run_command
from dspark.drafters.config import DrafterConfig
from dspark.drafters.dspark import DSparkDrafter


@pytest.fixture
def released(tmp_path: Path) -> Path:
    import torch

    config = DrafterConfig(
        gamma=4, layers=1, taps=(0, 1), mask_token_id=3, hidden_size=8, intermediate_size=16, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, rms_norm_eps=1e-5, rope={"rope_type": "default", "rope_theta": 1e4},
        max_position=64, vocab_size=20, markov_rank=2, target_model_type="llama", num_target_layers=4,
    )  # fmt: skip
    drafter = DSparkDrafter(config, torch.zeros(20, 8), torch.zeros(20, 8))
    return write(tmp_path / "released", nested(drafter), drafter.state_dict())


@pytest.fixture
def v4(tmp_path: Path) -> Path:
    folder = tmp_path / "v4"
    folder.mkdir()
    keys = {"block_size": 5, "markov_rank": 256, "noise_token_id": 128799, "target_layer_ids": [40, 41, 42]}
    config = {"architectures": ["DeepseekV4ForCausalLM"], **{f"dspark_{key}": value for key, value in keys.items()}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def called(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert run_command(["import", *arguments]) == code
    said = capsys.readouterr()
    return said.out if code == 0 else said.err


def test_a_release_is_shown_outside_any_workspace(
    released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = called(capsys, str(released), "--inspect")
    for row in (
        "layout           specforge",
        "taps             outputs of layers 0 1",
        "confidence head  yes",
        "gamma            4",
    ):
        assert row in text
    assert "cannot be imported" not in text
    found: dict[str, Any] = json.loads(called(capsys, str(released), "--inspect", "--json"))
    assert (found["schema"], found["layout"], found["taps"]) == ("dspark/drafter-inspection/1", "specforge", [0, 1])


def test_a_target_with_its_drafter_inside_is_shown_and_gets_engine_files(
    v4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = called(capsys, str(v4), "--inspect")
    assert "5 drafts, 6 tokens verified" in text and "dspark_noise_token_id    128799" in text
    assert "what is done where:" in text and "not in this version" in text
    assert "bash out/engines/sglang/launch.sh" in called(capsys, str(v4), "--out", "out")
    document = json.loads(called(capsys, str(v4), "--out", "out", "--json"))
    assert document["scripts"][0] == "engines/sglang/launch.sh" and document["drafter"]["gamma"] == 5


def test_only_one_thing_is_asked_for_at_a_time(
    released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = str(released)
    assert "name one of them" in called(capsys, source, code=2)
    assert "name one of them" in called(capsys, source, "--inspect", "--target", "tiny", code=2)
    assert "--build and --like go with --target" in called(capsys, source, "--inspect", "--build", "x", code=2)
    assert "name a build" in called(capsys, source, "--target", "tiny", "--like", "x", code=2)
    assert "--target NAME --build NAME" in called(capsys, source, "--out", "out", code=2)
    assert "not inside a workspace" in called(capsys, source, "--target", "tiny", code=3)
    (released / "config.json").write_text("{}")
    assert "architectures is None" in called(capsys, source, "--inspect", code=4)
