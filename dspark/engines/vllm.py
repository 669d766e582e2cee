"""vLLM: speculative configurations and launch script as release 0.32.0 reads them (engine-formats.md, section 2).

vLLM takes no temperatures and no cost table: it profiles its own costs at start-up and applies the confidence head's
bare sigmoid. Fixed verification of the whole block needs neither and is what the script starts; adaptive verification
is a second configuration to choose, and the script says what it makes of this drafter's confidences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dspark.engines.base import EngineInputs, calibration_for, json_bytes, launch_script, require_support
from dspark.errors import CalibrationError

if TYPE_CHECKING:
    from dspark.drafters.config import DrafterConfig

VERSION = "0.32.0"
# Families with layers of state-space or linear attention: vLLM refuses to verify adaptively there.
RECURRENT = frozenset(["qwen3_next", "qwen3_5", "qwen3_5_text", "nemotron_h"])
# Families with vLLM's interface for auxiliary hidden states, by transformers' model_type.
TARGETS = RECURRENT | frozenset(
    [
        *("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_vl", "gemma4", "gemma4_text", "gpt_oss", "mistral3"),
        *("granite", "deepseek_v2", "deepseek_v3", "apertus", "cohere2_moe", "minicpm"),
        "gemma4_unified_text",  # by inference: the published Gemma 4 drafter, which vLLM loads, is for the unified 12B
    ]
)
_NAMES = {"dspark": "DSpark", "eagle3": "EAGLE-3"}
FIXED_FILE, ADAPTIVE_FILE = "speculative_config.json", "speculative_config.adaptive.json"


class VLLMEngine:
    """Adapter of vLLM."""

    name = "vllm"

    def supports(self, config: DrafterConfig) -> str | None:
        """Why vLLM cannot serve such a drafter, or None."""
        if config.kind == "dspark" and config.markov_type != "vanilla":
            return f"vLLM {VERSION} reads only vanilla Markov heads, this one is {config.markov_type!r}"
        if config.target_model_type not in TARGETS:
            return f"vLLM {VERSION} hands out no hidden states of {config.target_model_type!r} targets"
        if config.layer_style == "gemma4" and not config.shared_key_value:
            return f"vLLM {VERSION} reads Gemma 4 drafters only if keys and values share a projection"
        return None

    def files(self, inputs: EngineInputs) -> dict[str, bytes]:
        """`speculative_config.json`, `speculative_config.adaptive.json` where vLLM allows it, and `launch.sh`.

        Raises:
            SettingsError: the head or the target's family is not served.
        """
        require_support(self, inputs.drafter)
        # Of EAGLE-3 it is not known whether vLLM verifies adaptively.
        chains = inputs.drafter.kind == "eagle3"
        adaptive = not chains and inputs.drafter.target_model_type not in RECURRENT
        # Unknown keys are refused by vLLM, so nothing of ours travels in these files.
        config = {
            "method": inputs.drafter.kind,  # vLLM calls both as we do
            "model": "../../drafter",
            "num_speculative_tokens": inputs.drafter.gamma,
            "draft_sample_method": "greedy",
            "rejection_sample_method": "standard",
            "enable_adaptive_verification": False,
        }
        files = {FIXED_FILE: json_bytes(config), "launch.sh": _launch(inputs, adaptive)}
        if adaptive:
            files[ADAPTIVE_FILE] = json_bytes(config | {"enable_adaptive_verification": True})
        return files


def _launch(inputs: EngineInputs, adaptive: bool) -> bytes:
    return launch_script(
        inputs,
        about=[
            f"Serve {inputs.target.name} with its {_NAMES[inputs.drafter.kind]} drafter in vLLM {VERSION}.",
            "dspark wrote this script by the released formats and has NOT run it: no vLLM was at hand.",
            "The drafter runs unquantised (the configuration names no quantisation), in the target's dtype.",
            "Further arguments go to vLLM: bash launch.sh --port 8000",
            *(_about_adaptive(inputs) if adaptive else _about_fixed(inputs)),
        ],
        environment=None,
        target_flag=[],
        command=["vllm", "serve"],
        arguments=[("--dtype", inputs.target.dtype)],
        preparation=CHOICE if adaptive else _FIXED,
        raw_arguments=['--speculative-config "$(cat -- "$config")"'],
    )


CHOICE = [
    'case "${DSPARK_ADAPTIVE:-0}" in',
    f"  0) config={FIXED_FILE} ;;",
    f"  1) config={ADAPTIVE_FILE} ;;",
    '  *) echo "DSPARK_ADAPTIVE is 0 (whole blocks) or 1 (adaptive verification)" >&2; exit 2 ;;',
    "esac",
]
_FIXED = [
    f"config={FIXED_FILE}",
    'if [ "${DSPARK_ADAPTIVE:-0}" != 0 ]; then',
    '  echo "vLLM does not verify adaptively with this drafter or on this family of targets" >&2; exit 2',
    "fi",
]


def _about_fixed(inputs: EngineInputs) -> list[str]:
    if inputs.drafter.kind == "eagle3":
        return [
            "Whole chains are verified. Whether vLLM verifies chains of EAGLE-3 adaptively is not known.",
            f"It is a drafter of vLLM {VERSION}'s class for EAGLE-3 with Qwen3 layers, whatever its target's family.",
        ]
    family = inputs.drafter.target_model_type
    return [f"Whole blocks are verified. vLLM refuses adaptive verification on {family} targets: they keep a state."]


def _about_adaptive(inputs: EngineInputs) -> list[str]:
    return [
        "Whole blocks are verified. DSPARK_ADAPTIVE=1 bash launch.sh verifies as much of each block as pays by costs",
        *_about_confidences(inputs),
        "vLLM refuses it with LoRA, pipeline parallelism, CUDA graphs that are not full, batch-sharded sampling,",
        "returned sampling masks, --enable-return-routed-experts, and FlashInfer outside SM100's trtllm-gen.",
        "Under it the counters num_accepted_tokens_per_pos over num_drafts understate late positions: what was drafted",
        "at each is not exported. Measure it against whole blocks under your load.",
    ]


def _about_confidences(inputs: EngineInputs) -> list[str]:
    """What adaptive verification goes by."""
    if not inputs.drafter.confidence:
        return [
            "that vLLM measures when it starts, and by an estimate that it makes while it serves, from how sure the",
            "drafts are and what became of them: this drafter has no confidence head.",
        ]
    return [
        "that vLLM measures when it starts, and by the drafter's confidences as the head's bare sigmoid gives them:",
        _about_temperatures(inputs),
        "A confidence head can do worse than vLLM's own estimate, which it uses for a drafter whose config.json says",
        "enable_confidence_head: false.",
    ]


def _about_temperatures(inputs: EngineInputs) -> str:
    """What the missing temperatures mean for this drafter (package.md, rule 11)."""
    try:
        calibration = calibration_for(inputs.scheduler.calibrations, inputs.sampling_temperature)
    except CalibrationError as reason:
        return f"whether they need a temperature is not known, {reason.message}."
    least, most = min(calibration.temperatures), max(calibration.temperatures)
    where = f"the calibration made at {calibration}"
    if least == most == 1:
        return f"{where} left them as they are, so nothing is lost."
    if least == most:
        return (
            f"{where} divides all logits by {least:g}. vLLM has no setting for that, but one number for all positions "
            f"can be folded in: divide weight and bias of confidence_head.proj by {least:g}."
        )
    return (
        f"{where} divides the logits by {least:g} to {most:g}, another one at each position, for which vLLM has no "
        "setting and which cannot be folded into the weights."
    )
