"""What time it is, for those who measure: when a device has done what it was told, and a clock that can be replaced."""

from __future__ import annotations

import time
from typing import Protocol

import torch


def now(device: torch.device) -> float:
    """Seconds of a clock that only differences of mean anything, once all work of the device is done."""
    if device.type == "cuda":
        # A GPU is told ahead of what it does.
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Clock(Protocol):
    """Where time comes from in what waits for it."""

    def now(self) -> float:
        """Seconds; only differences mean anything."""
        ...

    def wait(self, seconds: float) -> None:
        """Let so much time pass."""
        ...


class WallClock:
    """Real time, as a device's work takes it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> float:
        """See `Clock`."""
        return now(self._device)

    def wait(self, seconds: float) -> None:
        """See `Clock`."""
        time.sleep(max(seconds, 0.0))
