"""What timings depend on: hardware, driver, library versions, threads (architecture.md, section 4).

Read without loading any of the libraries, so that a run that changes nothing stays fast.
"""

from __future__ import annotations

import importlib.metadata
import operator
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dspark import __version__
from dspark.config.models import ServingProfile
from dspark.device import CPU, declared
from dspark.io.digest import digest_json
from dspark.processor import arithmetic, processor

ABSENT = "not installed"
_GPU_QUERY = "name,driver_version,memory.total"


def fingerprint(profile: ServingProfile) -> dict[str, Any]:
    """The fingerprint of an engine under a serving profile on this machine.

    Equal machines and versions give equal fingerprints: no time, no host name, no path is in it. What does not exist
    here is left out. A server that runs elsewhere is asked; what it does not tell is what the profile declares.

    Raises:
        ServiceError: the server of a profile with access `url` does not answer.
    """
    if profile.access == "url":
        return _attached(profile)
    engine = _ENGINES[profile.engine](profile)
    dtype = arithmetic(profile.dtype, declared(profile))
    arguments = {"dtype": dtype, "threads": threads(profile), **engine.arguments}
    return {
        "engine": profile.engine,
        "engine_version": engine.version,
        "versions": {"python": platform.python_version(), **_installed(engine.libraries)},
        "launch_args_digest": digest_json(arguments),
        "hardware": _hardware(),
        **arguments,
        "parallel": {
            "tp": profile.parallelism.tensor,
            "dp": profile.parallelism.data,
            "pp": profile.parallelism.pipeline,
        },
        "kv_dtype": dtype,
        "attention_backend": engine.attention,
        "max_num_seqs": max((*profile.requests, *profile.certify_concurrency)),
        "context": max(profile.contexts),
        "prefix_cache": False,
        "lora": False,
        "chunked_prefill": False,
        "cuda_graphs": False,
    }


def _attached(profile: ServingProfile) -> dict[str, Any]:
    """What a server tells of itself, on the hardware that its profile declares."""
    from dspark.engines.connect import connect

    assert profile.url is not None  # access url has one
    told = {name: value for name, value in connect(profile.url, profile.engine).facts().items() if value is not None}
    declared = {
        "hardware": profile.hardware.model_dump(mode="json"),
        "parallel": {
            "tp": profile.parallelism.tensor,
            "dp": profile.parallelism.data,
            "pp": profile.parallelism.pipeline,
        },
        "dtype": profile.dtype,
        "max_num_seqs": profile.limits.requests,
        "context": profile.limits.context,
    }
    found = {"engine": profile.engine, **declared, **told, "threads": profile.threads or 1}
    return {**found, "launch_args_digest": digest_json(found)}


def profile_mistakes(profile: ServingProfile, found: Mapping[str, Any]) -> list[str]:
    """What of a profile this machine, or the server that it names, does not have; nothing with access `none`.

    Args:
        found: its fingerprint.
    """
    if profile.access == "none":
        return []
    mistakes = []
    engine = str(found["engine_version"])
    version = engine.rsplit(" ", 1)[-1]
    if profile.engine_versions is not None and engine != ABSENT and not _in_range(version, profile.engine_versions):
        mistakes.append(f"it is for {profile.engine} {profile.engine_versions}, here is {engine}")
    wanted = profile.hardware
    if profile.access == "local" and wanted.accelerator.lower() != "cpu":
        have = [gpu["name"] for gpu in found["hardware"].get("gpus", ())]
        fitting = [name for name in have if wanted.accelerator.lower() in name.lower()]
        if len(fitting) < wanted.count:
            mistakes.append(f"it is for {wanted}, this machine has {', '.join(have) or 'no GPU'}")
    return mistakes


def _in_range(version: str, wanted: str) -> bool:
    """True if a version lies in a range such as `>=0.5.23,<0.6`; one that is no number lies in none."""
    compare = {">=": operator.ge, "<=": operator.le, "==": operator.eq, ">": operator.gt, "<": operator.lt}
    numbers = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    if numbers is None:
        return False
    for part in wanted.split(","):
        sign = next(sign for sign in compare if part.startswith(sign))
        pair = [[int(number) for number in text.split(".")] for text in (numbers[0], part.removeprefix(sign))]
        length = max(map(len, pair))
        mine, theirs = (side + [0] * (length - len(side)) for side in pair)
        if not compare[sign](mine, theirs):
            return False
    return True


@dataclass(frozen=True)
class _Engine:
    """What is an engine's own in a fingerprint."""

    version: str
    libraries: tuple[str, ...]
    attention: str
    arguments: dict[str, Any]


def _reference(profile: ServingProfile) -> _Engine:
    libraries = ("torch", "transformers", "numpy", "onnxruntime", "onnxruntime-gpu")
    arguments: dict[str, Any] = {"draft_backend": profile.draft_backend}
    if declared(profile) != CPU:
        arguments["device"] = declared(profile)
    return _Engine(__version__, libraries, "sdpa", arguments)


def _llamacpp(profile: ServingProfile) -> _Engine:
    version = _installed(("xllamacpp",)).get("xllamacpp")
    return _Engine(f"xllamacpp {version}" if version else ABSENT, ("xllamacpp", "gguf"), "ggml", {})


_ENGINES: dict[str, Callable[[ServingProfile], _Engine]] = {"reference": _reference, "llamacpp": _llamacpp}


def threads(profile: ServingProfile) -> int:
    """The threads that the engine runs with: the profile's, or one per core that this process may use."""
    return profile.threads or len(os.sched_getaffinity(0))


def _installed(libraries: tuple[str, ...]) -> dict[str, str]:
    versions = {}
    for name in libraries:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _hardware() -> dict[str, Any]:
    model, flags = processor()
    hardware: dict[str, Any] = {
        "machine": platform.machine(),
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
    }
    if flags:
        hardware["cpu_flags_digest"] = digest_json(flags)
    gpus = gpus_of_the_driver()
    if gpus:
        hardware["gpus"] = gpus
    return hardware


def gpus_of_the_driver() -> list[dict[str, str]]:
    """Name, driver and memory of each NVIDIA GPU, as the driver's own tool says."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        # The tool is there and sees no GPU: a driver that is not loaded.
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in listing.splitlines() if line.strip()]
    return [{"name": row[0], "driver": row[1], "memory": row[2]} for row in rows if len(row) == 3]
