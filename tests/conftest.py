"""What tests of several rooms need."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from dspark import processor

if TYPE_CHECKING:
    from dspark.targets.loading import Target

# What is expected to the bit is what a CPU computes; whoever has a GPU may ask for it.
os.environ.setdefault("DSPARK_DEVICE", "cpu")
# How long an example takes says something of the machine, not of dspark.
hypothesis.settings.register_profile("dspark", deadline=None)
hypothesis.settings.load_profile("dspark")


@pytest.fixture(scope="session")
def ascii_tokens() -> Callable[[Path, int], Path]:
    """Writes a vocabulary whose every token is ASCII: llama.cpp refuses to answer with bytes that are no UTF-8."""
    from dspark.io.gguffile import Key, write_gguf

    def write(path: Path, count: int) -> Path:
        keys = {
            "general.architecture": Key("llama", "STRING"),
            "tokenizer.ggml.model": Key("gpt2", "STRING"),
            "tokenizer.ggml.pre": Key("gpt-2", "STRING"),
            "tokenizer.ggml.tokens": Key([f"t{number}" for number in range(count)], "STRING"),
            "tokenizer.ggml.token_type": Key([3] * 4 + [1] * (count - 4), "INT32"),
            "tokenizer.ggml.merges": Key(["Ā Ā"], "STRING"),
            "tokenizer.ggml.bos_token_id": Key(1, "UINT32"),
            "tokenizer.ggml.eos_token_id": Key(2, "UINT32"),
            "tokenizer.ggml.add_bos_token": Key(False, "BOOL"),
        }
        write_gguf(path, keys, {})
        return path

    return write


@pytest.fixture
def processor_flags(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Call it with the instruction sets that this processor shall be taken to have."""
    path = tmp_path_factory.mktemp("proc") / "cpuinfo"
    monkeypatch.setattr(processor, "_CPUINFO", path)

    def pretend(flags: str) -> None:
        path.write_text(f"flags : {flags}\n")

    return pretend


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of so many bytes; where that is not allowed the test is skipped, and says so."""
    mounted: list[Path] = []

    def mount(size: int) -> Path:
        folder = tmp_path / f"disk {len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("file systems cannot be mounted here")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


_WINDOWS = ["sliding_attention", "full_attention", "full_attention"]
_GEMMA4: dict[str, Any] = {
    "layer_types": _WINDOWS,
    "sliding_window": 5,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 4.0,
}
_GEMMA4_TEXT: dict[str, Any] = {**_GEMMA4, "hidden_size_per_layer_input": 0}
# One tiny model for each way in which supported families differ: its type, and what is particular about it.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral with a window": ("mistral", {"sliding_window": 5}),
    "olmo2": ("olmo2", {}),
    "qwen2 with windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "layer_types": _WINDOWS}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "smollm3": ("smollm3", {}),
    "gemma4_text": ("gemma4_text", _GEMMA4_TEXT),
    "gemma4_unified_text": ("gemma4_unified_text", _GEMMA4),
    # As the small ones: embeddings for each layer, and a last layer that attends to what an earlier one keeps.
    "gemma4 with layer embeddings": (
        "gemma4_text",
        {
            **_GEMMA4,
            "attention_k_eq_v": False,
            "num_kv_shared_layers": 1,
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": 40,
        },
    ),
    "gemma4 with experts": (
        "gemma4_text",
        {**_GEMMA4_TEXT, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
    ),
}


@pytest.fixture(scope="session", params=FAMILIES)
def family_target(request: pytest.FixtureRequest) -> Target:
    """A tiny random target of each family, vocabulary 40, with windows of 5 positions where the family has windows."""
    from dspark.evaluation.tiny import tiny_target

    family, changes = FAMILIES[request.param]
    return tiny_target(40, family=family, spread=0.3, changes=changes)
