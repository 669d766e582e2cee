"""Confidences and outcomes out of SGLang's dumped steps, and what calibration makes of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # protocol_servers.py

from protocol_servers import Engine, SGLangDouble, serving

from dspark.calibration import fit_temperatures
from dspark.config.models import CalibrationSettings
from dspark.engines.sglang_client import SGLangClient
from dspark.engines.sglang_records import confidence_records, parse_records
from dspark.errors import DataError, PreflightError
from dspark.evaluation.tiny import tiny_drafter, tiny_target

GAMMA = 3


def request(rid: str, confidence: list[float] | None, correct: int, trimmed: int = 0) -> dict[str, Any]:
    fields = {"rid": rid, "req_pool_index": 0, "correct_drafts": correct, "cap_trim": trimmed}
    return fields if confidence is None else fields | {"confidence": confidence}


def test_what_the_cut_took_away_was_accepted_all_the_same() -> None:
    steps = [
        {"forward_ct": 1, "reqs": [request("a", [0.9, 0.5, 0.25], 1, 1), request("b", [0.1, 0.2, 0.3], 0)]},
        {"forward_ct": 2, "reqs": [request("a", [1.0, 0.0, 0.5], 3)]},
        {"forward_ct": 3, "reqs": [request("a", [0.7, 0.7, 0.7], 0), request("c", None, 2)]},
        {"forward_ct": 4},
    ]
    found = parse_records([(0, step) for step in steps])
    # The last blocks of a and b may go beyond their ends; c has no confidences.
    assert np.asarray(found.accepted).tolist() == [[True, True, False], [True, True, True]]
    assert found.z[0] == pytest.approx([np.log(9), 0, np.log(1 / 3)])
    largest = np.log(0.99995 / 0.00005)
    assert found.z[1] == pytest.approx([largest, -largest, 0])
    assert (found.key.temperature, found.key.label) == (0, "greedy_match")
    with pytest.raises(DataError, match="no block with confidences"):
        parse_records([(0, steps[3])])


class CollectingDouble(SGLangDouble):
    """A server in `cap-accept` whose confidences are twice too sharp, at every position."""

    def __init__(self, engine: Engine, **state: Any) -> None:
        super().__init__(engine)
        self.random = np.random.default_rng(5)
        self.steps: list[dict[str, Any]] = []
        dump = {"mode": "cap-accept", "gamma": GAMMA, "components": ["core", "reqs"], "records": self.steps} | state
        self.information["internal_states"] = [{"dspark_info_record": dump}]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        rid, blocks = f"r{len(self.steps)}", 40
        for _ in range(blocks):
            logits = self.random.normal(0.8, 1.2, GAMMA)
            right = self.random.random(GAMMA) < 1 / (1 + np.exp(-logits))
            accepted = GAMMA if right.all() else int(np.argmin(right))
            shown = [round(float(value), 4) for value in 1 / (1 + np.exp(-2 * logits))]
            trimmed = int(self.random.integers(accepted + 1))
            self.steps.append(
                {"forward_ct": len(self.steps) + 1, "reqs": [request(rid, shown, accepted - trimmed, trimmed)]}
            )
        return {"output_ids": [1], "meta_info": {"completion_tokens": 1, "finish_reason": {"type": "length"}}}


@pytest.fixture(scope="module")
def engine() -> Engine:
    target = tiny_target(24, spread=0.4, seed=3)
    return Engine(target, tiny_drafter(target, GAMMA, seed=1))


def test_calibration_finds_the_temperature_of_a_served_head(engine: Engine) -> None:
    with serving(CollectingDouble(engine)) as address:
        client = SGLangClient(address)
        first = confidence_records(client, [[3, 4]] * 150, 40)
        assert len(first) == 150 * 39
        assert len(confidence_records(client, [[3, 4]], 40)) == 39, "only what is new"
    fitted = fit_temperatures(first, CalibrationSettings())
    assert fitted.temperatures == pytest.approx([2.0] * GAMMA, rel=0.2)


@pytest.mark.parametrize("state", [{"mode": "static"}, {"mode": "compact"}, {"components": ["core"]}])
def test_a_server_that_does_not_tell_every_outcome_is_refused(engine: Engine, state: dict[str, Any]) -> None:
    with (
        serving(CollectingDouble(engine, **state)) as address,
        pytest.raises(PreflightError, match="runs in mode") as caught,
    ):
        confidence_records(SGLangClient(address), [[1]], 4)
    assert "cap-accept" in str(caught.value.hint)


def test_confidences_that_were_scaled_already_are_refused(engine: Engine) -> None:
    double = CollectingDouble(engine)
    double.information["speculative_dspark_confidence_sts_path"] = "sts.json"
    with serving(double) as address, pytest.raises(PreflightError, match="scales its confidences already"):
        confidence_records(SGLangClient(address), [[1]], 4)
