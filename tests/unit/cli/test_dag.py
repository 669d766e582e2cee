"""`dspark dag`: the stages of a build or of any, in three forms."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from dspark.cli.boundary import run_command

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CHECKOUT)


def edges_of_dvc() -> set[tuple[str, str]]:
    """Which stage reads what another writes, from dvc.yaml: a dependency that begins as an output does."""
    stages = YAML(typ="safe").load(CHECKOUT / "dvc.yaml")["stages"]
    name = re.compile(r"\$\{[^}]*\}")
    outputs = {stage: name.sub("*", spec["do"]["outs"][0]) for stage, spec in stages.items()}
    found = set()
    for stage, spec in stages.items():
        for dependency in spec["do"]["deps"]:
            path = name.sub("*", dependency)
            for other, output in outputs.items():
                if other != stage and (f"{path}/".startswith(f"{output}/") or f"{output}/".startswith(f"{path}/")):
                    found.add((other, stage))
    return found


def test_the_stages_are_those_of_dvc(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["dag", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {(before, after) for before, after in found["edges"]} == edges_of_dvc()
    assert len(found["stages"]) == 10
    order = {stage: place for place, stage in enumerate(found["stages"])}
    assert all(order[before] < order[after] for before, after in found["edges"])


def test_a_build_has_its_own_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["dag", "--target", "tiny"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["stage"] == "reads" and rows["prompts@tiny"] == "-"
    assert rows["features@tiny"] == "responses@tiny"
    assert run_command(["dag", "--target", "tiny", "--set", "training.steps=3"]) == 0


def test_mermaid_and_dot_hold_the_same_edges(capsys: pytest.CaptureFixture[str]) -> None:
    run_command(["dag", "--json"])
    wanted = {tuple(edge) for edge in json.loads(capsys.readouterr().out)["edges"]}
    assert run_command(["dag", "--format", "dot"]) == 0
    assert set(re.findall(r'"(\w+)" -> "(\w+)";', capsys.readouterr().out)) == wanted
    assert run_command(["dag", "--format", "mermaid"]) == 0
    text = capsys.readouterr().out
    names = dict(re.findall(r'(s\d+)\["(\w+)"\]', text))
    assert {(names[before], names[after]) for before, after in re.findall(r"(s\d+) --> (s\d+)", text)} == wanted
    assert text.startswith("flowchart TD\n")


@pytest.mark.parametrize("arguments", [["--json", "--format", "dot"], ["--set", "training.steps=3"]])
def test_what_does_not_go_together_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["dag", *arguments]) == 2
