from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dspark import processor
from dspark.processor import arithmetic


@pytest.fixture
def cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(processor, "_CPUINFO", path)
    return path


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags : sse avx2 fma f16c", "float32"),
        ("flags : avx2 avx512f avx512bw avx512vl", "float32"),  # emulated by two products
        ("flags : avx2 avx512f avx512_bf16", "bfloat16"),
        ("flags : avx512f amx_bf16 amx_tile amx_int8", "bfloat16"),
        ("Features : fp asimd", "float32"),
        ("Features : fp asimd bf16 i8mm", "bfloat16"),
        ("flags : avx512_bf16x", "float32"),
    ],
)
def test_bfloat16_is_computed_where_the_processor_multiplies_it(cpuinfo: Path, line: str, expected: str):
    cpuinfo.write_text(f"processor : 0\nmodel name : X\n{line}\n\nprocessor : 1\nflags : avx512_bf16\n")
    assert arithmetic("bfloat16") == expected
    assert arithmetic("bfloat16", "cuda") == "bfloat16"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes_are_left_alone(cpuinfo: Path, dtype: str):
    cpuinfo.write_text("flags : sse\n")
    assert arithmetic(dtype) == dtype  # type: ignore[arg-type]


def test_without_a_description_of_the_processor_float32_is_computed(cpuinfo: Path):
    assert arithmetic("bfloat16") == "float32"


def test_torch_says_the_same_of_this_processor():
    capable = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    assert (arithmetic("bfloat16") == "bfloat16") == bool(capable)
