"""What a list of targets says about each."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark.workspace.catalogue import describe_target, describe_targets
from dspark.workspace.layout import Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    folder = tmp_path / "pipeline/targets"
    folder.mkdir(parents=True)
    (folder / "one.yaml").write_text("source: {kind: folder, path: models/one}\n")
    (tmp_path / "targets").mkdir()
    return Workspace(tmp_path)


def test_a_target_without_a_record_was_not_fetched(workspace: Workspace) -> None:
    found = describe_target(workspace, "one")
    assert (found.state, found.facts["record"]) == ("not fetched", "none yet")


@pytest.mark.parametrize("text", ["", "{}", '{"schema": "dspark/target'])
def test_a_record_that_cannot_be_read_is_not_one_that_is_not_there(workspace: Workspace, text: str) -> None:
    workspace.target_record("one").write_text(text)
    found = describe_target(workspace, "one")
    assert found.state == "damaged"
    assert "targets/one.json" in found.facts["record"] and "dspark targets fetch one" in found.facts["record"]


def test_a_file_with_mistakes_hides_no_other_target(workspace: Workspace) -> None:
    (workspace.root / "pipeline/targets/two.yaml").write_text("sorce: {}\n")
    assert {row.name: row.state for row in describe_targets(workspace)} == {"one": "not fetched", "two": "broken"}
