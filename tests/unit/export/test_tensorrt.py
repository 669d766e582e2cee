"""The recipe of a plan, and the real builder where it is installed; no plan is ever run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dspark.config.models import ExportSettings
from dspark.engines.onnx_io import IO_FILE, OnnxIO
from dspark.engines.tensorrt_build import Plan, Recipe
from dspark.errors import IntegrityError, PreflightError, SettingsError, StageError
from dspark.export import tensorrt
from dspark.export.tensorrt import build_plan, check_network, read_recipe, write_recipe
from dspark.io.digest import digest_file
from dspark.io.jsonfile import read_model

needs_builder = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt_rtx is not installed: pip install 'dspark[rtx]'"
)
DIGEST = "a" * 64


@pytest.fixture
def package(exported: Path, tmp_path: Path) -> Path:
    """The part of a package that a plan is built from."""
    engines = tmp_path / "package" / "engines"
    engines.mkdir(parents=True)
    (engines / "onnxruntime").symlink_to(exported)
    (engines / "tensorrt").mkdir()
    write_recipe(engines / "tensorrt", exported, ExportSettings(tensorrt_context=(1, 32, 4096)))
    return tmp_path / "package"


def test_the_recipe_says_what_the_graph_takes_and_which_sizes_it_may_have(package: Path, exported: Path):
    recipe = read_recipe(package)
    io = read_model(exported / IO_FILE, OnnxIO)
    assert (recipe.inputs, recipe.outputs, recipe.opset) == (io.stateless.inputs, io.stateless.outputs, 20)
    assert recipe.files == {name: digest_file(exported / name) for name in recipe.files} and len(recipe.files) == 3
    shapes = {item.name: recipe.shapes(item) for item in recipe.inputs}
    assert shapes == {
        "features": ((1, 1, 48), (1, 32, 48), (8, 256, 48)),  # the drafter holds 256 positions
        "context_length": ((1,), (1,), (8,)),
        "anchor_ids": ((1,), (1,), (8,)),
    }


def test_recipes_that_cannot_be_meant_are_refused(package: Path):
    path = package / "engines/tensorrt/build.json"
    value = json.loads(path.read_text())
    for change, said in (
        ({"axes": {"batch": value["axes"]["batch"]}}, "the inputs vary in"),
        ({"axes": value["axes"] | {"batch": {"smallest": 2, "tuned": 1, "largest": 8}}}, "must not fall"),
        ({"graph": "other.onnx"}, "has no digest"),
    ):
        with pytest.raises(ValueError, match=said):
            Recipe.model_validate(value | change)
    with pytest.raises(ValueError, match="tensorrt_batch: sizes must not fall"):
        ExportSettings(tensorrt_batch=(4, 1, 8))


def test_another_graph_than_the_recipes_is_refused(package: Path, tmp_path: Path):
    path = package / "engines/tensorrt/build.json"
    value = json.loads(path.read_text())
    value["files"]["draft_block.onnx"] = "0" * 64
    path.write_text(json.dumps(value))
    with pytest.raises(IntegrityError, match=r"draft_block\.onnx is not the file that the recipe was made for"):
        read_recipe(package)
    path.unlink()
    with pytest.raises(SettingsError, match="has no TensorRT recipe") as caught:
        read_recipe(package)
    assert "export.tensorrt" in caught.value.hint


def test_without_a_gpu_the_kind_has_to_be_named_and_a_cache_has_to_be_a_folder(
    package: Path, tmp_path: Path, monkeypatch: Any
):
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", SimpleNamespace(__version__="1"))
    monkeypatch.setattr(tensorrt.shutil, "which", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PreflightError, match="no GPU here") as caught:
        build_plan(package, DIGEST, tmp_path / "cache")
    assert "--compute-capability" in caught.value.hint
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 9.0\n")
    tool.chmod(0o755)
    monkeypatch.setattr(tensorrt.shutil, "which", lambda name: str(tool))
    assert tensorrt.local_capability() == "9.0"
    known = SimpleNamespace(__version__="1", ComputeCapability=SimpleNamespace(__members__={"SM89": 89}))
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", known)
    with pytest.raises(SettingsError, match=r"compute capability '9\.0': tensorrt_rtx 1 builds for 8\.9"):
        build_plan(package, DIGEST, tmp_path / "cache")
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="no folder that can be written to"):
        build_plan(package, DIGEST, tmp_path / "file", compute_capability="8.9")


def test_a_network_with_other_inputs_is_refused(package: Path):
    class Network:
        def __init__(self, width: int) -> None:
            shapes = {"features": (-1, -1, width), "context_length": (-1,), "anchor_ids": (-1,)}
            outputs = {"draft_ids": (-1, 3), "confidence_logits": (-1, 3)}
            self.sides = [
                [SimpleNamespace(name=name, dtype=self.dtype(name), shape=shape) for name, shape in side.items()]
                for side in (shapes, outputs)
            ]
            self.num_inputs, self.num_outputs = 3, 2

        def dtype(self, name: str) -> str:
            return "FLOAT" if name in ("features", "confidence_logits") else "INT64"

        def get_input(self, place: int) -> Any:
            return self.sides[0][place]

        def get_output(self, place: int) -> Any:
            return self.sides[1][place]

    builder = SimpleNamespace(DataType=SimpleNamespace(FLOAT="FLOAT", INT64="INT64"))
    check_network(Network(48), read_recipe(package), builder)
    with pytest.raises(StageError, match=r"TensorRT reads the inputs .*\(-1, -1, 47\)"):
        check_network(Network(47), read_recipe(package), builder)


def test_without_a_builder_the_error_says_what_to_install(package: Path, tmp_path: Path, monkeypatch: Any):
    for name in tensorrt.BUILDERS:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PreflightError, match="neither tensorrt_rtx nor tensorrt") as caught:
        build_plan(package, DIGEST, tmp_path / "cache")
    assert "dspark[rtx]" in caught.value.hint


def test_building_a_plan_needs_no_torch():
    script = "import sys; import dspark.export.tensorrt; print(sorted({'torch', 'onnx'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@needs_builder
@pytest.mark.slow
def test_the_real_builder_makes_a_plan_of_the_exported_graph_once(package: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    folder = build_plan(package, DIGEST, cache, compute_capability="8.9")
    record = read_model(folder / "plan.json", Plan)
    assert folder.parent.name == DIGEST and folder.name.endswith("-sm89")
    assert (record.builder, record.compute_capability, record.run) == ("tensorrt_rtx", "8.9", "never")
    assert record.plan_bytes == (folder / "draft_block.plan").stat().st_size > 10_000 and record.layers > 100
    assert record.axes == read_recipe(package).axes
    written = (folder / "plan.json").stat().st_mtime_ns
    assert build_plan(package, DIGEST, cache, compute_capability="8.9") == folder
    assert (folder / "plan.json").stat().st_mtime_ns == written
    (folder / "draft_block.plan").write_bytes(b"damaged")
    build_plan(package, DIGEST, cache, compute_capability="8.9")
    assert (folder / "draft_block.plan").stat().st_size == record.plan_bytes
    with pytest.raises(SettingsError, match=r"compute capability '9\.9': tensorrt_rtx .* builds for 7\.5, 8\.0"):
        build_plan(package, DIGEST, cache, compute_capability="9.9")
