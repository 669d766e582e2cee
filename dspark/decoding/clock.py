"""The time at which a device has done what it was told: a GPU is told ahead of what it does."""

from __future__ import annotations

import time

import torch


def now(device: torch.device) -> float:
    """Seconds of a clock that only differences of mean anything, once all work of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
