"""TensorRT-LLM: one configuration per release, cost table, calibration and launch script.

What the files rest on, since no TensorRT-LLM could be run: the reference pages of DSparkDecodingConfig in 1.3.0rc27,
1.4.0rc1 and 1.4.0rc4 name the fields; the sources that brought drafters with a checkpoint of their own
(NVIDIA/TensorRT-LLM#18043) say how they are read. Those sources always verify whole blocks of such a drafter and use
confidences only of drafters inside a DeepSeek-V4 target. 1.4.0rc4 has settings for confidence scheduling, but its
sources were not at hand: whole blocks are what the script starts, and scheduling is a second configuration to try.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dspark.engines.base import EngineInputs, calibration_for, json_bytes, launch_script, require_support
from dspark.errors import CalibrationError
from dspark.scheduling.additive import AdditiveCost
from dspark.scheduling.survival import check_temperatures

if TYPE_CHECKING:
    from dspark.drafters.config import DrafterConfig
    from dspark.scheduling.config import Temperatures
    from dspark.scheduling.cost import CostCurve

VERSIONS = ("1.3.0rc27", "1.4.0rc1", "1.4.0rc4")
SCHEDULED = "1.4.0rc4"  # the release whose configuration names a cost table and a calibration
# Families whose layers hand out their outputs to a drafter, by transformers' model_type.
TARGETS = frozenset(["llama", "qwen3", "qwen3_moe", "gpt_oss"])
DRAFTER = "../../drafter"
COSTS_FILE, CALIBRATION_FILE = "cost_table.json", "calibration.json"
SCHEDULED_FILE = f"config-{SCHEDULED}.scheduled.yaml"
_NOT_RUN = "Written by the released formats and NOT run: no TensorRT-LLM was at hand."
# A table with any of these is taken for one of measured cells, which needs a seal of the running engine beside it.
SEALED = frozenset(["schema_version", "cost_tables", "measurements", "engine_fingerprint", "engine_fingerprint_sha256"])


class TensorRTLLMEngine:
    """Adapter of TensorRT-LLM."""

    name = "tensorrt_llm"

    def supports(self, config: DrafterConfig) -> str | None:
        """Why no supported release of TensorRT-LLM can serve such a drafter, or None."""
        if config.kind == "eagle3":
            return "TensorRT-LLM is not known to load layers of EAGLE-3 with norms of queries and keys"
        if config.markov_type != "vanilla":
            return f"TensorRT-LLM reads only vanilla Markov heads beside a target, this one is {config.markov_type!r}"
        if not config.confidence:
            return "TensorRT-LLM is not known to load a drafter without a confidence head"
        if config.target_model_type not in TARGETS:
            return f"TensorRT-LLM is not known to hand out layer outputs of {config.target_model_type!r} targets"
        return None

    def files(self, inputs: EngineInputs) -> dict[str, bytes]:
        """A configuration per release and `launch.sh`; with a cost curve and a calibration also those of scheduling.

        Raises:
            SettingsError: the head or the target's family is not served.
            CalibrationError: temperatures that are not one positive number per draft position.
        """
        require_support(self, inputs.drafter)
        files = {f"config-{version}.yaml": _config(inputs, version) for version in VERSIONS}
        missing = _missing(inputs)
        if missing is None:
            files |= _scheduling(inputs)
        return {**files, "launch.sh": _launch(inputs, missing)}


def cost_table(cost: CostCurve | AdditiveCost) -> dict[str, Any]:
    """The one-dimensional table: milliseconds of a step at so many tokens, anchors included; interpolated between.

    An additive cost brings the part of the requests with it. None of its parts may be negative here, so what the parts
    have in common goes into the tokens' part.
    """
    if not isinstance(cost, AdditiveCost):
        seconds = cost.step_seconds(cost.sample_batch_tokens).tolist()
        return {"token_counts": list(cost.sample_batch_tokens), "step_time_ms": _milliseconds(seconds)}
    least = min(cost.alpha_seconds)
    return {
        "token_counts": list(cost.tokens),
        "step_time_ms": _milliseconds([cost.bias_seconds + least + value for value in cost.theta_seconds]),
        "batch_sizes": list(cost.requests),
        "batch_overhead_ms": _milliseconds([value - least for value in cost.alpha_seconds]),
    }


def calibration_table(calibration: Temperatures, gamma: int) -> dict[str, Any]:
    """The confidence temperatures under both names that readers look for.

    Raises:
        CalibrationError: not exactly gamma of them, or one that is not positive.
    """
    temperatures = check_temperatures(calibration.temperatures, gamma).tolist()
    return {"sts_temperatures": temperatures, "temperatures": temperatures}


def _milliseconds(seconds: Sequence[float]) -> list[float]:
    return [value * 1e3 for value in seconds]


def _missing(inputs: EngineInputs) -> str | None:
    """What scheduling lacks, or None: a cost curve, or a calibration for the traffic."""
    if inputs.why_no_curve is not None:
        return inputs.why_no_curve
    try:
        calibration_for(inputs.scheduler.calibrations, inputs.sampling_temperature)
    except CalibrationError as reason:
        return reason.message
    return None


def _scheduling(inputs: EngineInputs) -> dict[str, bytes]:
    """Cost table, calibration and the configuration that names them."""
    curve = inputs.scheduler.curve(inputs.profile)
    cost = inputs.additive if inputs.additive is not None and inputs.additive_is_closer else curve
    calibration = calibration_for(inputs.scheduler.calibrations, inputs.sampling_temperature)
    key = calibration.model_dump(mode="json", exclude={"temperatures"})
    measured = {"profile": inputs.profile, "fingerprint": dict(inputs.fingerprint)}
    return {
        COSTS_FILE: _noted(cost_table(cost), {**measured, **inputs.provenance}),
        CALIBRATION_FILE: _noted(calibration_table(calibration, inputs.drafter.gamma), {**key, **inputs.provenance}),
        SCHEDULED_FILE: _config(
            inputs,
            SCHEDULED,
            enable_confidence_scheduling=True,
            confidence_cost_table_path=COSTS_FILE,
            confidence_calibration_path=CALIBRATION_FILE,
        ),
    }


def _noted(table: dict[str, Any], provenance: Mapping[str, Any]) -> bytes:
    """A table with where it comes from, under a key that readers pass over."""
    return json_bytes({**table, "dspark": {"note": _NOT_RUN, **provenance}})


def _config(inputs: EngineInputs, version: str, **scheduling: object) -> bytes:
    """`--config` of `trtllm-serve`; says again what the checkpoint says, for a release that would miss it there."""
    config = inputs.drafter
    speculative = {
        "decoding_type": "DSpark",
        "speculative_model": DRAFTER,
        "max_draft_len": config.gamma,
        "block_size": config.gamma,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.taps),  # outputs of these layers, counted from 0
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_type,
        **scheduling,
    }
    lines = [
        f"# TensorRT-LLM {version}: a DSpark drafter of its own checkpoint. Paths are relative to this folder.",
        f"# {_NOT_RUN}",
        f"dtype: {json.dumps(inputs.target.dtype)}",
        "speculative_config:",
        *(f"  {key}: {json.dumps(value)}" for key, value in speculative.items()),
    ]
    return ("\n".join(lines) + "\n").encode("utf-8")


def _launch(inputs: EngineInputs, missing: str | None) -> bytes:
    return launch_script(
        inputs,
        about=[
            f"Serve {inputs.target.name} with its DSpark drafter in TensorRT-LLM {', '.join(VERSIONS)}.",
            "dspark wrote this script by the released formats and has NOT run it: no TensorRT-LLM was at hand.",
            "The configuration is that of the installed release; DSPARK_TENSORRT_LLM=1.4.0rc4 bash launch.sh takes",
            "another one's. Whole blocks are verified. At temperatures above 0 a draft is accepted only if the target",
            "draws the same token; use_rejection_sampling: true in the configuration accepts more, with FlashInfer.",
            *_about_scheduling(inputs, missing),
            "The drafter runs unquantised: its config.json names no quantisation. Further arguments go on to",
            "trtllm-serve: bash launch.sh --port 8000",
        ],
        environment=None,
        target_flag=[],
        command=["trtllm-serve"],
        arguments=[("--backend", "pytorch")],
        preparation=_choose(missing),
        raw_arguments=['--config "$config"'],
    )


def _about_scheduling(inputs: EngineInputs, missing: str | None) -> list[str]:
    if missing is not None:
        return [f"There is no configuration for confidence scheduling: {missing}."]
    engine = inputs.fingerprint.get("engine", "an unnamed engine")
    axes = "requests and tokens" if inputs.additive_is_closer else "tokens"
    return [
        f"DSPARK_SCHEDULED=1 bash launch.sh asks {SCHEDULED} to schedule by confidence. The sources that could be read",
        "do so only for drafters inside a DeepSeek-V4 target; if this release passes the settings over, or refuses",
        f"them, leave it off. {COSTS_FILE} holds the costs of serving profile {inputs.profile}, measured on {engine},",
        f"by {axes}; unless that is this very engine and machine, measure them here first.",
    ]


def _choose(missing: str | None) -> list[str]:
    """Bash that sets `config` to the file of the installed release, or stops."""
    known = " or ".join(VERSIONS)
    lines = [
        'version="${DSPARK_TENSORRT_LLM:-}"',
        'if [ -z "$version" ]; then',
        "  version=$(python3 -c 'import importlib.metadata as m; print(m.version(\"tensorrt_llm\"))' 2>/dev/null) ||",
        "    version=unknown",
        "fi",
        'case "$version" in',
        f'  {"|".join(VERSIONS)}) config="config-$version.yaml" ;;',
        f'  *) echo "no configuration for TensorRT-LLM $version: set DSPARK_TENSORRT_LLM to {known}" >&2; exit 2 ;;',
        "esac",
        'if [ "${DSPARK_SCHEDULED:-0}" != 0 ]; then',
    ]
    if missing is not None:
        return [*lines, '  echo "this package has no configuration for confidence scheduling" >&2; exit 2', "fi"]
    return [
        *lines,
        f'  if [ "$version" != {SCHEDULED} ]; then echo "only {SCHEDULED} schedules by confidence" >&2; exit 2; fi',
        f"  config={SCHEDULED_FILE}",
        "fi",
    ]
