"""What a package holds for llama.cpp: the drafter's GGUF file, which the export makes, and how to launch it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dspark.engines.base import EngineInputs, launch_script, require_support

if TYPE_CHECKING:
    from dspark.drafters.config import DrafterConfig

DRAFTER = "drafter.gguf"
# Families whose graphs hand out the inputs of their layers (llama.cpp b11434), by transformers' model_type.
TARGETS = frozenset(
    [
        *("llama", "mistral", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_text", "gemma4", "gemma4_text"),
        *("gpt_oss", "lfm2", "nemotron_h"),
    ]
)


class LlamaCppEngine:
    """Adapter of llama.cpp."""

    name = "llamacpp"

    def supports(self, config: DrafterConfig) -> str | None:
        """Why llama.cpp cannot run such a drafter, or None."""
        if config.kind != "dspark":
            return f"no file is written for llama.cpp of a drafter of kind {config.kind!r}"
        if config.markov_type != "vanilla":
            return f"llama.cpp reads only vanilla Markov heads, this one is {config.markov_type!r}"
        if config.layer_style != "qwen3":
            return f"llama.cpp's format has no names for the norms of {config.style.name}'s layers"
        if config.attention_bias:
            return "llama.cpp's drafters have no biases in attention, this one has"
        if config.rope["rope_type"] != "default":
            return f"its RoPE is of type {config.rope['rope_type']!r}, only unscaled RoPE is written"
        if config.target_model_type not in TARGETS:
            return f"llama.cpp hands out no hidden states of {config.target_model_type!r} targets"
        return None

    def files(self, inputs: EngineInputs) -> dict[str, bytes]:
        """`launch.sh`; `drafter.gguf` comes from the export.

        Raises:
            SettingsError: a drafter that llama.cpp cannot run.
        """
        require_support(self, inputs.drafter)
        return {"launch.sh": _launch(inputs)}


_P_MIN = {
    True: "threshold(p) for --spec-draft-p-min p.",
    False: "and --spec-draft-p-min stays 0: it needs a confidence head, which this drafter does not have.",
}


def _launch(inputs: EngineInputs) -> bytes:
    return launch_script(
        inputs,
        about=[
            f"Serve {inputs.target.name} with its DSpark drafter in llama.cpp's server (DSPARK_TARGET: its GGUF file).",
            "First see `recommended` in certificate.json: a policy `none` there says that at this load the server is",
            "faster without the drafter, so leave --model-draft and the lines behind it out. fixed(k) stands for",
            f"--spec-draft-n-max k, {_P_MIN[inputs.drafter.confidence]} What was certified is the server of the",
            "wheel xllamacpp, by its Python interface; this script was not run. It needs a llama.cpp that has",
            "draft-dspark (b11434 or later). Further arguments go to it: bash launch.sh --port 8080",
        ],
        environment=None,
        target_flag=["--model"],
        only_file="llama.cpp serves GGUF files: set DSPARK_TARGET to that of the target",
        command=["llama-server"],
        arguments=[
            ("--model-draft", DRAFTER),
            ("--spec-type", "draft-dspark"),
            ("--spec-draft-n-max", str(inputs.drafter.gamma)),  # its default is 3, whatever the drafter's block size
            ("--spec-draft-p-min", "0"),
            ("--metrics",),
        ],
    )
