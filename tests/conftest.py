"""What tests of several rooms need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dspark import processor


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
