"""How the weights move: learning rate, weight decay, precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dspark.config.models import TrainingSettings
from dspark.drafters.base import Drafter
from dspark.processor import arithmetic


def learning_rate(step: int, settings: TrainingSettings) -> float:
    """Learning rate of a step (0-based): linear warm-up over `warmup_share` of the steps, then a cosine to zero."""
    warmup = round(settings.warmup_share * settings.steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(settings.steps - warmup, 1)))


def make_optimizers(drafter: Drafter, settings: TrainingSettings) -> list[torch.optim.Optimizer]:
    """What moves the weights: together they hold every parameter once.

    Matrices of the backbone decay; norms, biases and the heads do not. With `muon` those matrices take orthogonal steps
    (Newton-Schulz iterations in bfloat16) whose size matches AdamW's, so that one learning rate serves all. The heads'
    matrices are tables of tokens, of which a step sees few rows: they stay with AdamW.
    """
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in drafter.named_parameters():
        heads = name.startswith(("markov_head.", "confidence_head."))
        (others if heads or parameter.dim() < 2 else matrices).append(parameter)
    rate, decay = settings.learning_rate, settings.weight_decay
    if settings.optimizer == "muon":
        muon = torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        return [muon, torch.optim.AdamW(others, lr=rate, weight_decay=0.0, fused=True)]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=rate, fused=True)]


def fast_products(device: torch.device) -> AbstractContextManager[Any]:
    """Around an optimizer's step: torch's Muon iterates in bfloat16, whatever the processor is good at."""
    emulated = arithmetic("bfloat16", device.type) != "bfloat16"
    return KeepFloat32() if emulated else nullcontext()


class KeepFloat32(TorchFunctionMode):
    """`bfloat16()` of a tensor gives a copy in its own dtype: what follows is done in float32."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Copy instead of rounding, do everything else as it is."""
        if func is Tensor.bfloat16:
            return args[0].clone()
        return func(*args, **(kwargs or {}))
