"""vLLM: speculative configuration and launch script as release 0.32.0 reads them (engine-formats.md, section 2).

vLLM takes no temperatures and no cost table: it profiles its own costs at start-up and applies the confidence head's
bare sigmoid. The files therefore ask for fixed verification of the whole block, the setting that needs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dspark.engines.base import EngineInputs, json_bytes, launch_script, require_support

if TYPE_CHECKING:
    from dspark.drafters.config import DrafterConfig

VERSION = "0.32.0"
# Families with vLLM's interface for auxiliary hidden states, by transformers' model_type.
TARGETS = frozenset(
    [
        *("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_vl", "gemma4"),
        *("gemma4_text", "gpt_oss", "mistral3", "granite", "deepseek_v2", "deepseek_v3", "nemotron_h", "apertus"),
        *("cohere2_moe", "minicpm"),
    ]
)


class VLLMEngine:
    """Adapter of vLLM."""

    name = "vllm"

    def supports(self, config: DrafterConfig) -> str | None:
        """Why vLLM cannot serve such a drafter, or None."""
        if config.markov_type != "vanilla":
            return f"vLLM {VERSION} reads only vanilla Markov heads, this one is {config.markov_type!r}"
        if config.target_model_type not in TARGETS:
            return f"vLLM {VERSION} hands out no hidden states of {config.target_model_type!r} targets"
        return None

    def files(self, inputs: EngineInputs) -> dict[str, bytes]:
        """`speculative_config.json` and `launch.sh`.

        Raises:
            SettingsError: the head or the target's family is not served.
        """
        require_support(self, inputs.drafter)
        # Unknown keys are refused by vLLM, so nothing of ours travels in this file.
        config = {
            "method": "dspark",
            "model": "../../drafter",
            "num_speculative_tokens": inputs.drafter.gamma,
            "draft_sample_method": "greedy",
            "rejection_sample_method": "standard",
            "enable_adaptive_verification": False,
        }
        launch = launch_script(
            inputs,
            about=[
                f"Serve {inputs.target.name} with its DSpark drafter in vLLM {VERSION}.",
                "dspark wrote this script by the released formats and has NOT run it: no vLLM was at hand.",
                "Whole blocks are verified. vLLM's adaptive verification would apply the confidence head without the",
                "calibration's temperatures, for which it has no setting.",
                "The drafter runs unquantised (speculative_config.json names no quantisation), in the target's dtype.",
                "Further arguments go to vLLM: bash launch.sh --port 8000",
            ],
            environment=None,
            target_flag=[],
            command=["vllm", "serve"],
            arguments=[("--dtype", inputs.target.dtype)],
            raw_arguments=['--speculative-config "$(cat speculative_config.json)"'],
        )
        return {"speculative_config.json": json_bytes(config), "launch.sh": launch}
