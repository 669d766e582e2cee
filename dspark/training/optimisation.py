"""How the weights move: learning rate, weight decay, precision."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dspark.config.models import TrainingSettings
from dspark.drafters.dspark import DSparkDrafter


def learning_rate(step: int, settings: TrainingSettings) -> float:
    """Learning rate of a step (0-based): linear warm-up over `warmup_share` of the steps, then a cosine to zero."""
    warmup = round(settings.warmup_share * settings.steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(settings.steps - warmup, 1)))


def parameter_groups(drafter: DSparkDrafter, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices of the backbone decay; norms, biases and the heads do not."""
    decayed: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in drafter.named_parameters():
        heads = name.startswith(("markov_head.", "confidence_head."))
        (others if heads or parameter.dim() < 2 else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def bfloat16_pays(device: torch.device) -> bool:
    """True where bfloat16 products are done in hardware; elsewhere they are emulated, slower than float32."""
    if device.type != "cpu":
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
