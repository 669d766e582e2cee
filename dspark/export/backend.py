"""A drafter on ONNX Runtime, for measurements beside torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.drafters.base import Drafter

if TYPE_CHECKING:
    from dspark.engines.onnxruntime import OnnxProposer
    from dspark.targets.record import TargetRecord


def onnx_backends(
    drafter: Drafter, record: TargetRecord, folder: Path, *, device: str = "cpu"
) -> dict[str, OnnxProposer]:
    """The proposer `onnxruntime` on a drafter that is exported for it; none if it has no graphs, or nothing runs them.

    Args:
        record: the target that the drafter belongs to.
        folder: for the exported files.
        device: that it is to draft on.
    Raises:
        PreflightError: ONNX Runtime is there without what it needs on that device.
    """
    missing = any(importlib.util.find_spec(module) is None for module in ("onnxruntime", "onnxscript"))
    if missing or drafter.config.kind != "dspark":
        return {}
    from dspark.engines.onnxruntime import OnnxProposer, providers_on
    from dspark.export.onnx import export_onnx

    export_onnx(drafter, record, folder, stateless=False)
    return {"onnxruntime": OnnxProposer(folder, providers=providers_on(device))}
