"""Imported drafters in the store, and the builds that name them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "package"))  # fake_build.py
sys.path.insert(0, str(Path(__file__).parents[1] / "drafters"))  # foreign_layouts.py

import fake_build
from foreign_layouts import LAYOUTS, moved, write

from dspark.config.models import Build
from dspark.drafters.config import DrafterConfig
from dspark.errors import DataError, IntegrityError, PreflightError, SettingsError
from dspark.io.digest import digest_file
from dspark.io.jsonfile import write_model
from dspark.workspace import preflight
from dspark.workspace.imports import imported_files, keep_drafter, kept_drafter
from dspark.workspace.layout import Workspace

NAMES = ["config.json", "model.safetensors"]


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of the fake build's geometry in DeepSpec's layout."""
    import torch

    from dspark.drafters.dspark import DSparkDrafter

    config = DrafterConfig.of(fake_build.record(), fake_build.build().drafter)
    ends = torch.zeros(config.vocab_size, config.hidden_size)
    drafter = moved(DSparkDrafter(config, ends, ends))
    return write(tmp_path_factory.mktemp("released") / "drafter", LAYOUTS["deepspec"](drafter), drafter.state_dict())


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    found = Workspace(tmp_path / "workspace")
    write_model(found.target_record("tiny"), fake_build.record())
    return found


def naming(digest: str, **drafter: Any) -> Build:
    build = fake_build.build()
    settings = type(build.drafter).model_validate(build.drafter.model_dump() | drafter)
    training = build.training.model_copy(update={"imported": digest})
    return build.model_copy(update={"training": training, "drafter": settings})


def test_a_drafter_is_kept_under_the_digest_of_its_files_wherever_they_came_from(
    workspace: Workspace, released: Path, tmp_path: Path
) -> None:
    origin = keep_drafter(workspace, released, NAMES, {"kind": "folder"})
    folder = workspace.imported(origin.digest)
    assert {path.name for path in folder.iterdir()} == {*NAMES, "dspark.json"}
    assert all((folder / name).read_bytes() == (released / name).read_bytes() for name in NAMES)
    assert str(released) not in (folder / "dspark.json").read_text()
    copy = Path(shutil.copytree(released, tmp_path / "copy"))
    hub = {"kind": "hub", "repo": "org/drafter", "revision": "abc"}
    again = keep_drafter(workspace, copy, NAMES, hub)
    assert again.digest == origin.digest and again.layout == "deepspec"
    assert str(kept_drafter(workspace, origin.digest)) == "org/drafter at abc"
    assert [path.name for path in workspace.drafters.iterdir()] == [origin.digest]


def test_a_build_depends_on_the_very_files(workspace: Workspace, released: Path) -> None:
    assert imported_files(workspace, fake_build.build()) == {}
    digest = keep_drafter(workspace, released, NAMES, {"kind": "folder"}).digest
    assert imported_files(workspace, naming(digest)) == {name: digest_file(released / name) for name in NAMES}


def test_what_is_missing_or_damaged_is_said_with_the_next_command(workspace: Workspace, released: Path) -> None:
    with pytest.raises(PreflightError, match="is not in") as refused:
        imported_files(workspace, naming("0" * 64))
    assert refused.value.hint.startswith("dspark import")
    digest = keep_drafter(workspace, released, NAMES, {"kind": "folder"}).digest
    folder = workspace.imported(digest)
    other = workspace.imported("1" * 64)
    shutil.copytree(folder, other)
    with pytest.raises(IntegrityError, match="lists another drafter"):
        kept_drafter(workspace, "1" * 64)
    with (folder / "model.safetensors").open("ab") as handle:
        handle.write(b"x")
    with pytest.raises(IntegrityError, match=r"model\.safetensors missing or cut off"):
        kept_drafter(workspace, digest)
    (folder / "model.safetensors").unlink()
    with pytest.raises(IntegrityError, match=r"model\.safetensors missing or cut off") as damaged:
        kept_drafter(workspace, digest)
    assert damaged.value.hint == f"remove {folder} and import the drafter again"


def test_nothing_is_left_of_an_import_that_fails(
    workspace: Workspace, released: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"missing other\.safetensors"):
        keep_drafter(workspace, released, [*NAMES, "other.safetensors"], {"kind": "folder"})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(PreflightError, match=r"0\.0 GB free"):
        keep_drafter(workspace, released, NAMES, {"kind": "folder"})
    assert not list(workspace.drafters.iterdir())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gamma": 2}, "drafter.gamma is 2, the imported drafter's is 3"),
        ({"layers": 2}, "drafter.layers is 2, the imported drafter's is 1"),
        ({"markov": {"rank": 8}}, "drafter.markov.rank is 8, the imported drafter's is 4"),
        ({"confidence": False}, "drafter.confidence is False, the imported drafter's is True"),
        ({"draft_vocab_size": 16}, "drafter.draft_vocab_size is 16, the imported drafter's is None"),
    ],
)
def test_another_geometry_is_refused_before_anything_runs(
    workspace: Workspace, released: Path, changes: dict[str, Any], reason: str
) -> None:
    digest = keep_drafter(workspace, released, NAMES, {"kind": "folder"}).digest
    with pytest.raises(SettingsError, match=reason):
        imported_files(workspace, naming(digest, **changes))


def test_another_target_is_refused_before_anything_runs(workspace: Workspace, released: Path) -> None:
    digest = keep_drafter(workspace, released, NAMES, {"kind": "folder"}).digest
    record = fake_build.record()
    write_model(workspace.target_record("tiny"), record.model_copy(update={"taps": (0, 1)}))
    with pytest.raises(DataError, match=r"reads the outputs of layers \[0, 2\], the taps are \[0, 1\]"):
        imported_files(workspace, naming(digest))


@pytest.fixture
def resolved() -> Callable[[Build], Any]:
    return lambda build: SimpleNamespace(build=build)


def test_preflight_names_a_drafter_that_is_not_there(
    workspace: Workspace, released: Path, resolved: Callable[[Build], Any]
) -> None:
    (problem,) = preflight.missing_imports(workspace, resolved(naming("0" * 64)))
    assert problem.what.startswith("training.imported: imported drafter 0000") and "dspark import" in problem.hint
    digest = keep_drafter(workspace, released, NAMES, {"kind": "folder"}).digest
    assert preflight.missing_imports(workspace, resolved(naming(digest))) == []
    assert preflight.missing_imports(workspace, resolved(fake_build.build())) == []
