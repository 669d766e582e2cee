from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dspark.scheduling import CostCurve

sys.path.insert(0, str(Path(__file__).parent))  # algorithm1.py, the oracle

CASES = Path(__file__).parents[2] / "data" / "cost"


@pytest.fixture
def cost_case():
    """Reads a case of tests/data/cost; those files use SGLang's key for the rates."""

    def read(name: str) -> CostCurve:
        case = json.loads((CASES / f"{name}.json").read_text())
        return CostCurve(
            sample_batch_tokens=case["sample_batch_tokens"],
            sample_steps_per_second=case["sample_steps_per_sec"],
            max_batch_tokens=case["max_batch_tokens"],
        )

    return read
