"""The parallel backbone: layers whose keys and values hold the target's context beside the block.

Queries come from the block only. The projected context C enters every layer's k_proj and v_proj as it is (it has its
own norm, `hidden_norm`); the block's states pass the layer's input norm first (DFlash; deepspec.md, section 1.2).
Layers are Qwen3's or, for Gemma 4 targets, Gemma 4's (section 1.5); what tells them apart is data (`styles.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from dspark.drafters import fused
from dspark.drafters.attention import Visible, attend
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
        return (unit_rms(x.float(), self.eps) * self.weight.float()).to(x.dtype)


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last axis: an RMS norm without a weight, computed in float32, in the dtype of x."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


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

    The default type is theta^(-2i / head_dim). The proportional one is the same for the first pairs of a head, as
    many as `partial_rotary_factor` says, and leaves the others as they are (angle 0). The other types are transformers'
    own functions, as the target uses them.
    """
    theta = float(config.rope["rope_theta"])
    if config.rope["rope_type"] in ("default", "proportional"):
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        frequencies = 1.0 / theta**exponents
        if config.rope["rope_type"] == "proportional":
            turned = int(config.rope.get("partial_rotary_factor", 1.0) * config.head_dim // 2)
            frequencies[turned:] = 0.0
            frequencies /= float(config.rope.get("factor", 1.0))
        return frequencies, 1.0
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
    """Attention of one draft layer: per-head RMS norms on queries and keys, grouped queries, not causal.

    With `shared_key_value` there is no `v_proj`: values are what `k_proj` gives, before norm and rotation.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        size, bias = config.head_dim, config.attention_bias
        self.heads, self.kv, self.size = config.num_attention_heads, config.num_key_value_heads, size
        self.q_proj = nn.Linear(config.hidden_size, self.heads * size, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, self.kv * size, bias=bias)
        self.v_proj = None if config.shared_key_value else nn.Linear(config.hidden_size, self.kv * size, bias=bias)
        self.o_proj = nn.Linear(self.heads * size, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(size, config.rms_norm_eps)
        self.k_norm = RMSNorm(size, config.rms_norm_eps)
        self.scale = config.score_scale
        self.value_eps = config.rms_norm_eps if config.style.norms_values else None

    def keys_values(self, x: Tensor, rotation: Pair) -> Pair:
        """Keys (normed, rotated) and values of states x [B, T, d] at positions given by cos and sin [B, T, hd / 2].

        Returns:
            two [B, kv, T, hd].
        """
        projected = self._split(self.k_proj(x), self.kv)
        values = projected if self.v_proj is None else self._split(self.v_proj(x), self.kv)
        if self.value_eps is not None:
            values = unit_rms(values, self.value_eps)
        return self._turned(projected, self.k_norm, rotation), values.transpose(1, 2)

    def forward(self, x: Tensor, context: Pair, rotation: Pair, visible: Visible) -> Tensor:
        """Attention output of block states.

        Args:
            x: normed block states, [B, N, K, d].
            context: keys and values of the context, [B, kv, S, hd].
            rotation: cos and sin of the slots' positions, [B, N, K, hd / 2].
            visible: bool [B, N, S], or how a single row is packed.
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
            self.scale,
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
    """A gated MLP: SwiGLU, or with GELU for the gate."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = config.style.activation

    def forward(self, x: Tensor) -> Tensor:
        """down(activation(gate(x)) * up(x)), [..., d]."""
        gate: Tensor = self.gate_proj(x)
        opened = functional.silu(gate) if self.activation == "silu" else functional.gelu(gate, approximate="tanh")
        result: Tensor = self.down_proj(opened * self.up_proj(x))
        return result


class Layer(nn.Module):
    """One draft layer: norms before attention and MLP, and in a sandwich also behind them.

    In a sandwich `post_attention_layernorm` is the norm behind attention; without one it is, as in Qwen3, the norm
    before the MLP. The output of a sandwich is multiplied by `layer_scalar`, which does not learn.
    """

    layer_scalar: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, before_products=True)
        self.self_attn = Attention(config)
        self.sandwich = config.style.sandwich
        self.post_attention_layernorm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, before_products=not self.sandwich
        )
        self.mlp = FeedForward(config)
        if self.sandwich:
            self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, before_products=True)
            self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, x: Tensor, context: Pair, rotation: Pair, visible: Visible) -> Tensor:
        """Block states after this layer, [B, N, K, d]; arguments as in `Attention.forward`."""
        attended: Tensor = self.self_attn(self.input_layernorm(x), context, rotation, visible)
        mixed: Tensor
        if self.sandwich:
            mixed = x + self.post_attention_layernorm(attended)
            mixed = mixed + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(mixed)))
            return mixed * self.layer_scalar
        mixed = x + attended
        result: Tensor = mixed + self.mlp(self.post_attention_layernorm(mixed))
        return result
