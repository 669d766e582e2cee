"""One adapter per engine: what it can serve, its own files, how to launch it. Nothing heavy is loaded on import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dspark.engines.base import Engine, EngineInputs
from dspark.engines.llamacpp_files import LlamaCppEngine
from dspark.engines.reference import ReferenceEngine
from dspark.engines.sglang import SGLangEngine
from dspark.engines.tensorrt_llm import TensorRTLLMEngine
from dspark.engines.vllm import VLLMEngine
from dspark.errors import SettingsError

if TYPE_CHECKING:
    from dspark.drafters.config import DrafterConfig

_ADAPTERS: tuple[Engine, ...] = (
    ReferenceEngine(),
    LlamaCppEngine(),
    SGLangEngine(),
    TensorRTLLMEngine(),
    VLLMEngine(),
)
ENGINES: dict[str, Engine] = {adapter.name: adapter for adapter in _ADAPTERS}

__all__ = ["ENGINES", "Engine", "EngineInputs", "engine_files", "unsupported_reason"]


def engine_files(name: str, inputs: EngineInputs) -> dict[str, bytes]:
    """The files of one engine by their path relative to a package, such as `engines/sglang/sps.json`.

    Raises:
        SettingsError: unknown engine, or one that cannot serve the drafter (ask `unsupported_reason` first).
        DataError: a cost curve or temperatures that would mislead the engine.
    """
    return {f"engines/{name}/{path}": data for path, data in _adapter(name).files(inputs).items()}


def unsupported_reason(name: str, config: DrafterConfig) -> str | None:
    """Why an engine cannot serve a drafter, or None if it can."""
    return _adapter(name).supports(config)


def _adapter(name: str) -> Engine:
    if name not in ENGINES:
        raise SettingsError(f"engine {name!r} does not exist", f"engines: {', '.join(sorted(ENGINES))}")
    return ENGINES[name]
