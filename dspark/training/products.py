"""Matrix products of training in float32, or of factors that are rounded to bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


class Multiplier:
    """Matrix products in float32, or in bfloat16 with float32 results where logits need them.

    A logit of 20 rounded to bfloat16 is off by up to 0.06, its probability by 6 %: only the factors are rounded.
    """

    def __init__(self, low_precision: bool, device: torch.device) -> None:
        self.low_precision = low_precision
        self.on_cpu = device.type == "cpu"

    def wide(self, x: Tensor) -> Tensor:
        """A factor of `logits`."""
        return x.bfloat16() if self.low_precision and not self.on_cpu else x.float()

    def narrow(self, x: Tensor) -> Tensor:
        """A factor of an ordinary product."""
        return x.bfloat16() if self.low_precision else x.float()

    def logits(self, states: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """states @ rows.T of two factors made by `wide`, float32 [M, V]; written to `out` if it is given."""
        if self.low_precision and not self.on_cpu:
            product = torch.mm(states, rows.t(), out_dtype=torch.float32)
            return product if out is None else out.copy_(product)
        with _bfloat16_factors() if self.low_precision else nullcontext():
            return torch.mm(states, rows.t(), out=out)


@contextmanager
def _bfloat16_factors() -> Iterator[None]:
    """Let oneDNN round the factors of float32 products to bfloat16 (a process-wide switch, put back at the end)."""
    switch: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = switch.fp32_precision
    switch.fp32_precision = "bf16"
    try:
        yield
    finally:
        switch.fp32_precision = before
