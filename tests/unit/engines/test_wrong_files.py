"""The files that would mislead an engine: none of them gets written, and each refusal says why.

Released engines take most of these files without a word; tests/compat shows it with their own parsers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark.config.models import DrafterSettings
from dspark.drafters.config import DrafterConfig
from dspark.engines import EngineInputs, engine_files
from dspark.engines.sglang import sts_table
from dspark.errors import CalibrationError, CostCurveError, DataError, DsparkError, IntegrityError, SettingsError
from dspark.scheduling import CostCurve, SchedulerConfig, Temperatures
from dspark.scheduling.config import read_scheduler
from dspark.targets.record import TargetRecord

COST = Path(__file__).resolve().parents[2] / "data" / "cost"
DIGESTS = ("digest", "weights_digest", "embedding_digest", "head_digest", "tokenizer_digest", "chat_template_digest")
TARGET = TargetRecord(
    name="tiny",
    source={"kind": "hub", "repo": "org/tiny"},
    revision="0123abc",
    public_id="org/tiny",
    **dict.fromkeys(DIGESTS, "0" * 64),
    dtype="bfloat16",
    model_type="llama",
    architecture="LlamaForCausalLM",
    text_config={"num_attention_heads": 4, "intermediate_size": 32},
    hidden_size=16,
    num_layers=8,
    vocab_logical=50,
    vocab_physical=50,
    max_position=128,
    taps=(1, 3),
    mask_token_id=5,
    eos_token_ids=(2,),
)
CALIBRATION = Temperatures(temperature=0.0, label="greedy_match", temperatures=(1.0, 1.25, 1.5))


def drafter(*, target: TargetRecord = TARGET, gamma: int = 3) -> DrafterConfig:
    return DrafterConfig.of(target, DrafterSettings(gamma=gamma))


def inputs(*, config: DrafterConfig | None = None, table: str = "jagged-but-real") -> EngineInputs:
    """What the writers get, with a cost table of tests/data/cost in SGLang's own spelling."""
    raw = json.loads((COST / f"{table}.json").read_text())
    curve = CostCurve(
        sample_batch_tokens=raw["sample_batch_tokens"],
        sample_steps_per_second=raw["sample_steps_per_sec"],
        max_batch_tokens=raw["max_batch_tokens"],
    )
    scheduler = SchedulerConfig(gamma=3, calibrations=(CALIBRATION,), curves={"here": curve})
    return EngineInputs(config or drafter(), TARGET, scheduler, "here", {"engine": "x"}, temperature=0.0)


def scheduler_file(folder: Path, **changes: Any) -> SchedulerConfig:
    """Read a runtime configuration that somebody edited."""
    value = json.loads(SchedulerConfig(gamma=3, calibrations=(CALIBRATION,), curves={}).model_dump_json(by_alias=True))
    value["calibrations"][0] |= {key: changes.pop(key) for key in ("temperatures",) if key in changes}
    (folder / "scheduler.json").write_text(json.dumps(value | changes))
    return read_scheduler(folder / "scheduler.json")


def temperatures(*values: float) -> dict[str, Any]:
    # model_copy does not validate: the writer must not rely on somebody else having done so.
    return sts_table(CALIBRATION.model_copy(update={"temperatures": values}), 3, {})


def checkpoint(**changes: Any) -> object:
    from dspark.drafters.description import describe, read_description

    value = describe(drafter(), TARGET, dialect="union", dtype="bfloat16", weights_sha256="0" * 64)
    return read_description(value | changes, "config.json")


def with_head(engine: str, kind: str) -> dict[str, bytes]:
    return engine_files(engine, inputs(config=drafter().model_copy(update={"markov_type": kind})))


Case = tuple[Callable[[Path], object], type[DsparkError], str]
REFUSED: dict[str, Case] = {
    "flat table": (lambda _: inputs(table="flat"), CostCurveError, "flat, 100 steps per second at every batch size"),
    "one-point table": (lambda _: inputs(table="one-point"), CostCurveError, "1 probe(s), at least 2 are needed"),
    "zero in the table": (
        lambda _: inputs(table="zero"),
        CostCurveError,
        "0 steps per second at 64 tokens, it must be > 0",
    ),
    "negative table": (lambda _: inputs(table="negative"), CostCurveError, "-5 steps per second at 8 tokens"),
    "rising table": (
        lambda _: inputs(table="rising"),
        CostCurveError,
        "steps per second rise from 40 at 1 tokens to 80 at 8 tokens",
    ),
    "table that rises once": (
        lambda _: inputs(table="non-monotone"),
        CostCurveError,
        "steps per second rise from 80 at 8 tokens to 95 at 16 tokens",
    ),
    "probes that are no integers": (
        lambda _: inputs(table="fractional"),
        CostCurveError,
        "must be a whole number, got 1.0",
    ),
    "temperature of zero": (
        lambda _: temperatures(1.5, 0.0, 2.0),
        CalibrationError,
        "temperature of position 2 is 0, it must be > 0",
    ),
    "negative temperature": (
        lambda _: temperatures(1.5, 0.8, -1.0),
        CalibrationError,
        "temperature of position 3 is -1, it must be > 0",
    ),
    "temperature of zero in a runtime configuration": (
        lambda folder: scheduler_file(folder, temperatures=[1.5, 0.0, 2.0]),
        DataError,
        "calibrations.0.temperatures.1: Input should be greater than 0",
    ),
    "temperatures of another gamma": (
        lambda _: engine_files("sglang", inputs(config=drafter(gamma=2))),
        CalibrationError,
        "3 temperatures for 2 draft positions",
    ),
    "runtime configuration of another gamma": (
        lambda folder: scheduler_file(folder, gamma=4),
        DataError,
        "3 temperatures for gamma 4",
    ),
    "checkpoint whose mask token is out of range": (
        lambda _: checkpoint(mask_token_id=50),
        IntegrityError,
        "mask_token_id 50 is outside the vocabulary of 50",
    ),
    "drafter whose mask token is out of range": (
        lambda _: drafter(target=TARGET.model_copy(update={"mask_token_id": 50})),
        SettingsError,
        "mask_token_id 50 is outside the vocabulary of 50",
    ),
    "checkpoint with an unknown head": (
        lambda _: checkpoint(markov_head_type="lstm"),
        IntegrityError,
        "markov_type",
    ),
    "rnn head for vLLM": (
        lambda _: with_head("vllm", "rnn"),
        SettingsError,
        "vLLM 0.32.0 reads only vanilla Markov heads, this one is 'rnn'",
    ),
    "gated head for vLLM": (
        lambda _: with_head("vllm", "gated"),
        SettingsError,
        "vLLM 0.32.0 reads only vanilla Markov heads, this one is 'gated'",
    ),
    "rnn head for llama.cpp": (
        lambda _: with_head("llamacpp", "rnn"),
        SettingsError,
        "llama.cpp reads only vanilla Markov heads, this one is 'rnn'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_file_is_refused_with_the_reason(tmp_path: Path, name: str):
    attempt, error, reason = REFUSED[name]
    with pytest.raises(error, match=re.escape(reason)):
        attempt(tmp_path)


@pytest.mark.parametrize("engine", ["sglang", "vllm", "llamacpp"])
def test_the_right_files_beside_them_are_written(engine: str):
    """Nothing above is refused for a reason that would hit everybody."""
    assert engine_files(engine, inputs())


def test_sglang_serves_the_heads_that_the_others_refuse():
    assert with_head("sglang", "rnn")
