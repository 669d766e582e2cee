"""Every dialect of a drafter, written and read back: union checkpoint, ONNX, and `parity.json` that compares them.

Importing this room loads nothing heavy; its names do when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark.export.blocks import ProbeBlocks
    from dspark.export.build import export_build
    from dspark.export.report import ParityReport

__all__ = ["ParityReport", "ProbeBlocks", "export_build"]


def __getattr__(name: str) -> Any:
    homes = {"ProbeBlocks": "blocks", "export_build": "build", "ParityReport": "report"}
    if name not in homes:
        raise AttributeError(f"module 'dspark.export' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dspark.export.{homes[name]}"), name)
