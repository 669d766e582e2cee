"""How fast this machine multiplies matrices and copies memory, measured in a few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from dspark.config.models import DType
from dspark.profiling.estimate import Job, Rates

SECONDS = 0.7  # per measurement, warm-up not counted
_MOST = 8192  # rows and columns of a measured product: larger ones are no faster
_COPIED = 256 << 20  # bytes: no processor's cache holds them


def measure_rates(job: Job, seconds: float = SECONDS) -> Rates:
    """Rates of products of the target's states with a matrix of its feed-forward network, and of copies.

    Args:
        job: says where and in which dtypes the stages compute.
        seconds: per measurement; there are two per device and dtype.
    """
    rows = job.longest if job.device == "cpu" else job.corpus.features.batch_tokens
    shape = tuple(min(size, _MOST) for size in (max(rows, 64), job.shape.hidden_size, job.shape.intermediate_size))
    device, training = torch.device(job.device), torch.device(job.training_device)
    flops = _product_rate(device, job.dtype, shape, seconds)
    copied = _copy_rate(device, seconds)
    if (device, job.dtype) == (training, job.precision):
        return Rates(flops, flops, copied, copied)
    other = copied if device == training else _copy_rate(training, seconds)
    return Rates(flops, _product_rate(training, job.precision, shape, seconds), copied, other)


def _product_rate(device: torch.device, dtype: DType, shape: tuple[int, ...], seconds: float) -> float:
    rows, width, inner = shape
    one = torch.ones(rows, width, device=device, dtype=getattr(torch, dtype))
    other = torch.ones(width, inner, device=device, dtype=getattr(torch, dtype))
    out = torch.empty(rows, inner, device=device, dtype=getattr(torch, dtype))
    return 2 * rows * width * inner * _per_second(lambda: torch.mm(one, other, out=out), device, seconds)


def _copy_rate(device: torch.device, seconds: float) -> float:
    source = torch.ones(_COPIED, dtype=torch.uint8, device=device)
    sink = torch.ones(_COPIED, dtype=torch.uint8, device=device)
    return 2 * _COPIED * _per_second(lambda: sink.copy_(source), device, seconds)


def _per_second(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """How often `work` is done in a second: the best of five parts of the time, for others use the machine too."""
    best = 0.0
    _timed(work, device, 1)
    once = max(_timed(work, device, 1), 1e-7)
    times = max(1, int(seconds / 5 / once))
    for _ in range(5):
        best = max(best, times / max(_timed(work, device, times), 1e-7))
    return best


def _timed(work: Callable[[], object], device: torch.device, times: int) -> float:
    started = time.perf_counter()
    for _ in range(times):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
