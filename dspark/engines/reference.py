"""The reference engine: dspark's own draft-verify loop on transformers, a continuous batch (`decoding.loop`).

It serves every drafter and needs no files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dspark.drafters.config import DrafterConfig
    from dspark.engines.base import EngineInputs


class ReferenceEngine:
    """Adapter of `dspark.decoding`."""

    name = "reference"

    def supports(self, config: DrafterConfig) -> str | None:
        """None: whatever dspark trains, its own loop serves."""
        return None

    def files(self, inputs: EngineInputs) -> dict[str, bytes]:
        """Nothing: the loop reads the package's drafter and scheduler as they are."""
        return {}
