"""How the weights move: learning rate, weight decay, precision."""

from __future__ import annotations

import math

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


def make_optimizers(drafter: DSparkDrafter, settings: TrainingSettings) -> list[torch.optim.Optimizer]:
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
