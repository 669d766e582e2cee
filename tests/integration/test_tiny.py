"""The real ten stages on a tiny random target: from prompts to a verified package in the registry."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dspark.io.digest import digest_tree

if TYPE_CHECKING:
    from conftest import Finished, Sandbox

pytestmark = pytest.mark.slow
PACKAGE = "builds/tiny/package"


@pytest.fixture(scope="module")
def tiny(new_sandbox: Sandbox) -> tuple[Sandbox, Finished]:
    """A workspace in which `dspark run --target tiny` was called once, and how that ended."""
    done = new_sandbox.dspark("run", "--target", "tiny", "--json", timeout=600)
    assert done.code == 0, done.err
    return new_sandbox, done


def test_every_stage_runs_and_the_package_is_registered(tiny: tuple[Sandbox, Finished]) -> None:
    sandbox, done = tiny
    report = done.json
    assert [stage["status"] for stage in report["stages"]] == ["ran"] * 10
    result = report["result"]
    assert (result["model_name"], result["version"], result["package"]) == ("dspark-tiny", "1", PACKAGE)
    receipt = json.loads((sandbox.root / ".dspark/receipts/tiny.json").read_text())
    assert receipt["package_digest"] == result["package_digest"]
    assert result["measured"]["lossless"].startswith("pass")
    assert 1 <= result["measured"]["tau at temperature 0, mean"]["value"] <= 5  # gamma 4 and the bonus token


def test_the_package_is_verified_from_outside_the_workspace(tiny: tuple[Sandbox, Finished], tmp_path: Path) -> None:
    sandbox, done = tiny
    copy = tmp_path / "package"
    shutil.copytree(sandbox.root / PACKAGE, copy)
    digest = done.json["result"]["package_digest"]
    verified = sandbox.dspark("package", "verify", str(copy), "--digest", digest, "--json", cwd=tmp_path)
    assert verified.code == 0, verified.err
    assert verified.json["package_digest"] == digest
    weights = copy / "drafter/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert sandbox.dspark("package", "verify", str(copy), cwd=tmp_path).code == 7


def test_a_second_run_does_nothing(tiny: tuple[Sandbox, Finished]) -> None:
    sandbox, done = tiny
    second = sandbox.dspark("run", "--target", "tiny", "--json")
    assert second.code == 0, second.err
    assert [stage["status"] for stage in second.json["stages"]] == ["up to date"] * 10
    assert second.json["result"] == done.json["result"]
    assert "publish" not in second.err


def test_made_again_from_nothing_the_exported_drafter_is_the_same(tiny: tuple[Sandbox, Finished]) -> None:
    """Same inputs, seed and machine: the same files, so the same model digest."""
    sandbox, _ = tiny
    before = {name: digest_tree(sandbox.root / "builds/tiny/export" / name) for name in ("drafter", "onnxruntime")}
    for path in (".dvc/cache", ".dvc/tmp", "builds", "corpora", ".dspark/store/responses", ".dspark/store/features"):
        shutil.rmtree(sandbox.root / path)
    (sandbox.root / "dvc.lock").unlink()
    environment = sandbox.environment(PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin", DVC_NO_ANALYTICS="1")
    subprocess.run(
        [sys.executable, "-m", "dvc", "repro", "export@tiny"],
        cwd=sandbox.root,
        env=environment,
        check=True,
        capture_output=True,
        timeout=600,
    )
    assert {name: digest_tree(sandbox.root / "builds/tiny/export" / name) for name in before} == before
