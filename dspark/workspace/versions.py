"""Versions of dspark and what it works with; nothing is imported to find them."""

from __future__ import annotations

import platform
from importlib import metadata

from dspark import __version__

# Modules that each extra brings, as far as `dspark doctor` looks for them.
EXTRAS = {
    "pipeline": ("torch", "transformers", "accelerate", "mlflow", "dvc", "onnx", "onnxscript", "gguf"),
    "cpu": ("onnxruntime",),
}
_FURTHER = ("onnxruntime", "onnxruntime-gpu", "xllamacpp", "tensorrt", "numpy", "safetensors", "click")


def versions() -> dict[str, str]:
    """Versions of dspark, Python and every library of the pipeline that is installed."""
    found = {"dspark": __version__, "python": platform.python_version()}
    for distribution in (*EXTRAS["pipeline"], *_FURTHER):
        version = version_of(distribution)
        if version is not None:
            found[distribution] = version
    return found


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, None if there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def unsuited() -> dict[str, str]:
    """Installed libraries outside the range that this dspark asks for.

    Returns:
        by distribution, what is there and what is asked for; empty too where dspark itself is not installed as a
        distribution, or nothing that reads ranges is.
    """
    try:
        from packaging.requirements import Requirement

        asked = [Requirement(line) for line in metadata.requires("dspark") or ()]
    except (ImportError, metadata.PackageNotFoundError):
        return {}
    found = {}
    for requirement in asked:
        version = version_of(requirement.name)
        if version is not None and version not in requirement.specifier:
            found[requirement.name] = f"{version} is installed, dspark asks for {requirement.specifier}"
    return found
