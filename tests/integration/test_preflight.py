"""What is refused before anything is changed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import FakeSandbox, Sandbox

# No proxy and no resolver: as on a machine without network.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent-cache"}


def tree(root: Path) -> dict[str, tuple[int, int]]:
    """Everything in a folder with size and time."""
    return {
        str(path.relative_to(root)): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def test_a_target_out_of_reach_is_refused_in_seconds_and_nothing_is_changed(sandbox: Sandbox) -> None:
    before = tree(sandbox.root)
    start = time.monotonic()
    done = sandbox.dspark("run", "--target", "qwen3-8b", **OFFLINE)
    assert time.monotonic() - start < 20
    assert done.code == 3
    assert "model.safetensors" in done.err
    assert "dspark targets add" in done.err
    assert tree(sandbox.root) == before
    assert not (sandbox.root / ".dspark").exists()


def test_an_unknown_target_suggests_the_nearest(sandbox: Sandbox) -> None:
    done = sandbox.dspark("run", "--target", "smollm2-135")
    assert done.code == 2
    assert done.err.splitlines()[0] == "Error: target 'smollm2-135' does not exist"
    assert "did you mean 'smollm2-135m'?" in done.err
    assert not (sandbox.root / ".dspark").exists()


def test_all_mistakes_are_shown_before_anything_runs(sandbox: Sandbox) -> None:
    sandbox.edit("pipeline/builds/tiny.yaml", lambda text: text.replace("steps: 30", "stepz: 30"))
    sandbox.edit("params.yaml", lambda text: text + "evaluaton: {}\n")
    done = sandbox.dspark("run", "--target", "tiny", "--set", "export.onnx_opset=99", DSPARK_DRAFTER__GAMA="3")
    assert done.code == 2
    assert done.err.startswith("Error: 4 mistakes in the settings\n")
    for said in (
        "unknown key 'training.stepz'",
        "unknown key 'evaluaton'",
        "--set export.onnx_opset=99",
        "DSPARK_DRAFTER__GAMA",
    ):
        assert said in done.err
    assert "did you mean 'steps'?" in done.err and "did you mean 'gamma'?" in done.err
    assert not (sandbox.root / ".dspark").exists()


def test_targets_can_be_listed_shown_and_added(sandbox: Sandbox, tmp_path: Path) -> None:
    listed = sandbox.dspark("targets", "list", "--json")
    assert listed.code == 0, listed.err
    states = {row["name"]: row["state"] for row in listed.json["targets"]}
    assert states["tiny"] == states["qwen3-8b"] == "not fetched"
    assert "smollm2-135m" in sandbox.dspark("targets", "list").out
    shown = sandbox.dspark("targets", "show", "qwen3-8b")
    assert shown.code == 0 and "Qwen/Qwen3-8B" in shown.out
    missing = sandbox.dspark("targets", "add", "mine", str(tmp_path / "nowhere"))
    assert missing.code == 3
    assert not (sandbox.root / "pipeline/targets/mine.yaml").exists()
    (sandbox.root / "pipeline/targets/broken.yaml").write_text("sorce: {}\n")
    states = {row["name"]: row["state"] for row in sandbox.dspark("targets", "list", "--json").json["targets"]}
    assert states["broken"] == "broken"
    assert sandbox.dspark("targets", "show", "broken").code == 2


def test_a_target_from_a_local_folder_runs_through_preflight(fake: FakeSandbox) -> None:
    store = next(path for path in (fake.root / ".dspark/store/targets").iterdir() if (path / "config.json").is_file())
    added = fake.dspark("targets", "add", "mine", os.fspath(store))
    assert added.code == 0, added.err
    assert "dspark run --target mine" in added.out
    plan = fake.dspark("plan", "--target", "mine", "--json")
    assert plan.code == 0, plan.err
    assert plan.json["problems"] == []
    assert {step["action"] for step in plan.json["steps"]} == {"will run"}
