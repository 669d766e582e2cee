"""A certificate that contradicts itself cannot be read; numbers that are merely bad can."""

from __future__ import annotations

import json

import fake_build
import pytest
from pydantic import ValidationError

from dspark.io.jsonfile import model_json
from dspark.package.certificate import Certificate, EngineFiles


def certificate() -> dict:
    entry = json.loads(json.dumps(model_json(fake_build.measured_entry())))
    return {
        "schema": "dspark/certificate/1",
        "subject": "0" * 64,
        "gamma": 3,
        "entries": [entry],
        "engines": [{"engine": "sglang", "status": "written"}],
    }


def change(*keys, to):
    def apply(entry):
        for key in keys[:-1]:
            entry = entry[key]
        entry[keys[-1]] = to

    return apply


def absent(entry):
    kept = {"schema", "profile", "load"}
    for key in entry.keys() - kept:
        del entry[key]
    entry |= {"status": "absent", "reason": "no engine"}


INCREDIBLE = {
    "passed without a draft": change("lossless", "drafts", to=0),
    "passed without a prompt": change("lossless", "n", to=0),
    "measured without agreement": change("offline_vs_engine", "result", to="inconclusive"),
    "measured without any comparison": lambda entry: entry.pop("offline_vs_engine"),
    "measured with inconclusive losslessness": change("lossless", "result", to="inconclusive"),
    "agrees beyond the tolerance": change("offline_vs_engine", "relative_difference", "value", to=0.2),
    "disagrees and counts as inconclusive": lambda entry: (
        entry["offline_vs_engine"].update(result="disagrees"),
        entry.update(status="inconclusive", reason="x"),
    ),
    "ends before it begins": change("holds_until", "date", to="2026-01-01"),
    "a date that is none": change("holds_until", "date", to="some day"),
    "holds for another engine": change("holds_until", "engine_version", to="9.9"),
    "tau below one": change("acceptance", "math", "tau", "value", to=0.9),
    "tau above gamma + 1": change("acceptance", "math", "tau", "value", to=4.1),
    "a rate above one": change("acceptance", "math", "conditional", 0, "value", to=1.5),
    "survival that rises": change("acceptance", "math", "marginal", 2, "value", to=0.5),
    "more positions than gamma": lambda entry: entry["acceptance"]["math"]["conditional"].append(
        {"value": 0.1, "n": 3, "ci95": [0, 1]}
    ),
    "interval backwards": change("acceptance", "math", "tau", "ci95", to=[2.1, 1.9]),
    "measured on nothing": change("acceptance", "math", "tau", "n", to=0),
    "a hidden ratio": lambda entry: entry["against_none"].pop(),
    "a ratio of nothing": lambda entry: entry["load"].pop(),
    "an arm twice": lambda entry: entry["load"].append(entry["load"][1]),
    "a ratio twice": lambda entry: entry["against_none"].append(entry["against_none"][0]),
    "no plain decoding beside it": lambda entry: entry["load"].pop(2),
    "a negative ratio": change("against_none", 0, "ratio", to={"value": -1.0, "n": 3, "ci95": [-2, 0]}),
    "latencies that fall": change("load", 0, "ttft_seconds", "p99", to=0.001),
    "a negative latency": change("load", 0, "itl_seconds", "p50", to=-0.1),
    "prediction by another formula": change("cycle", "latency_per_token_predicted_seconds", to=0.012),
    "a cycle without tokens": change("cycle", "tau", to=0.0),
    "recommendations that overlap": change("recommended", 1, "from_concurrency", to=3),
    "a recommendation backwards": change("recommended", 0, "to_concurrency", to=0),
    "a recommendation from zero": change("recommended", 0, "from_concurrency", to=0),
    "another gamma recommended": change("recommended", 0, "gamma", to=2),
    "a policy that was not measured there": change("recommended", 0, "policy", to="scheduled"),
    "absent with measurements": absent,
}


@pytest.mark.parametrize("name", INCREDIBLE)
def test_a_contradiction_in_an_entry_is_refused(name):
    value = certificate()
    INCREDIBLE[name](value["entries"][0])
    with pytest.raises(ValidationError):
        Certificate.model_validate(value)


BAD_BUT_TRUE = {
    "slower everywhere": lambda entry: [
        item["ratio"].update(value=0.5, ci95=[0.4, 0.6]) for item in entry["against_none"]
    ],
    "not lossless": change("lossless", "result", to="fail"),
    "disagrees": lambda entry: (
        entry["offline_vs_engine"].update(result="disagrees"),
        entry.update(status="disagrees", reason="tau differs"),
    ),
    "inconclusive": lambda entry: (
        entry["lossless"].update(result="inconclusive", drafts=0),
        entry.update(status="inconclusive", reason="no draft was seen"),
    ),
    "nothing recommended": change("recommended", to=[]),
    "speculation switched off": lambda entry: [item.update(policy="none") for item in entry["recommended"]],
    "no end": lambda entry: entry.update(acceptance=entry["acceptance"]),
}


@pytest.mark.parametrize("name", BAD_BUT_TRUE)
def test_bad_news_is_read_as_it_is(name):
    value = certificate()
    BAD_BUT_TRUE[name](value["entries"][0])
    Certificate.model_validate(value)


def test_entries_and_engines_stand_once_in_order():
    value = certificate()
    value["entries"] *= 2
    with pytest.raises(ValidationError, match="sorted"):
        Certificate.model_validate(value)
    value = certificate()
    value["engines"] = [{"engine": "vllm", "status": "written"}, {"engine": "sglang", "status": "written"}]
    with pytest.raises(ValidationError, match="sorted"):
        Certificate.model_validate(value)


def test_an_engine_has_files_or_a_reason():
    EngineFiles(engine="vllm", status="absent", reason="not vanilla")
    for wrong in ({"status": "absent"}, {"status": "written", "reason": "x"}):
        with pytest.raises(ValidationError):
            EngineFiles.model_validate({"engine": "vllm", **wrong})
