"""Drawing the next token: temperature, then top-k, then top-p, in float32, by inverting the distribution function.

One uniform number decides one token, so whoever hands out the numbers decides how draws are tied to requests.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dspark.config.models import Sampling

# exp below this is a denormal number or nearly one: a hundred times slower, and lost in any sum with a 1 in it.
_LEAST_EXPONENT = -80.0
# Nuclei rarely hold more tokens; a row whose nucleus does is sorted in full.
_NUCLEUS_GUESS = 64
_CHUNK = 256


def draw(logits: Tensor, sampling: Sampling, uniforms: Tensor) -> Tensor:
    """One token per row.

    Args:
        logits: [B, V], any float dtype.
        sampling: temperature 0 takes the most likely token.
        uniforms: one number in [0, 1) per row, float64 [B]; not looked at at temperature 0.
    Returns:
        token ids, int64 [B].
    """
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    vocab = logits.shape[-1]
    if 0 < sampling.top_k < vocab:
        values, ids = logits.topk(sampling.top_k, dim=-1)
        return _draw_nucleus(_weights(values, sampling.temperature), ids, sampling.top_p, uniforms)
    weights = _weights(logits, sampling.temperature)
    if sampling.top_p == 1:
        return _draw_full(weights, uniforms)
    # The most likely tokens hold the nucleus if they hold its mass; where they do not, all are sorted.
    guess = min(_NUCLEUS_GUESS, vocab)
    total = weights.sum(dim=-1).double()
    values, ids = weights.topk(guess, dim=-1)
    tokens = _draw_nucleus(values, ids, sampling.top_p, uniforms, total)
    wide = (values.sum(dim=-1, dtype=torch.float64) < sampling.top_p * total).nonzero()[:, 0]
    if wide.numel():
        values, ids = weights[wide].sort(dim=-1, descending=True)
        tokens[wide] = _draw_nucleus(values, ids, sampling.top_p, uniforms[wide])
    return tokens


def log_normaliser(logits: Tensor) -> Tensor:
    """logsumexp over the vocabulary of the float32 cast of `logits`, [.., V] -> float32 [..].

    The same to rounding as `logits.float().logsumexp(-1)`, several times faster on a CPU: no temporaries, no denormals.
    """
    shifted = logits.to(torch.float32, copy=True)
    largest = shifted.amax(dim=-1, keepdim=True)
    weights = shifted.sub_(largest).clamp_(min=_LEAST_EXPONENT).exp_()
    return weights.sum(dim=-1).log_() + largest[..., 0]


def _weights(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) times a constant per row: the most likely token weighs 1."""
    scaled = logits.to(torch.float32, copy=True).mul_(1 / temperature)
    weights = scaled.sub_(scaled.amax(dim=-1, keepdim=True)).clamp_(min=_LEAST_EXPONENT).exp_()
    return torch.nn.functional.threshold(weights, 2 * math.exp(_LEAST_EXPONENT), 0.0, inplace=True)


def _draw_nucleus(weights: Tensor, ids: Tensor, top_p: float, uniforms: Tensor, total: Tensor | None = None) -> Tensor:
    """Draw from the shortest prefix of the descending `weights` [B, k] that holds `top_p` of `total` [B] -> [B]."""
    weights = weights.double()
    cumulative = weights.cumsum(dim=-1)
    whole = cumulative[:, -1:] if total is None else total[:, None]
    nucleus = torch.where(cumulative - weights < top_p * whole, weights, 0.0).cumsum(dim=-1)
    return ids.gather(-1, _invert(nucleus, uniforms)[:, None])[:, 0]


def _draw_full(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from the whole vocabulary in two levels, so that no sum over it loses precision; [B, V] -> [B]."""
    rows, vocab = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -vocab % _CHUNK)).view(rows, -1, _CHUNK)
    chunks = padded.sum(dim=-1).double().cumsum(dim=-1)
    chunk = _invert(chunks, uniforms)[:, None]
    below = torch.where(chunk > 0, chunks.gather(-1, (chunk - 1).clamp(min=0)), 0.0)
    inside = padded[torch.arange(rows, device=weights.device), chunk[:, 0]].double().cumsum(dim=-1)
    # What is left of the uniform number within its chunk, in units of the chunk's weight.
    rest = (uniforms[:, None] * chunks[:, -1:] - below) / inside[:, -1:]
    return chunk[:, 0] * _CHUNK + _invert(inside, rest[:, 0].clamp(0.0, 1.0))


def _invert(cumulative: Tensor, uniforms: Tensor) -> Tensor:
    """The first index whose cumulative weight exceeds u times the total, so never one without weight; float64, [B]."""
    total = cumulative[:, -1:]
    point = (uniforms[:, None] * total).minimum(torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, point, right=True)[:, 0]
