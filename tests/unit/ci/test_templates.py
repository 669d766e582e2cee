"""The CI templates: what starts them, what they may do, and that no value somebody typed becomes text of a script."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from dspark.cli.root import root as dspark
from dspark.io.yamlfile import read_yaml

CI = Path(__file__).resolve().parents[3] / "pipeline/ci"
GITHUB = sorted((CI / "github").glob("*.yml"))
GITLAB = CI / "gitlab-ci.yml"
KEYWORDS = {"stages", "variables", ".dspark"}


def jobs(path: Path) -> dict[str, Any]:
    value = read_yaml(path)
    return value["jobs"] if "jobs" in value else {name: job for name, job in value.items() if name not in KEYWORDS}


def scripts(path: Path) -> Iterator[tuple[str, str]]:
    """Every script of a template, with the job it stands in."""
    for name, job in jobs(path).items():
        if "steps" in job:
            yield from ((name, step["run"]) for step in job["steps"] if "run" in step)
        else:
            for key in ("before_script", "script", "after_script"):
                yield from ((name, line) for line in job.get(key, ()))


ALL = [*GITHUB, GITLAB]
SCRIPTS = [
    pytest.param(text, id=f"{path.stem}-{job}-{n}") for path in ALL for n, (job, text) in enumerate(scripts(path))
]


def test_the_templates_are_there() -> None:
    assert [path.name for path in GITHUB] == ["drift.yml", "retrain.yml"] and GITLAB.is_file()
    assert len(SCRIPTS) > 10


@pytest.mark.parametrize("text", SCRIPTS)
def test_scripts_are_shell_and_hold_no_interpolation(text: str) -> None:
    assert "${{" not in text
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    # Every variable that a person sets stands in quotes, so that blanks and stars in it stay what they are.
    unquoted = re.sub(r'"[^"]*"|\'[^\']*\'', "", text)
    assert not re.search(r"\$\{?(TARGET|DOMAIN|REASON|METRICS)", unquoted), unquoted
    assert not re.search(r"\$PROMPTS", unquoted)
    assert "eval" not in text.split()


def commands(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        for part in re.split(r"\|\||&&|;", line):
            words = part.split()
            if words[:1] == ["dspark"]:
                yield words[1:]


@pytest.mark.parametrize("text", SCRIPTS)
def test_every_verb_and_option_exists(text: str) -> None:
    for words in commands(text):
        command: click.Command = dspark
        while isinstance(command, click.Group):
            found = command.get_command(click.Context(command), words.pop(0))
            assert found is not None
            command = found
        known = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"--[a-z][a-z-]*", " ".join(words))) <= known


@pytest.mark.parametrize("path", GITHUB, ids=lambda path: path.stem)
def test_github_workflows_are_started_by_owners_and_end(path: Path) -> None:
    value = read_yaml(path)
    assert set(value["on"]) <= {"workflow_dispatch", "schedule"}, "a pull request would run a stranger's code"
    assert value["permissions"] == {"contents": "read"}
    assert value["concurrency"]["group"].startswith("dspark-")
    for job in value["jobs"].values():
        assert job["timeout-minutes"] > 0
        for step in job["steps"]:
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step.get("uses", f"a@{'0' * 40}"))
            if step.get("uses", "").startswith("actions/checkout"):
                assert step["with"]["persist-credentials"] is False


def test_promotion_waits_for_the_gates_and_for_people() -> None:
    made = read_yaml(CI / "github/retrain.yml")
    assert made["concurrency"]["cancel-in-progress"] is False
    assert made["jobs"]["promote"]["environment"] == "production" and made["jobs"]["promote"]["needs"] == "judge"
    assert made["jobs"]["judge"]["needs"] == "make" and made["jobs"]["make"]["needs"] == "preflight"
    assert "gpu" in made["jobs"]["make"]["runs-on"] and "gpu" not in made["jobs"]["preflight"]["runs-on"]
    checkout = made["jobs"]["make"]["steps"][0]
    assert checkout["with"]["clean"] is False, "a rerun would begin from nothing"
    gitlab = read_yaml(GITLAB)
    assert gitlab["promote"]["environment"] == "production" and gitlab["promote"]["when"] == "manual"
    assert gitlab["make"]["resource_group"] == gitlab["promote"]["resource_group"]
    assert gitlab["make"]["variables"]["GIT_CLEAN_FLAGS"] == "none"
    assert gitlab["stages"] == ["preflight", "make", "judge", "promote"]


def test_no_merge_request_starts_gitlab() -> None:
    value = read_yaml(GITLAB)
    sources = [re.findall(r'CI_PIPELINE_SOURCE == "(\w+)"', rule["if"]) for rule in value[".dspark"]["rules"]]
    assert sorted(source for found in sources for source in found) == ["api", "schedule", "trigger", "web"]
    for job in jobs(GITLAB).values():
        assert job["extends"] == ".dspark" and "rules" not in job and job["timeout"]


def test_both_systems_ask_the_same_of_dspark() -> None:
    def asked(path: Path) -> set[str]:
        found = (" ".join(words) for _, text in scripts(path) for words in commands(text))
        return {re.sub(r"--summary \S+", "--summary", words) for words in found}

    assert asked(CI / "github/retrain.yml") == asked(GITLAB)


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="actionlint is not installed")
def test_actionlint_finds_nothing() -> None:
    labels = "self-hosted-runner:\n  labels: [gpu, dspark]\n"
    done = subprocess.run(
        ["actionlint", "-config-file", "/dev/stdin", *map(str, GITHUB)],
        input=labels,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
