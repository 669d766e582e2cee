"""What `dspark doctor` looks at outside the workspace: versions, extras, memory, processor, device."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dspark import __version__
from dspark.device import CPU, VARIABLE, accelerator, asked_for, gpu_names
from dspark.errors import PreflightError, SettingsError
from dspark.processor import arithmetic, processor
from dspark.profiling.fingerprint import gpus_of_the_driver
from dspark.workspace import preflight
from dspark.workspace.memory import available_memory, usable_memory
from dspark.workspace.versions import EXTRAS, unsuited, version_of

LOW_MEMORY = 2 * 1024**3


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Literal["ok", "warning", "error"]
    found: str
    fix: str = ""


def environment() -> Iterator[Check]:
    """Everything that is the same for all workspaces."""
    yield Check("python", "ok", f"{platform.python_version()} at {sys.executable}")
    yield Check("dspark", "ok", __version__)
    yield _versions()
    for extra, modules in EXTRAS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        if missing:
            yield Check(extra, "warning", f"not installed: {', '.join(missing)}", f"pip install 'dspark[{extra}]'")
        else:
            yield Check(extra, "ok", ", ".join(f"{module} {version_of(module) or '?'}" for module in modules))
    for problem in preflight.conflicting_runtimes():
        yield Check("onnxruntime", "error", problem.what, problem.hint)
    cores = len(os.sched_getaffinity(0))
    yield Check("cores", "ok", f"{cores} usable by this process")
    yield _memory()
    model, _ = processor()
    if arithmetic("bfloat16") == "bfloat16":
        yield Check("processor", "ok", f"{model}, multiplies bfloat16")
    else:
        yield Check("processor", "ok", f"{model}, has no bfloat16 products: float32 is computed where it was asked for")
    if importlib.util.find_spec("torch") is not None:
        yield _device()


def _versions() -> Check:
    outside = unsuited()
    if not outside:
        return Check("versions", "ok", "what is installed is what dspark asks for")
    found = "; ".join(f"{name} {what}" for name, what in outside.items())
    return Check("versions", "warning", found, f"pip install --upgrade 'dspark=={__version__}' {' '.join(outside)}")


def _memory() -> Check:
    free, whole = available_memory(), usable_memory()
    found = f"{free / 1024**3:.1f} of {whole / 1024**3:.1f} GiB free"
    if free >= LOW_MEMORY:
        return Check("memory", "ok", found)
    return Check(
        "memory",
        "warning",
        f"{found}: a stage may be killed",
        "end other programs, or lower the batch sizes; what a build takes: dspark plan --target NAME --estimate",
    )


def _device() -> Check:
    """Where stages will compute, and a GPU that they leave alone because torch does not see it."""
    try:
        asked = asked_for()
        chosen = accelerator()
    except (PreflightError, SettingsError) as error:
        return Check("device", "error", error.message, error.hint)
    kind, _, index = chosen.partition(":")
    driver = gpus_of_the_driver()
    if kind != CPU:
        name = gpu_names()[int(index)]
        memory = next((f" with {gpu['memory']}" for gpu in driver if gpu["name"] == name and "memory" in gpu), "")
        return Check("device", "ok", f"{chosen}, {name}{memory}: stages compute there")
    if asked == CPU:
        return Check("device", "ok", f"{CPU}, as the environment asks ({VARIABLE} or ACCELERATE_USE_CPU)")
    if not driver:
        return Check("device", "ok", f"{CPU}: there is no GPU")
    names = ", ".join(gpu["name"] for gpu in driver)
    return Check(
        "device",
        "warning",
        f"{CPU}: the driver has {names}, torch {version_of('torch')} sees no GPU",
        f"install a build of torch with CUDA and look at CUDA_VISIBLE_DEVICES; {VARIABLE}={CPU} says that it is meant",
    )
