"""Hand-written derivatives of the backbone's element-wise parts, for training.

Autograd keeps and re-reads an intermediate result for every multiplication; on a CPU that costs more than the matrix
products. Each function here equals a plain one of `backbone` or `attention`, which stays the definition and is what
inference and export run; rows are taken a few at a time, so that intermediate results stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CHUNK = 1 << 17  # elements at a time, half a megabyte in float32


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x / rms(x) * weight over the last axis, in `dtype`."""
    with torch.autocast(x.device.type, enabled=False):
        result: Tensor = _RMSNorm.apply(x, weight, eps, dtype)  # type: ignore[no-untyped-call]
    return result


def norm_rotate(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Per-head RMS norm and RoPE.

    Args:
        x: [B, T, heads, hd].
        cos, sin: [B, T, hd / 2].
    Returns:
        [B, heads, T, hd] in the dtype of x.
    """
    with torch.autocast(x.device.type, enabled=False):
        result: Tensor = _NormRotate.apply(x, weight, eps, cos, sin)  # type: ignore[no-untyped-call]
    return result


def attend(
    queries: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    block_keys: Tensor,
    block_values: Tensor,
    hidden: Tensor,
) -> Tensor:
    """Attention of blocks over a shared context and themselves.

    Args:
        queries: scaled already, [B, kv, N, G, hd] with G = query heads per kv head times slots.
        context_keys, context_values: [B, kv, S, hd].
        block_keys, block_values: [B, kv, N, K, hd].
        hidden: context positions that a block does not see, bool [B, N, S].
    Returns:
        [B, kv, N, G, hd].
    """
    with torch.autocast(queries.device.type, enabled=False):
        result: Tensor = _Attend.apply(  # type: ignore[no-untyped-call]
            queries, context_keys, context_values, block_keys, block_values, hidden
        )
    return result


def _chunks(rows: int, width: int, device: torch.device) -> Iterator[slice]:
    step = max(1, CHUNK // width) if device.type == "cpu" else max(1, rows)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _reciprocal_rms(x: Tensor, eps: float) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _norm_gradient(gradient: Tensor, normed: Tensor, reciprocal: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of y = normed * weight with normed = x * reciprocal: of x (in place of `gradient`), and of weight."""
    product = gradient * normed
    flat = product.reshape(-1, product.shape[-1])
    d_weight = flat.sum(0)
    mean = torch.mv(flat, weight).div_(product.shape[-1]).view(reciprocal.shape)
    return gradient.mul_(weight).addcmul_(normed, mean, value=-1).mul_(reciprocal), d_weight


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        flat, flat_out = x.reshape(-1, x.shape[-1]), out.view(-1, x.shape[-1])
        reciprocal = torch.empty(len(flat), 1, device=x.device)
        for rows in _chunks(len(flat), flat.shape[1], x.device):
            reciprocal[rows] = _reciprocal_rms(flat[rows], eps)
            flat_out[rows] = (flat[rows] * reciprocal[rows]).mul_(weight)
        ctx.save_for_backward(flat, reciprocal, weight)
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        flat, reciprocal, weight = ctx.saved_tensors
        gradient = upstream.reshape(flat.shape)
        d_x, d_weight = torch.empty_like(flat), torch.zeros_like(weight)
        for rows in _chunks(len(flat), flat.shape[1], flat.device):
            normed = flat[rows] * reciprocal[rows]
            wide = gradient[rows].to(torch.float32, copy=True)
            d_x[rows], part = _norm_gradient(wide, normed, reciprocal[rows], weight)
            d_weight += part
        return d_x.view(upstream.shape), d_weight, None, None


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, heads, size = x.shape
        out = torch.empty(batch, heads, length, size, dtype=x.dtype, device=x.device)
        reciprocal = torch.empty(batch, length, heads, 1, device=x.device)
        for row, steps in _stretches(x):
            part = (row, steps)
            reciprocal[part] = _reciprocal_rms(x[part], eps)
            turned = _turn((x[part] * reciprocal[part]).mul_(weight), cos[part], sin[part])
            out[row, :, steps] = turned.transpose(1, 2)
        ctx.save_for_backward(x, reciprocal, weight, cos, sin)
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, reciprocal, weight, cos, sin = ctx.saved_tensors
        d_x, d_weight = torch.empty_like(x), torch.zeros_like(weight)
        for row, steps in _stretches(x):
            part = (row, steps)
            turned = upstream[row, :, steps].transpose(1, 2).to(torch.float32, copy=True)
            gradient = _turn(turned, cos[part], -sin[part])  # the inverse rotation
            normed = x[part] * reciprocal[part]
            d_x[part], own = _norm_gradient(gradient, normed, reciprocal[part], weight)
            d_weight += own
        return d_x, d_weight, None, None, None


def _stretches(x: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows and positions of x [B, T, ...] to take together: a part of one row, since packed batches have only one."""
    for row in range(x.shape[0]):
        for steps in _chunks(x.shape[1], x.shape[2:].numel(), x.device):
            yield slice(row, row + 1), steps


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x [B, T, heads, hd] by cos and sin [B, T, hd / 2]."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    first, second = x.chunk(2, dim=-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    half = x.shape[-1] // 2
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        context_keys: Tensor,
        context_values: Tensor,
        block_keys: Tensor,
        block_values: Tensor,
        hidden: Tensor,
    ) -> Tensor:
        batch, kv, blocks, group, size = queries.shape
        length = context_keys.shape[2]
        flat = queries.view(batch, kv, blocks * group, size)
        shape = (batch, kv, blocks, group, length + block_keys.shape[3])
        weights = torch.empty(shape, dtype=queries.dtype, device=queries.device)
        on_context, on_block = weights[..., :length], weights[..., length:]
        on_context.copy_(torch.matmul(flat, context_keys.transpose(-1, -2)).view(on_context.shape))
        on_context.masked_fill_(hidden[:, None, :, None, :], -torch.inf)
        on_block.copy_(torch.matmul(queries, block_keys.transpose(-1, -2)))
        weights = torch.softmax(weights, dim=-1)
        on_context = weights[..., :length].reshape(batch, kv, blocks * group, length)
        mixed = torch.matmul(on_context, context_values).view(queries.shape)
        mixed += torch.matmul(weights[..., length:], block_values)
        ctx.save_for_backward(queries, context_keys, context_values, block_keys, block_values, weights)
        return mixed

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        queries, context_keys, context_values, block_keys, block_values, weights = ctx.saved_tensors
        batch, kv, blocks, group, size = queries.shape
        length = context_keys.shape[2]
        upstream = upstream.contiguous()
        rows = (batch, kv, blocks * group)
        flat_upstream, flat_queries = upstream.view(*rows, size), queries.view(*rows, size)
        on_context, on_block = weights[..., :length].reshape(*rows, length), weights[..., length:]
        d_context_values = torch.matmul(on_context.transpose(-1, -2), flat_upstream)
        d_block_values = torch.matmul(on_block.transpose(-1, -2), upstream)
        scores = torch.empty_like(weights)
        scores[..., :length] = torch.matmul(flat_upstream, context_values.transpose(-1, -2)).view(
            *weights.shape[:-1], length
        )
        scores[..., length:] = torch.matmul(upstream, block_values.transpose(-1, -2))
        scores = torch._softmax_backward_data(scores, weights, -1, weights.dtype)
        d_context, d_block = scores[..., :length].reshape(*rows, length), scores[..., length:]
        d_queries = torch.matmul(d_context, context_keys).view(queries.shape)
        d_queries += torch.matmul(d_block, block_keys)
        d_context_keys = torch.matmul(d_context.transpose(-1, -2), flat_queries)
        d_block_keys = torch.matmul(d_block.transpose(-1, -2), queries)
        return d_queries, d_context_keys, d_context_values, d_block_keys, d_block_values, None
