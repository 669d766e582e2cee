"""What engines read to schedule and to be configured: it is what the package's scheduler and manifest say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark.engines.sglang import additive_table
from dspark.engines.tensorrt_llm import CALIBRATION_FILE, COSTS_FILE, DRAFTER, calibration_table, cost_table
from dspark.engines.vllm import ADAPTIVE_FILE, FIXED_FILE
from dspark.io.jsonfile import canonical_json
from dspark.package.comparing import compare, foreign, typed
from dspark.package.contents import Content
from dspark.package.layout import SCHEDULER
from dspark.package.manifest import Manifest
from dspark.scheduling.config import SchedulerConfig


def check_sglang(scheduler: SchedulerConfig, contents: Mapping[str, Content]) -> None:
    """SGLang's tables are those of the scheduler: it would accept any others and be misled (package.md, rule 9)."""
    sts, sps, two = (foreign(contents, f"engines/sglang/{name}.json") for name in ("sts", "sps", "sps-2d"))
    if sts is not None and tuple(sts.get("temperatures", ())) not in {
        one.temperatures for one in scheduler.calibrations
    }:
        raise ValueError(f"engines/sglang/sts.json has temperatures that {SCHEDULER} does not have")
    if sps is not None:
        keys = ("sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens")
        curves = [
            [list(curve.sample_batch_tokens), list(curve.sample_steps_per_second), curve.max_batch_tokens]
            for curve in scheduler.curves.values()
        ]
        if [sps.get(key) for key in keys] not in curves:
            raise ValueError(f"engines/sglang/sps.json has a cost curve that {SCHEDULER} does not have")
        # 8.0 equals 8 here; SGLang would not start with it.
        if any(type(count) is not int for count in (*sps["sample_batch_tokens"], sps["max_batch_tokens"])):
            raise ValueError("engines/sglang/sps.json: token counts must be JSON integers")
        if '"bias_seconds"' in canonical_json(sps):
            raise ValueError("engines/sglang/sps.json would be taken for a two-dimensional table")
    models = [_measured(additive_table(cost, {})) for cost in scheduler.additive.values()]
    if two is not None and _measured(two) not in models:
        raise ValueError(f"engines/sglang/sps-2d.json has an additive cost that {SCHEDULER} does not have")


def check_vllm(gamma: int, contents: Mapping[str, Content]) -> None:
    """Both configurations are for this drafter, and differ in nothing but how much of a block is verified."""
    fixed, adaptive = (foreign(contents, f"engines/vllm/{name}") for name in (FIXED_FILE, ADAPTIVE_FILE))
    if fixed is not None and fixed.get("num_speculative_tokens") != gamma:
        raise ValueError(f"engines/vllm/{FIXED_FILE} is for other blocks than gamma = {gamma}")
    if fixed is not None and fixed.get("enable_adaptive_verification") is not False:
        raise ValueError(f"engines/vllm/{FIXED_FILE} does not verify whole blocks")
    if adaptive is not None and adaptive != {**(fixed or {}), "enable_adaptive_verification": True}:
        raise ValueError(f"engines/vllm/{ADAPTIVE_FILE} differs from {FIXED_FILE} in more than adaptive verification")


def check_tensorrt_llm(manifest: Manifest, scheduler: SchedulerConfig, contents: Mapping[str, Content]) -> None:
    """Every configuration is for this drafter, and what schedules is what the scheduler holds."""
    drafter, folder = manifest.drafter, "engines/tensorrt_llm"
    for path in contents:
        if path.startswith(f"{folder}/") and path.endswith(".yaml"):
            found = typed(contents, path, dict).get("speculative_config")
            if not isinstance(found, dict):
                raise ValueError(f"{path} has no speculative_config")
            expected = {
                "decoding_type": "DSpark",
                "speculative_model": DRAFTER,
                "max_draft_len": drafter.gamma,
                "block_size": drafter.gamma,
                "mask_token_id": drafter.mask_token_id,
                "target_layer_ids": list(drafter.taps),
                "markov_rank": drafter.markov.rank,
                "markov_head_type": drafter.markov.type,
            }
            compare(path, {key: (found.get(key), wanted) for key, wanted in expected.items()})
    costs, calibration = (foreign(contents, f"{folder}/{name}") for name in (COSTS_FILE, CALIBRATION_FILE))
    tables = [cost_table(curve) for curve in scheduler.curves.values()]
    tables += [cost_table(additive) for additive in scheduler.additive.values()]
    if costs is not None and _measured(costs) not in tables:
        raise ValueError(f"{folder}/{COSTS_FILE} has costs that {SCHEDULER} does not have")
    if calibration is not None and _measured(calibration) not in [
        calibration_table(one, drafter.gamma) for one in scheduler.calibrations
    ]:
        raise ValueError(f"{folder}/{CALIBRATION_FILE} has temperatures that {SCHEDULER} does not have")


def _measured(table: dict[str, Any]) -> dict[str, Any]:
    """What an engine reads of a table; the one key of our own says where it comes from."""
    return {key: value for key, value in table.items() if key != "dspark"}
