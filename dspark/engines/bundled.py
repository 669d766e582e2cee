"""Files for engines that serve a DeepSeek-V4 target with the drafter inside it: configurations and launch scripts.

Such a target is its own drafter's checkpoint, so no file names another one. What is written rests on the released
readers of SGLang 0.5.23 and vLLM 0.32.0 (engine-formats.md, 1.1, 1.2 and 2.1) and on the reference pages of
TensorRT-LLM's DSparkDecodingConfig, to which the target is named again. Nothing was measured: whole blocks are verified
until tables that only the engine can measure lie beside SGLang's script.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dspark.drafters.bundled import BundledDrafter
from dspark.engines.base import json_bytes, launch_script
from dspark.engines.sglang import VERSION as SGLANG
from dspark.engines.tensorrt_llm import VERSIONS
from dspark.engines.vllm import ADAPTIVE_FILE, CHOICE, FIXED_FILE
from dspark.engines.vllm import VERSION as VLLM

NOT_RUN = "dspark wrote this script by the released formats and has NOT run it: no {} was at hand."
CONFIG_FILE = "config.yaml"

# Engines that a package may hold files for, and why this one cannot.
ABSENT = {
    "llamacpp": "its converter (b11434) knows DeepseekV4DSparkModel, but how it takes the drafter out of the target is "
    "not documented in what these files rest on",
    "onnxruntime": "the drafter's stages are of the target's own kind, which dspark does not export",
    "tensorrt": "the drafter's stages are of the target's own kind, which dspark does not export",
}


@dataclass(frozen=True)
class BundledTarget:
    """The target as a launch script names it.

    Attributes:
        name: for messages.
        public_id: its repository; None: a folder, which the script asks for.
        revision: the commit, of a repository.
    """

    name: str
    public_id: str | None = None
    revision: str = ""
    source: Mapping[str, Any] = field(default_factory=dict)
    quantisation: str | None = None  # of weights that were converted here, which these are not


@dataclass(frozen=True)
class BundledInputs:
    """Everything that the files for a bundled drafter are made of."""

    drafter: BundledDrafter
    target: BundledTarget


def bundled_files(inputs: BundledInputs) -> dict[str, bytes]:
    """The files by their path below `engines/`."""
    return {
        "sglang/launch.sh": _sglang(inputs),
        **{f"vllm/{name}": content for name, content in _vllm(inputs).items()},
        **{f"tensorrt_llm/{name}": content for name, content in _tensorrt_llm(inputs).items()},
    }


def _sglang(inputs: BundledInputs) -> bytes:
    gamma = inputs.drafter.gamma
    return launch_script(
        inputs,
        about=[
            f"Serve {inputs.target.name} with the DSpark drafter inside it in SGLang {SGLANG}.",
            NOT_RUN.format("SGLang"),
            "No drafter is named: SGLang finds this one by the target's own config.",
            "Whole blocks are verified (mode static) until sps.json and sts.json lie in this folder. Then the",
            "scheduler is on (mode compact), with these tables. README.md says how this engine makes them.",
            "SGLANG_RAGGED_VERIFY_MODE overrides the mode. Further arguments go to SGLang, for instance how the",
            "model is spread over GPUs: bash launch.sh --tp 8 --port 30000",
        ],
        environment=None,
        target_flag=["--model-path"],
        command=["python3", "-m", "sglang.launch_server"],
        arguments=[
            ("--speculative-algorithm", "DSPARK"),
            ("--speculative-dspark-block-size", str(gamma)),
            ("--speculative-num-draft-tokens", str(gamma + 1)),
        ],
        preparation=[
            "mode=static; tables=()",
            "if [ -f sps.json ] && [ -f sts.json ]; then",
            "  mode=compact",
            "  tables=(--speculative-dspark-sps-table-path sps.json --speculative-dspark-confidence-sts-path sts.json)",
            "fi",
            'export SGLANG_RAGGED_VERIFY_MODE="${SGLANG_RAGGED_VERIFY_MODE:-$mode}"',
        ],
        # An empty list is no unbound variable only in newer versions of bash.
        raw_arguments=['${tables[@]+"${tables[@]}"}'],
    )


def _vllm(inputs: BundledInputs) -> dict[str, bytes]:
    # No `model`: the drafter is the target's. Unknown keys are refused, so nothing of ours travels in these files.
    config = {
        "method": "dspark",
        "num_speculative_tokens": inputs.drafter.gamma,
        "draft_sample_method": "greedy",
        "rejection_sample_method": "standard",
        "enable_adaptive_verification": False,
    }
    script = launch_script(
        inputs,
        about=[
            f"Serve {inputs.target.name} with the DSpark drafter inside it in vLLM {VLLM}.",
            NOT_RUN.format("vLLM"),
            "Whole blocks are verified. DSPARK_ADAPTIVE=1 bash launch.sh verifies as much of each block as pays, by",
            "costs that vLLM measures when it starts and by the bare confidences of the drafter, for which it takes",
            "no temperatures. Measure both under your load.",
            "Further arguments go to vLLM: bash launch.sh --tensor-parallel-size 8 --port 8000",
        ],
        environment=None,
        target_flag=[],
        command=["vllm", "serve"],
        arguments=[],
        preparation=CHOICE,
        raw_arguments=['--speculative-config "$(cat -- "$config")"'],
    )
    return {
        FIXED_FILE: json_bytes(config),
        ADAPTIVE_FILE: json_bytes(config | {"enable_adaptive_verification": True}),
        "launch.sh": script,
    }


def _tensorrt_llm(inputs: BundledInputs) -> dict[str, bytes]:
    gamma = inputs.drafter.gamma
    config = [
        f"# TensorRT-LLM {', '.join(VERSIONS)}: a DSpark drafter inside its target.",
        "# Written by the released formats and NOT run: no TensorRT-LLM was at hand.",
        "# launch.sh adds speculative_model, which is the target itself.",
        "speculative_config:",
        "  decoding_type: DSpark",
        f"  max_draft_len: {gamma}",
    ]
    script = launch_script(
        inputs,
        about=[
            f"Serve {inputs.target.name} with the DSpark drafter inside it in TensorRT-LLM {', '.join(VERSIONS)}.",
            NOT_RUN.format("TensorRT-LLM"),
            "Whole blocks are verified. Confidence scheduling (1.4.0rc4) wants a cost table and a calibration that",
            "only this engine can measure. Further arguments go to trtllm-serve: bash launch.sh --tp_size 8",
        ],
        environment=None,
        target_flag=[],
        command=["trtllm-serve"],
        arguments=[("--backend", "pytorch")],
        preparation=[
            "config=$(mktemp --suffix=.yaml)",
            f'cp -- {CONFIG_FILE} "$config"',
            # JSON quoting is YAML's, whatever the folder is called.
            "python3 -c 'import json, sys; print(\"  speculative_model:\", json.dumps(sys.argv[1]))' \\",
            '  "${target[0]}" >> "$config"',
        ],
        raw_arguments=['--config "$config"'],
    )
    return {CONFIG_FILE: ("\n".join(config) + "\n").encode("utf-8"), "launch.sh": script}
