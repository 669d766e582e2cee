"""The processor that this process runs on, and what it can multiply. Read without loading any library."""

from __future__ import annotations

import platform
from pathlib import Path

from dspark.config.models import DType

_CPUINFO = Path("/proc/cpuinfo")
# Products of bfloat16 in hardware, by Linux's names of it on x86 and on Arm.
_BFLOAT16 = frozenset(["avx512_bf16", "amx_bf16", "amx_tile", "bf16", "svebf16"])


def processor() -> tuple[str, list[str]]:
    """Model name and sorted instruction set flags of the first processor."""
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or "unknown", []
    fields: dict[str, str] = {}
    for line in text.split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags", fields.get("Features", ""))
    return fields.get("model name") or platform.processor() or "unknown", sorted(flags.split())


def arithmetic(dtype: DType, device: str = "cpu") -> DType:
    """The dtype to compute in where `dtype` was asked for.

    A processor without bfloat16 products emulates them, eight times slower than float32 (measured on a Zen 3), and all
    that is gained is coarser rounding. So there float32 is computed with the very same weights; whoever reports a dtype
    asks the tensors.

    Args:
        device: torch's type of it; anything but `cpu` is taken to multiply what it is asked to.
    """
    if dtype == "bfloat16" and device == "cpu" and _BFLOAT16.isdisjoint(processor()[1]):
        return "float32"
    return dtype
