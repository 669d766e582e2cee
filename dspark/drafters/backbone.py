"""The parallel backbone: Qwen3 layers whose keys and values hold the target's context beside the block.

Queries come from the block only. The projected context C enters every layer's k_proj and v_proj as it is (it has its
own norm, `hidden_norm`); the block's states pass the layer's input norm first (DFlash; deepspec.md, section 1.2).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from dspark.drafters import fused
from dspark.drafters.attention import attend
from dspark.drafters.config import DrafterConfig

Pair = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, computed in float32, returned in the dtype of x.

    Args:
        before_products: only matrix products read the output, so under autocast it may have their dtype.
    """

    def __init__(self, size: int, eps: float, *, before_products: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.before_products = before_products

    def forward(self, x: Tensor) -> Tensor:
        """Norm of x, [..., size]."""
        if torch.is_grad_enabled() and self.weight.requires_grad:
            kind = x.device.type
            narrow = self.before_products and torch.is_autocast_enabled(kind)
            dtype = torch.get_autocast_dtype(kind) if narrow else x.dtype
            return fused.rms_norm(x, self.weight, self.eps, dtype)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight.float()).to(x.dtype)


class Rotary:
    """Cosines and sines of the target's RoPE; frequencies stay in float32 whatever the drafter's dtype."""

    def __init__(self, config: DrafterConfig) -> None:
        self.frequencies, self.scaling = inverse_frequencies(config)  # [head_dim / 2]

    def __call__(self, positions: Tensor) -> Pair:
        """cos and sin of absolute positions [...], float32 [..., head_dim / 2]."""
        # bfloat16 has no 4097: the angle must be formed in float32.
        angles = positions.float().unsqueeze(-1) * self.frequencies.to(positions.device)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


def inverse_frequencies(config: DrafterConfig) -> tuple[Tensor, float]:
    """RoPE frequencies, float32 [head_dim / 2], and the factor on cos and sin.

    The default type is theta^(-2i / head_dim); the others are transformers' own functions, as the target uses them.
    """
    theta = float(config.rope["rope_theta"])
    if config.rope["rope_type"] == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / theta**exponents, 1.0
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    described = Qwen3Config(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position,
        rope_parameters=dict(config.rope),
    )
    frequencies, scaling = ROPE_INIT_FUNCTIONS[config.rope["rope_type"]](described, torch.device("cpu"))
    return frequencies.float(), float(scaling)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + hd/2) of x [..., hd] by angles given as cos and sin, broadcast over [..., hd / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Attention of one draft layer: per-head RMS norms on queries and keys, grouped queries, not causal."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        size, bias = config.head_dim, config.attention_bias
        self.heads, self.kv, self.size = config.num_attention_heads, config.num_key_value_heads, size
        self.q_proj = nn.Linear(config.hidden_size, self.heads * size, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, self.kv * size, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, self.kv * size, bias=bias)
        self.o_proj = nn.Linear(self.heads * size, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(size, config.rms_norm_eps)
        self.k_norm = RMSNorm(size, config.rms_norm_eps)

    def keys_values(self, x: Tensor, rotation: Pair) -> Pair:
        """Keys (normed, rotated) and values of states x [B, T, d] at positions given by cos and sin [B, T, hd / 2].

        Returns:
            two [B, kv, T, hd].
        """
        keys = self._turned(self._split(self.k_proj(x), self.kv), self.k_norm, rotation)
        return keys, self._split(self.v_proj(x), self.kv).transpose(1, 2)

    def forward(self, x: Tensor, context: Pair, rotation: Pair, visible: Tensor) -> Tensor:
        """Attention output of block states.

        Args:
            x: normed block states, [B, N, K, d].
            context: keys and values of the context, [B, kv, S, hd].
            rotation: cos and sin of the slots' positions, [B, N, K, hd / 2].
            visible: bool [B, N, S].
        """
        batch, blocks, slots, _ = x.shape
        flat = x.flatten(1, 2)
        cos, sin = (part.flatten(1, 2) for part in rotation)
        queries = self._turned(self._split(self.q_proj(flat), self.heads), self.q_norm, (cos, sin))
        keys, values = self.keys_values(flat, (cos, sin))
        mixed = attend(
            queries.reshape(batch, self.heads, blocks, slots, self.size),
            *context,
            keys.reshape(batch, self.kv, blocks, slots, self.size),
            values.reshape(batch, self.kv, blocks, slots, self.size),
            visible,
            self.size**-0.5,
        )
        joined = mixed.permute(0, 2, 3, 1, 4).reshape(batch, blocks, slots, self.heads * self.size)
        result: Tensor = self.o_proj(joined)
        return result

    def _turned(self, x: Tensor, norm: RMSNorm, rotation: Pair) -> Tensor:
        """Normed and rotated heads of x [B, T, heads, hd], [B, heads, T, hd]."""
        cos, sin = rotation
        if torch.is_grad_enabled() and norm.weight.requires_grad:
            return fused.norm_rotate(x, norm.weight, norm.eps, cos, sin)
        normed: Tensor = norm(x)
        return rotate(normed.transpose(1, 2), cos.unsqueeze(1), sin.unsqueeze(1))

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:-1], heads, self.size)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """down(silu(gate(x)) * up(x)), [..., d]."""
        result: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(nn.Module):
    """One pre-norm draft layer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, before_products=True)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, before_products=True)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, context: Pair, rotation: Pair, visible: Tensor) -> Tensor:
        """Block states after this layer, [B, N, K, d]; arguments as in `Attention.forward`."""
        mixed: Tensor = x + self.self_attn(self.input_layernorm(x), context, rotation, visible)
        result: Tensor = mixed + self.mlp(self.post_attention_layernorm(mixed))
        return result
