"""A package whose engine files are wrong is refused by `dspark package verify`, although every digest is right.

The same tables as in tests/compat, where SGLang's own parser takes most of them without a word.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dspark.errors import IntegrityError
from dspark.package.verify import verify

COST = Path(__file__).resolve().parents[2] / "data" / "cost"
CONFIG, SPS, STS = "drafter/config.json", "engines/sglang/sps.json", "engines/sglang/sts.json"
VLLM = "engines/vllm/speculative_config.json"
UNKNOWN_CURVE = "engines/sglang/sps.json has a cost curve that scheduler/scheduler.json does not have"
UNKNOWN_TEMPERATURES = "engines/sglang/sts.json has temperatures that scheduler/scheduler.json does not have"
TABLES = ("flat", "one-point", "zero", "negative", "rising", "non-monotone", "fractional")


def change(folder: Path, name: str, **changes: Any) -> None:
    value = json.loads((folder / name).read_bytes())
    (folder / name).write_text(json.dumps(value | changes))


@pytest.mark.parametrize("table", TABLES)
def test_a_wrong_cost_table_is_refused(package: Path, reseal: Any, table: str):
    change(package, SPS, **json.loads((COST / f"{table}.json").read_text()))
    with pytest.raises(IntegrityError, match=re.escape(UNKNOWN_CURVE)):
        verify(reseal(package))


def test_the_right_curve_with_probes_that_are_no_integers_is_refused(package: Path, reseal: Any):
    """1.0 equals 1 in Python; SGLang refuses it and would not start."""
    probes = json.loads((package / SPS).read_bytes())["sample_batch_tokens"]
    change(package, SPS, sample_batch_tokens=[float(count) for count in probes])
    with pytest.raises(IntegrityError, match=re.escape("engines/sglang/sps.json: token counts must be JSON integers")):
        verify(reseal(package))


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        (STS, {"temperatures": [1.0, 0.0, 1.0]}, UNKNOWN_TEMPERATURES),
        (STS, {"temperatures": [1.0, 1.0, -1.0]}, UNKNOWN_TEMPERATURES),
        (STS, {"temperatures": [1.0, 1.0]}, UNKNOWN_TEMPERATURES),
        (VLLM, {"num_speculative_tokens": 4}, f"{VLLM} is for other blocks than gamma = 3"),
        (CONFIG, {"block_size": 4}, "drafter/ gamma: 4, expected 3"),
        (CONFIG, {"mask_token_id": 10**6}, "mask_token_id 1000000 is outside the vocabulary"),
        (CONFIG, {"markov_head_type": "rnn"}, "drafter/ markov_type: 'rnn', expected 'vanilla'"),
    ],
)
def test_a_wrong_engine_file_is_refused(package: Path, reseal: Any, name: str, changes: dict[str, Any], reason: str):
    change(package, name, **changes)
    with pytest.raises(IntegrityError, match=re.escape(reason)):
        verify(reseal(package))
