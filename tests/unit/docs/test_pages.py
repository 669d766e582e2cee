"""The generated pages of the reference say what the code says."""

from __future__ import annotations

import re
from typing import get_args

import pytest
from models import comments_of
from pages import PAGES
from pydantic import BaseModel

import dspark
from dspark.cli.root import VERBS
from dspark.config.models import DrafterSettings, MarkovType, TargetSpec


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return {name: make() for name, make in PAGES.items()}


def test_the_command_line_has_every_verb_with_its_options(made: dict[str, str]) -> None:
    page = made["reference/cli.md"]
    for verb in VERBS:
        assert f"## `dspark {verb}`" in page
    assert "### `dspark package verify`" in page
    assert "| `--to [staging|production]` |" in page
    assert "Override one setting, for instance training.steps=500" in page
    assert "\b" not in page
    assert "| `-h, --help` |" in page


def test_the_api_has_every_public_name_with_its_docstring(made: dict[str, str]) -> None:
    page = made["reference/api.md"]
    for name in dspark.LIGHT | dspark.HEAVY:
        assert f"### `{name}`" in page
    assert "class PrefixScheduler(" in page and "#### `PrefixScheduler.plan`" in page
    assert "- `CalibrationError`: if a temperature is not a positive finite number" in page
    assert "a[r, j] = prod_{i<=j} sigmoid(z[r, i] / T[i])" in page
    assert "self" not in re.findall(r"```python\n(.*?)```", page, re.DOTALL)[3]


def test_settings_have_type_limits_default_and_comment(made: dict[str, str]) -> None:
    page = made["reference/settings.md"]
    row = next(line for line in page.splitlines() if line.startswith("| `gamma`"))
    assert "whole number" in row and "1" in row and "64" in row and "`7`" in row
    row = next(line for line in page.splitlines() if line.startswith("| `draft_vocab_size`"))
    assert "the most frequent ones of the train split; None: the whole vocabulary" in row
    for value in get_args(MarkovType):
        assert f"`{value}`" in next(line for line in page.splitlines() if line.startswith("| `type` | one of"))
    for title in ("pipeline/targets/NAME.yaml", "serving_profiles/NAME.yaml", "pipeline/gates.yaml"):
        assert f"## `{title}`" in page


def test_files_of_a_package_are_described(made: dict[str, str]) -> None:
    page = made["reference/files.md"]
    for path in ("manifest.json", "certificate.json", "scheduler/scheduler.json", "evidence/certify/NAME.json"):
        assert f"## `{path}`" in page
    assert '`"dspark/certificate/1"`' in page


@pytest.mark.parametrize("name", PAGES)
def test_links_inside_a_page_have_their_anchor(name: str, made: dict[str, str]) -> None:
    page = made[name]
    for anchor in re.findall(r"\]\(#([^)]+)\)", page):
        assert f"{{ #{anchor} }}" in page or f'id="{anchor}"' in page, anchor


def test_comments_belong_to_the_field_beside_or_below_them() -> None:
    found = comments_of(TargetSpec)
    assert found["public_id"] == "what packages call the target; a local path never leaves the machine"
    assert found["config"].startswith("What its config.json says of its size")
    assert "Defaults of a class" not in " ".join(found.values()), "that is said in a method"
    assert comments_of(DrafterSettings)["draft_vocab_size"].startswith("Tokens the drafter may propose")
    assert "name" not in found


def test_comments_of_a_base_are_inherited() -> None:
    class Derived(DrafterSettings):
        extra: int = 0  # of this one

    assert issubclass(Derived, BaseModel)
    assert comments_of(Derived)["extra"] == "of this one"
    assert comments_of(Derived)["confidence"].startswith("a head that says how likely")
