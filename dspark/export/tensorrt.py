"""TensorRT: the drafter's stateless graph as a plan for one kind of GPU, built from a package's recipe into a cache.

TensorRT for RTX builds for a named compute capability on any machine; TensorRT builds for the GPU it finds. A plan is
never executed here: what can be checked without a GPU is that the graph was parsed whole and that the plan takes and
gives what `io.json` says.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from dspark.config.models import ExportSettings
from dspark.engines.onnx_io import ENDS, IO_FILE, OnnxIO, TensorSpec
from dspark.engines.tensorrt_build import RECIPE, Plan, Recipe, TimingCache, make_recipe
from dspark.errors import IntegrityError, PreflightError, SettingsError, StageError
from dspark.io.atomic import replace_tree, write_bytes
from dspark.io.digest import digest_file
from dspark.io.jsonfile import read_model, write_model
from dspark.io.progress import Progress

BUILDERS = ("tensorrt_rtx", "tensorrt")
PLAN, RECORD, TIMINGS = "draft_block.plan", "plan.json", "timing.cache"
_DTYPES = {"float32": "FLOAT", "int64": "INT64"}


def build_plan(
    package: Path,
    package_digest: str,
    cache: Path,
    *,
    compute_capability: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Build the plan of a verified package, or find it in the cache.

    Args:
        package: its folder.
        package_digest: of it; plans of equal packages are the same.
        cache: folder of plans, of any number of packages.
        compute_capability: such as `8.9`; None: of this machine's GPU.
        progress: advanced when the graph is parsed and when the plan is built.
    Returns:
        the folder with `draft_block.plan` and `plan.json`.
    Raises:
        PreflightError: no TensorRT is installed, or this one cannot build for that GPU here.
        SettingsError: a compute capability that this version does not know, a cache that cannot be written to, or a
            package without a recipe.
        IntegrityError: the package holds other files than the recipe names.
        StageError: the graph does not parse, or no plan comes out.
    """
    trt, name = _builder_module()
    recipe = read_recipe(package)
    asked = compute_capability or local_capability()
    capability = _capability(trt, name, asked, named=compute_capability is not None)
    folder = cache / package_digest / f"{name}-{trt.__version__}-sm{asked.replace('.', '')}"
    _make_folder(folder.parent)
    if _is_whole(folder, package):
        return folder
    progress = progress or Progress()
    progress.start("build the plan", 2, unit="steps")
    began = time.monotonic()
    logger = _logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    graph = package / "engines" / "onnxruntime" / recipe.graph
    if not parser.parse_from_file(str(graph)):
        said = "; ".join(str(parser.get_error(number)) for number in range(parser.num_errors))
        raise StageError(
            f"{graph.name}: {name} {trt.__version__} does not parse it: {said}", "report it with the graph"
        )
    check_network(network, recipe, trt)
    progress.advance()
    config = builder.create_builder_config()
    if hasattr(trt.BuilderFlag, "TF32"):
        config.clear_flag(trt.BuilderFlag.TF32)  # the plan is to compute as the graph's types say
    config.add_optimization_profile(_profile(builder, recipe))
    if capability is not None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(capability, 0)
    timings = config.create_timing_cache(b"")
    config.set_timing_cache(timings, False)
    built = builder.build_serialized_network(network, config)
    if built is None:
        raise StageError(f"{name} {trt.__version__} built no plan: {logger.last}", "see what it said above")
    progress.advance()
    staged = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    write_bytes(staged / PLAN, bytes(built))
    data = bytes(timings.serialize())
    write_bytes(staged / TIMINGS, data)
    record = Plan(
        package_digest=package_digest,
        recipe_sha256=digest_file(package / "engines" / "tensorrt" / RECIPE),
        builder=name,
        builder_version=trt.__version__,
        compute_capability=asked,
        precision=recipe.precision,
        axes=recipe.axes,
        layers=network.num_layers,
        plan=PLAN,
        plan_bytes=(staged / PLAN).stat().st_size,
        plan_sha256=digest_file(staged / PLAN),
        timing_cache=TimingCache(file=TIMINGS, bytes=len(data), sha256=digest_file(staged / TIMINGS)),
        built_seconds=time.monotonic() - began,
    )
    write_model(staged / RECORD, record)
    replace_tree(staged, folder)
    return folder


def write_recipe(folder: Path, onnx: Path, settings: ExportSettings) -> Recipe:
    """Write `build.json` for the graph that was exported to `onnx`."""
    io = read_model(onnx / IO_FILE, OnnxIO)
    files = {name: digest_file(onnx / name) for name in (io.stateless.file, io.weights.file, io.ends.file)}
    recipe = make_recipe(io, files, batch=settings.tensorrt_batch, context=settings.tensorrt_context)
    write_model(folder / RECIPE, recipe)
    return recipe


def read_recipe(package: Path) -> Recipe:
    """The recipe of a package, whose files are the ones that it names.

    Raises:
        SettingsError: the package holds none.
        IntegrityError: other files.
        PreflightError: one is to be made from the target first.
    """
    path = package / "engines" / "tensorrt" / RECIPE
    if not path.is_file():
        raise SettingsError(
            f"{package} has no TensorRT recipe", "make the package with export.onnx and export.tensorrt on"
        )
    recipe = read_model(path, Recipe, IntegrityError, "fetch the package again")
    for file, digest in recipe.files.items():
        path = package / "engines" / "onnxruntime" / file
        if file == ENDS and not path.exists():
            raise PreflightError(
                f"{package} leaves the target's embedding and head out", f"dspark package materialise {package}"
            )
        if not path.is_file() or digest_file(path) != digest:
            raise IntegrityError(f"{path} is not the file that the recipe was made for", "fetch the package again")
    return recipe


def check_network(network: Any, recipe: Recipe, trt: Any) -> None:
    """Refuse a parsed network whose inputs and outputs are not those of `io.json`.

    Raises:
        StageError: names both.
    """
    sides = (
        ("inputs", [network.get_input(place) for place in range(network.num_inputs)], recipe.inputs),
        ("outputs", [network.get_output(place) for place in range(network.num_outputs)], recipe.outputs),
    )
    for what, found, wanted in sides:
        described = [(tensor.name, str(tensor.dtype), tuple(tensor.shape)) for tensor in found]
        expected = [(item.name, str(getattr(trt.DataType, _DTYPES[item.dtype])), _dynamic(item)) for item in wanted]
        if described != expected:
            raise StageError(f"{recipe.graph}: TensorRT reads the {what} {described}, io.json says {expected}")


def _dynamic(item: TensorSpec) -> tuple[int, ...]:
    return tuple(axis if isinstance(axis, int) else -1 for axis in item.shape)


def _profile(builder: Any, recipe: Recipe) -> Any:
    profile = builder.create_optimization_profile()
    for item in recipe.inputs:
        profile.set_shape(item.name, *recipe.shapes(item))
    return profile


def _builder_module() -> tuple[ModuleType, str]:
    for name in BUILDERS:
        try:
            return importlib.import_module(name), name
        except ImportError:
            continue
    raise PreflightError(
        "neither tensorrt_rtx nor tensorrt is installed",
        "pip install 'dspark[rtx]' (builds without a GPU), or 'dspark[gpu]' on the machine that serves",
    )


def local_capability() -> str:
    """The compute capability of this machine's first GPU, as its driver's tool says.

    Raises:
        PreflightError: there is none.
    """
    tool = shutil.which("nvidia-smi")
    command = [tool or "nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        found = []
    if not found:
        raise PreflightError(
            "there is no GPU here to build a plan for", "name the kind of GPU that serves: --compute-capability 8.9"
        )
    return found[0]


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK)
    except OSError:
        usable = False
    if not usable:
        raise SettingsError(f"{folder}: no folder that can be written to", "name another one: --cache DIR")


def _capability(trt: Any, name: str, asked: str, *, named: bool) -> Any:
    """The builder's own constant for a compute capability; None where it takes the GPU that is here."""
    known = getattr(trt, "ComputeCapability", None)
    if known is None and not named:
        return None
    if known is None:
        raise PreflightError(
            f"{name} builds only for the GPU of this machine", "pip install 'dspark[rtx]', or leave the capability out"
        )
    members = {f"{key[2:-1]}.{key[-1]}": value for key, value in known.__members__.items() if key.startswith("SM")}
    if asked not in members:
        raise SettingsError(
            f"compute capability {asked!r}: {name} {trt.__version__} builds for {', '.join(members)}",
            "name one of them; a plan of another kind of GPU does not load",
        )
    return members[asked]


def _logger(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        """Keeps the last complaint instead of printing everything."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.last = "it said nothing"

        def log(self, severity: Any, message: str) -> None:
            """Called by the builder."""
            if int(severity) <= int(trt.ILogger.ERROR):
                self.last = message

    return Logger()


def _is_whole(folder: Path, package: Path) -> bool:
    """True if the cache holds the plan of this very recipe, undamaged."""
    record = folder / RECORD
    if not record.is_file():
        return False
    plan = read_model(record, Plan, IntegrityError, f"remove {folder}")
    return (
        plan.recipe_sha256 == digest_file(package / "engines" / "tensorrt" / RECIPE)
        and (folder / plan.plan).is_file()
        and digest_file(folder / plan.plan) == plan.plan_sha256
    )
