"""Confidences and outcomes out of SGLang's dumped steps, and what calibration makes of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # protocol_servers.py

from protocol_servers import Engine, SGLangRecordingDouble, serving

from dspark.calibration import fit_temperatures
from dspark.config.models import CalibrationSettings
from dspark.decoding.drafting import TorchProposer
from dspark.decoding.loop import decode
from dspark.decoding.policies import Fixed
from dspark.decoding.records import calibration_records
from dspark.engines.client import Completion
from dspark.engines.counters import Counters
from dspark.engines.sglang_client import SGLangClient
from dspark.engines.sglang_records import RecordedRequest, parse_blocks, record_requests, records_of
from dspark.errors import DataError, PreflightError
from dspark.evaluation.tiny import tiny_drafter, tiny_target

GAMMA = 3
PROMPTS = [[3, 4], [5, 6, 2], [9], [2, 8], [6], [4, 4], [8, 3, 5], [2]]


def request(rid: str, place: int, confidence: list[float] | None, correct: int, trimmed: int = 0) -> dict[str, Any]:
    fields = {
        "rid": rid,
        "prefix_len": place,
        "correct_drafts": correct,
        "cap_trim": trimmed,
        "draft_tokens": [1, 2, 3],
    }
    return fields if confidence is None else fields | {"confidence": confidence}


def reply(tokens: int, *, ended: bool = False) -> Completion:
    return Completion((5,) * (tokens - ended), ended, tokens, 0.1, Counters())


def test_what_the_cut_took_away_was_accepted_and_what_lies_behind_the_end_is_unknown() -> None:
    steps: list[dict[str, Any]] = [
        {"forward_ct": 1, "reqs": [request("a", 4, [0.9, 0.5, 0.25], 1, 1), request("b", 2, [0.1, 0.2, 0.3], 0)]},
        {"forward_ct": 2, "reqs": [request("a", 6, [1.0, 0.0, 0.5], 3)]},
        {"forward_ct": 3, "reqs": [request("c", 9, None, 2)]},
        {"forward_ct": 4},
    ]
    blocks = parse_blocks(steps)
    assert sorted(blocks) == ["a", "b"], "c has no confidences"
    # a: 4 tokens were asked, anchor 4 is the first of its reply; the reply's last token is at 4 + 4 - 1 = 7.
    found = records_of([RecordedRequest((1, 1, 1, 1), reply(4), tuple(blocks["a"]), 4)], "a test", {9})
    assert found.survived.tolist() == [[True, True, False], [True, False, False]]
    assert found.known.tolist() == [[True, True, True], [True, False, False]]
    # b: its second and last token ended it, in the place of the first draft, which is thereby rejected with all others.
    ended = records_of([RecordedRequest((1, 1), reply(2, ended=True), tuple(blocks["b"]), 9)], "a test", {9})
    assert ended.known.all() and not ended.survived.any()
    assert found.z[0] == pytest.approx([np.log(9), 0, np.log(1 / 3)])
    assert found.z[1, 0] == pytest.approx(np.log(0.99995 / 0.00005))
    assert (found.key.temperature, found.key.label, found.source) == (0, "greedy_match", "a test")
    with pytest.raises(DataError, match="no block with confidences"):
        records_of([RecordedRequest((1,), reply(4), (), 4)], "a test", {9})


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_a_drafted_end_hides_what_lies_behind_it_whatever_became_of_it(accepted: int) -> None:
    """Drafts 1, 2, 3 after an anchor at 2, of which 2 ends replies. With 2 or 3 accepted the reply is anchor, 1, 2."""
    ended = accepted >= 2
    blocks = parse_blocks([{"reqs": [request("a", 2, [0.9, 0.8, 0.7], accepted)]}])["a"]
    asked = RecordedRequest((1, 1), reply(3, ended=True) if ended else reply(9), tuple(blocks), 9)
    found = records_of([asked], "a test", {2, 9})
    assert found.known.tolist() == [[True, True, False]]
    assert found.survived.sum() == min(accepted, 2)
    # A server that ends replies at a token that the target does not name: as far as the reply tells.
    assert records_of([asked], "a test", {9}).known.sum() == (2 if ended else 3)


@pytest.fixture(scope="module")
def engine() -> Engine:
    target = tiny_target(10, spread=0.4, seed=5, eos_token_ids=(1, 7))
    return Engine(target, tiny_drafter(target, GAMMA, seed=3), eos_token_ids=frozenset((1, 7)))


@pytest.mark.parametrize("cap", [None, 1])
def test_a_server_tells_the_same_as_our_own_loop_on_the_same_prompts(engine: Engine, cap: int | None) -> None:
    """Whatever its scheduler would cut; ends and limits within blocks among them. (Shorter steps draft more blocks.)"""
    engine.verified = cap
    double = SGLangRecordingDouble(engine)
    with serving(double) as address:
        double.record(request("somebody else", 3, [0.5] * GAMMA, 0))
        served = records_of(record_requests(SGLangClient(address), PROMPTS, 17), "a test", engine.eos_token_ids)
    engine.verified = None
    proposer = TorchProposer(engine.drafter)
    decoded = decode(
        engine.target, proposer, PROMPTS, max_new_tokens=17, policy=Fixed(), temperature=0.0, seeds=[0] * len(PROMPTS),
        batch_size=1,
    )  # fmt: skip
    ours = calibration_records(decoded)
    assert not ours.valid.all(), "some block goes beyond an end"
    if cap is None:
        assert np.array_equal(served.known, ours.valid)
        assert np.array_equal(served.survived, ours.accepted & ours.valid)
        stated = 1 / (1 + np.exp(-np.stack((served.z, np.where(ours.valid, ours.logits, 0.0)))))
        assert np.abs(stated[0] - stated[1]).max() < 1e-4, "confidences come rounded"
    else:
        assert len(served) > len(ours.logits)
        assert served.survived[:, 1:].any(), "what was cut away is known all the same"


class TwiceTooSharp(SGLangRecordingDouble):
    """A server whose confidences are twice too sharp, at every position."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.random = np.random.default_rng(5)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        rid = f"r{len(self.steps)}"
        for number in range(40):
            logits = self.random.normal(0.8, 1.2, GAMMA)
            right = self.random.random(GAMMA) < 1 / (1 + np.exp(-logits))
            accepted = GAMMA if right.all() else int(np.argmin(right))
            shown = [round(float(value), 4) for value in 1 / (1 + np.exp(-2 * logits))]
            trimmed = int(self.random.integers(accepted + 1))
            self.record(request(rid, 2 + number, shown, accepted - trimmed, trimmed))
        said = [1] * 60
        meta = {"id": rid, "completion_tokens": len(said), "finish_reason": {"type": "length"}}
        return {"output_ids": said, "meta_info": meta}


def test_calibration_finds_the_temperature_of_a_served_head(engine: Engine) -> None:
    with serving(TwiceTooSharp(engine)) as address:
        client = SGLangClient(address)
        first = records_of(record_requests(client, [[3, 4]] * 150, 40), "a test", ())
        assert len(first) == 150 * 40
        again = records_of(record_requests(client, [[3, 4]], 40), "a test", ())
        assert len(again) == 40, "only what is new"
    fitted = fit_temperatures(first, CalibrationSettings())
    assert fitted.temperatures == pytest.approx([2.0] * GAMMA, rel=0.2)
    assert fitted.calibration.source == "a test"


@pytest.mark.parametrize("state", [{"mode": "static"}, {"mode": "compact"}, {"components": ["core"]}])
def test_a_server_that_does_not_tell_every_outcome_is_refused(engine: Engine, state: dict[str, Any]) -> None:
    with (
        serving(SGLangRecordingDouble(engine, **state)) as address,
        pytest.raises(PreflightError, match="runs in mode") as caught,
    ):
        record_requests(SGLangClient(address), [[1]], 4)
    assert "cap-accept" in str(caught.value.hint)


def test_confidences_that_were_scaled_already_are_refused(engine: Engine) -> None:
    double = SGLangRecordingDouble(engine)
    double.information["speculative_dspark_confidence_sts_path"] = "sts.json"
    with serving(double) as address, pytest.raises(PreflightError, match="scales its confidences already"):
        record_requests(SGLangClient(address), [[1]], 4)
