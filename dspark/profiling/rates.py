"""How fast this machine runs a layer, multiplies matrices and copies memory, measured in a few seconds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from dspark.config.models import DType
from dspark.decoding.clock import now
from dspark.profiling.estimate import Job, Rates

SECONDS = 0.7  # per measurement, warm-up not counted
_MOST = 8192  # rows and columns of a measured product: larger ones are no faster
_COPIED = 256 << 20  # bytes: no processor's cache holds them


def measure_rates(job: Job, seconds: float = SECONDS) -> Rates:
    """Rates of a decoder layer of the target's widths with random weights, of bare products, and of copies.

    Args:
        job: says where and in which dtypes the stages compute, and how many tokens share a pass.
        seconds: per measurement; there are three, and a fourth where training has a device of its own.
    """
    device, training = torch.device(job.device), torch.device(job.training_device)
    rows = job.sequence_tokens if job.device == "cpu" else job.corpus.features.batch_tokens
    rows = min(max(rows, 16), _MOST)
    flops = _layer_rate(device, job.dtype, job, rows, seconds)
    copied = _copy_rate(device, seconds)
    inner = min(job.shape.intermediate_size, _MOST)
    products = _product_rate(training, job.precision, (rows, min(job.shape.hidden_size, _MOST), inner), seconds)
    return Rates(flops, products, copied, copied if device == training else _copy_rate(training, seconds))


@torch.no_grad()
def _layer_rate(device: torch.device, dtype: DType, job: Job, rows: int, seconds: float) -> float:
    """Of norms, attention and feed-forward network on one sequence: what is counted are products of weights alone."""
    layer, d = job.shape.layers[-1], job.shape.hidden_size
    inner = layer.intermediate_size or layer.experts_per_token * layer.expert_size
    queries, keys = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    made = {"device": device, "dtype": getattr(torch, dtype)}
    states = torch.randn(1, rows, d, **made)
    weights = [(d, queries), (d, keys), (d, keys), (queries, d), (d, inner), (d, inner), (inner, d)]
    q, k, v, o, gate, up, down = (torch.randn(above, below, **made) * below**-0.5 for below, above in weights)
    linear = functional.linear  # of weights as transformers lays them out
    turn = torch.randn(rows, layer.head_dim, **made)

    def norm(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def heads(x: torch.Tensor, count: int) -> torch.Tensor:
        return x.view(1, rows, count, layer.head_dim).transpose(1, 2)

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * turn + torch.cat([-second, first], dim=-1) * turn

    def work() -> None:
        x = norm(states)
        mixed = functional.scaled_dot_product_attention(
            turned(heads(linear(x, q), layer.heads)),
            turned(heads(linear(x, k), layer.kv_heads)),
            heads(linear(x, v), layer.kv_heads),
            is_causal=True,
            enable_gqa=True,
        )
        x = states + linear(mixed.transpose(1, 2).reshape(1, rows, queries), o)
        normed = norm(x)
        x + linear(functional.silu(linear(normed, gate)) * linear(normed, up), down)

    return 2 * rows * sum(below * above for below, above in weights) * _per_second(work, device, seconds)


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
    started = now(device)
    for _ in range(times):
        work()
    return now(device) - started
