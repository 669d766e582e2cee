"""`dspark config show`: every setting of a build, and on request where it comes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark.cli.boundary import run_command

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CHECKOUT)


def test_each_layer_is_named_where_it_decides(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A setting from each layer, and what the build is made of, against the files themselves."""
    monkeypatch.setenv("DSPARK_TRAINING__SEED", "7")
    asked = ["config", "show", "--target", "tiny", "--set", "training.steps=9", "--json"]
    assert run_command(asked) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings["training.steps"] == {"value": 9, "from": "--set training.steps=9"}
    assert settings["training.seed"] == {"value": 7, "from": "DSPARK_TRAINING__SEED"}
    assert settings["features.mode"] == {"value": "cached", "from": line_of("params.yaml", "  mode: cached")}
    assert settings["target"]["value"] == "tiny"
    assert settings["recipe"] == {"value": "dspark", "from": line_of("params.yaml", "  recipe: dspark")}
    domains = settings["domains"]
    assert domains["from"].partition(":")[0] in ("params.yaml", "pipeline/builds/tiny.yaml")
    assert any(setting["from"] == "built-in" for setting in settings.values())


def test_origins_are_a_column_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["config", "show", "--target", "tiny"]) == 0
    plain = capsys.readouterr().out.splitlines()
    assert plain[0].split() == ["setting", "value"]
    assert run_command(["config", "show", "--target", "tiny", "--origin"]) == 0
    with_origin = capsys.readouterr().out.splitlines()
    assert with_origin[0].split() == ["setting", "value", "from"] and len(with_origin) == len(plain)
    assert run_command(["plan", "--target", "tiny", "--settings"]) == 0
    assert capsys.readouterr().out.splitlines() == with_origin


def test_no_name_says_which_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["config", "show"]) == 2
    assert "targets list" in capsys.readouterr().err


def line_of(path: str, line: str) -> str:
    lines = (CHECKOUT / path).read_text().splitlines()
    return f"{path}:{lines.index(line) + 1}"
