"""SGLang: cost table, temperatures and launch script as release 0.5.23 reads them (engine-formats.md, 1.3 to 1.5).

SGLang accepts nonsense silently: flat, rising, one-point or negative tables switch its scheduler off or mislead it. A
`CostCurve` and an `AdditiveCost` cannot be any of these, so what is written here are those (package.md, rule 9).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dspark.engines.base import (
    EngineInputs,
    calibration_for,
    environment_file,
    json_bytes,
    launch_script,
    require_support,
)
from dspark.errors import DataError
from dspark.io.jsonfile import canonical_json
from dspark.scheduling.survival import check_temperatures

if TYPE_CHECKING:
    from dspark.drafters.config import DrafterConfig
    from dspark.scheduling.additive import AdditiveCost
    from dspark.scheduling.config import Temperatures
    from dspark.scheduling.cost import CostCurve

VERSION = "0.5.23"
# Families whose SGLang model hands out layer outputs, by transformers' model_type.
TARGETS = frozenset(
    [
        *("llama", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_vl", "gemma4", "gemma4_text"),
        *("gpt_oss", "deepseek_v2", "deepseek_v4", "glm4_moe_lite", "minimax_m3", "nemotron_h", "lfm2", "mimo_v2"),
    ]
)
# `static`, the default, builds no confidence head and reads neither table.
ENVIRONMENT = {"SGLANG_RAGGED_VERIFY_MODE": "compact"}
WHOLE_BLOCKS = {"SGLANG_RAGGED_VERIFY_MODE": "static"}  # all that there is for a drafter without that head
_TABLE_FLAG = "--speculative-dspark-sps-table-path"
_TEMPERATURES_FLAG = "--speculative-dspark-confidence-sts-path"
CURVE_FILE, ADDITIVE_FILE = "sps.json", "sps-2d.json"


class SGLangEngine:
    """Adapter of SGLang."""

    name = "sglang"

    def supports(self, config: DrafterConfig) -> str | None:
        """Why SGLang cannot serve such a drafter, or None."""
        if config.kind == "eagle3":
            # llama_eagle3.py: it would skip q_norm and k_norm without a word.
            return f"SGLang {VERSION} has no norms of queries and keys in layers of EAGLE-3, this drafter has them"
        if config.layer_style != "qwen3":
            return f"SGLang {VERSION} has no drafters with {config.style.name}'s layers, only with Qwen3's"
        if config.target_model_type not in TARGETS:
            return f"SGLang {VERSION} hands out no layer outputs of {config.target_model_type!r} targets"
        return None

    def files(self, inputs: EngineInputs) -> dict[str, bytes]:
        """`sps.json`, `sps-2d.json` where requests and tokens were told apart, `sts.json`, `env` and `launch.sh`.

        For a drafter without a confidence head these are `env` and `launch.sh`: whole blocks are verified. So they are
        without a cost curve, but the temperatures, which need none, are there for when it was measured.

        Raises:
            SettingsError: the target's family is not served.
            CalibrationError: temperatures that SGLang would not start with, or none for this traffic.
        """
        require_support(self, inputs.drafter)
        if not inputs.drafter.confidence:
            return {"env": environment_file(WHOLE_BLOCKS), "launch.sh": _launch_fixed(inputs)}
        calibration = calibration_for(inputs.scheduler.calibrations, inputs.sampling_temperature)
        temperatures = json_bytes(sts_table(calibration, inputs.drafter.gamma, inputs.provenance))
        if inputs.why_no_curve is not None:
            launch = _launch_without_costs(inputs, inputs.why_no_curve, calibration)
            return {"sts.json": temperatures, "env": environment_file(WHOLE_BLOCKS), "launch.sh": launch}
        curve = inputs.scheduler.curve(inputs.profile)
        measured = {"profile": inputs.profile, "fingerprint": dict(inputs.fingerprint), **inputs.provenance}
        tables = {CURVE_FILE: json_bytes(sps_table(curve, measured))}
        if inputs.additive is not None:
            tables[ADDITIVE_FILE] = json_bytes(additive_table(inputs.additive, measured))
        return {
            **tables,
            "sts.json": temperatures,
            "env": environment_file(ENVIRONMENT),
            "launch.sh": _launch(inputs, calibration),
        }


def sps_table(curve: CostCurve, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The one-dimensional table: engine steps per second at so many batch tokens.

    SGLang looks it up at requests + budget: each request's own next token and the drafted ones of all requests. That
    is what a `CostCurve` holds. (SGLang's profiler probes whole blocks, at requests x (gamma + 1) of the same axis.)

    Args:
        curve: of the engine that will read the table.
        provenance: written beside it; SGLang ignores unknown keys.
    Raises:
        DataError: if the provenance would make SGLang misread the file.
    """
    table = {
        "sample_batch_tokens": list(curve.sample_batch_tokens),
        "sample_steps_per_sec": list(curve.sample_steps_per_second),
        "max_batch_tokens": curve.max_batch_tokens,
        "dspark": {"axis": "requests + drafted tokens to verify", **provenance},
    }
    # SGLang takes a file that has this word in quotes anywhere for a two-dimensional table.
    if '"bias_seconds"' in canonical_json(table):
        raise DataError('the fingerprint of the cost curve has the word "bias_seconds", which SGLang would misread')
    return table


def additive_table(cost: AdditiveCost, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The two-dimensional table: SGLang takes T(R, R + budget) from it by the interpolation of an `AdditiveCost`."""
    return {
        "bias_seconds": cost.bias_seconds,
        "bs_probes": list(cost.requests),
        "alpha_seconds": list(cost.alpha_seconds),
        "m_probes": list(cost.tokens),
        "theta_seconds": list(cost.theta_seconds),
        "dspark": {"axis": "requests, and requests + drafted tokens to verify", **provenance},
    }


def sts_table(calibration: Temperatures, gamma: int, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The confidence temperatures, one per draft position.

    Raises:
        CalibrationError: not exactly gamma of them, or one that is not positive.
    """
    return {
        "temperatures": check_temperatures(calibration.temperatures, gamma).tolist(),
        "dataset": str(calibration),  # an object is refused here, so the key is spelled out
        "dspark": {**calibration.model_dump(mode="json", exclude={"temperatures"}), **provenance},
    }


def _choice(inputs: EngineInputs) -> list[str]:
    """Which of the two cost tables is used, why, and how to take the other."""
    if inputs.additive is None:
        return ["There is no table of requests and tokens (sps-2d.json): the profile did not tell their costs apart."]
    used, other = (ADDITIVE_FILE, CURVE_FILE) if inputs.additive_is_closer else (CURVE_FILE, ADDITIVE_FILE)
    reason = "how well either predicts a step is not known" if inputs.model_errors is None else str(inputs.model_errors)
    return [
        f"{ADDITIVE_FILE} holds the same as a table of requests and tokens. {used} is used: {reason}.",
        f"To take the other one: bash launch.sh {_TABLE_FLAG} {other}",
    ]


def _arguments(inputs: EngineInputs) -> list[tuple[str, str]]:
    """What every launch of a drafter needs."""
    gamma = inputs.drafter.gamma
    return [
        ("--dtype", inputs.target.dtype),  # the drafter's too: SGLang has one dtype for both
        ("--speculative-algorithm", "DSPARK"),
        ("--speculative-draft-model-path", "../../drafter"),
        ("--speculative-draft-model-quantization", "unquant"),  # the default is the target's quantisation
        ("--speculative-dspark-block-size", str(gamma)),
        ("--speculative-num-draft-tokens", str(gamma + 1)),
    ]


def _launch_fixed(inputs: EngineInputs) -> bytes:
    reason = "The drafter has no confidence head, which SGLang's scheduling modes refuse: whole blocks are verified."
    return _launch_static(inputs, [reason])


def _launch_without_costs(inputs: EngineInputs, reason: str, calibration: Temperatures) -> bytes:
    return _launch_static(
        inputs,
        [
            f"There is no cost table to schedule by, so whole blocks are verified: {reason}.",
            "To schedule, measure one where this is served: python -m sglang.benchmark.dspark_sps_profiler. Then set",
            f"SGLANG_RAGGED_VERIFY_MODE=compact in env, and: bash launch.sh {_TABLE_FLAG} YOURS",
            f"{_TEMPERATURES_FLAG} sts.json. That file holds the calibration made at {calibration}.",
        ],
    )


def _launch_static(inputs: EngineInputs, why: Sequence[str]) -> bytes:
    return launch_script(
        inputs,
        about=[
            f"Serve {inputs.target.name} with its drafter in SGLang {VERSION}, as a DSpark drafter.",
            "dspark wrote this script by the released formats and has NOT run it: no SGLang was at hand.",
            *why,
            "Further arguments go to SGLang: bash launch.sh --port 30000",
        ],
        environment="env",
        target_flag=["--model-path"],
        command=["python3", "-m", "sglang.launch_server"],
        arguments=_arguments(inputs),
    )


def _launch(inputs: EngineInputs, calibration: Temperatures) -> bytes:
    engine = inputs.fingerprint.get("engine", "an unnamed engine")
    return launch_script(
        inputs,
        about=[
            f"Serve {inputs.target.name} with its DSpark drafter in SGLang {VERSION}.",
            "dspark wrote this script by the released formats and has NOT run it: no SGLang was at hand.",
            f"sps.json holds the cost curve of serving profile {inputs.profile}, measured on {engine}. Unless that is",
            "this very machine and engine, measure it here first: python -m sglang.benchmark.dspark_sps_profiler",
            *_choice(inputs),
            f"sts.json holds the calibration made at {calibration}.",
            "Compact verification needs an attention backend with graphs for ragged batches, such as fa3; others run",
            "eager steps. Further arguments go to SGLang: bash launch.sh --attention-backend fa3 --port 30000",
        ],
        environment="env",
        target_flag=["--model-path"],
        command=["python3", "-m", "sglang.launch_server"],
        arguments=[
            *_arguments(inputs),
            (_TABLE_FLAG, ADDITIVE_FILE if inputs.additive_is_closer else CURVE_FILE),
            (_TEMPERATURES_FLAG, "sts.json"),
        ],
    )
