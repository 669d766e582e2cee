"""The digest of a stage's code follows exactly what the stage can reach."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import dspark
from dspark.config.stages import STAGES
from dspark.workspace.code import CodeIndex, imported_modules

SOURCE = Path(dspark.__file__).parent


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A small package `dspark`: a -> b (inside a function) -> rel; c stands apart; d is for type checkers only."""
    folder = tmp_path / "dspark"
    files = {
        "__init__.py": "",
        "a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from dspark import d\n"
        "def f():\n    from dspark.room.b import g\n",
        "room/__init__.py": "",
        "room/b.py": "from .rel import x\nfrom . import sub\n",
        "room/rel.py": "x = 1\n",
        "room/sub/__init__.py": "from ..deep import y\n",
        "room/deep.py": "y = 1\n",
        "c.py": "",
        "d.py": "",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (tmp_path / "script.py").write_text("import json\nfrom dspark.a import f\n")
    return folder


def digest(package: Path, cache: Path | None = None) -> str:
    index = CodeIndex(cache, package)
    value = index.digest(package.parent / "script.py")
    index.save()
    return value


@pytest.mark.parametrize(
    "changed",
    ["__init__.py", "a.py", "room/__init__.py", "room/b.py", "room/rel.py", "room/sub/__init__.py", "room/deep.py"],
)
def test_a_change_of_anything_reachable_changes_the_digest(package: Path, changed: str) -> None:
    before = digest(package)
    with (package / changed).open("a") as handle:
        handle.write("z = 1\n")
    assert digest(package) != before


@pytest.mark.parametrize("changed", ["c.py", "d.py"])
def test_a_change_of_anything_else_does_not(package: Path, changed: str) -> None:
    before = digest(package)
    with (package / changed).open("a") as handle:
        handle.write("z = 1\n")
    assert digest(package) == before


@pytest.mark.parametrize(
    ("text", "reached"),
    [
        ("names = {'x': 'dspark.room.b:g'}", "dspark.room.b"),
        ("name = f'dspark.room.{x}'", "dspark.room."),
        ("from dspark.room import b as c", "dspark.room.b"),
        ("import dspark.room.b", "dspark.room.b"),
    ],
)
def test_modules_named_in_text_are_imports(text: str, reached: str) -> None:
    assert reached in set(imported_modules(text.encode()))


def test_a_sentence_about_a_module_is_not() -> None:
    assert set(imported_modules(b"x = 'see dspark.room.b'; y = 'dspark run'; z = 'dspark-room'")) == set()


def test_everything_below_a_package_named_in_text_counts(package: Path) -> None:
    (package.parent / "script.py").write_text("import importlib\nimportlib.import_module(f'dspark.room.{1}')\n")
    before = digest(package)
    (package / "room" / "deep.py").write_text("y = 3\n")
    assert digest(package) != before


def test_a_change_of_the_script_itself_changes_the_digest(package: Path) -> None:
    before = digest(package)
    (package.parent / "script.py").write_text("from dspark.a import f  # again\n")
    assert digest(package) != before


def test_the_digest_does_not_depend_on_where_the_package_lies(package: Path, tmp_path: Path) -> None:
    """A checkout and an installed wheel are the same code."""
    moved = tmp_path / "elsewhere"
    shutil.copytree(package, moved / "dspark")
    shutil.copy(package.parent / "script.py", moved / "script.py")
    assert digest(moved / "dspark") == digest(package)


def test_a_remembered_file_is_read_again_when_it_changes(package: Path, tmp_path: Path) -> None:
    cache = tmp_path / "code.json"
    before = digest(package, cache)
    assert digest(package, cache) == before
    (package / "room" / "deep.py").write_text("y = 2  # longer\n")
    assert digest(package, cache) == digest(package) != before


def test_a_cut_off_memory_is_only_slower(package: Path, tmp_path: Path) -> None:
    cache = tmp_path / "code.json"
    before = digest(package, cache)
    cache.write_text(cache.read_text()[:40])
    assert digest(package, cache) == before


def test_relative_imports_are_resolved_from_modules_and_from_packages() -> None:
    assert "dspark.room.rel" in set(imported_modules(b"from .rel import x", "dspark.room.b"))
    assert "dspark.room.rel" in set(imported_modules(b"from .rel import x", "dspark.room", is_package=True))
    assert "dspark.deep.y" in set(imported_modules(b"from ..deep import y", "dspark.room.b"))


def closure(stage: str) -> set[str]:
    """Files that a real stage script reaches, found by changing nothing: from the index's own entries."""
    script = SOURCE.parent / "stages" / f"{stage}.py"
    index = CodeIndex()
    index.digest(script)
    return {Path(name).relative_to(SOURCE).as_posix() for name in index._fresh if Path(name).is_relative_to(SOURCE)}


@pytest.mark.parametrize("script", [stage.script for stage in STAGES])
def test_no_stage_depends_on_the_command_line_or_the_registry(script: str) -> None:
    reached = closure(script)
    assert "workspace/stage.py" in reached
    assert not {name for name in reached if name.startswith(("cli/", "registry/"))}


def test_training_code_concerns_training_and_what_reads_checkpoints_only() -> None:
    assert any(name.startswith("training/") for name in closure("train_drafter"))
    for script in ("prepare_prompts", "generate_responses", "extract_features", "calibrate_confidence"):
        assert not any(name.startswith("training/") for name in closure(script)), script
