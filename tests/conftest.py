"""What tests of several rooms need."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
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
