"""What learns: the drafter with its losses and optimizers, one step at a time, whole or spread over processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dspark.config.models import TrainingSettings
from dspark.drafters.base import Drafter
from dspark.training.batches import Batch
from dspark.training.objective import Objective
from dspark.training.optimisation import fast_products, make_optimizers
from dspark.training.processes import Processes, placed, whole
from dspark.training.resume import optimizer_tensors, restore_optimizers


class Learner:
    """Weights and optimizer state.

    Attributes:
        drafter: in training.
        model: the objective as the processes share it.
        names: of the drafter's parameters.
    """

    def __init__(self, objective: Objective, settings: TrainingSettings, processes: Processes) -> None:
        self.objective, self.processes = objective, processes
        self.drafter = objective.drafter
        self._clip_norm = settings.clip_norm
        self.model: Any = processes.wrapped(objective)  # replaces parameters, so all that refers to them comes after
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in self.drafter.named_parameters()}
        self.optimizers = make_optimizers(self.drafter, settings)

    def gradients(self, batches: Sequence[Batch]) -> tuple[float, Tensor]:
        """Give every parameter the gradient of one step, clipped.

        Gradients are summed in float32, as the weights are, whatever the forward passes compute in.

        Args:
            batches: of this process, on any device; computed one after the other, each over the denominators of all.
        Returns:
            the joint norm before clipping, and the summed `Sums.stacked()`, both of all processes.
        """
        device = self.processes.device
        denominators = torch.stack([self.objective.denominators(batch) for batch in batches]).sum(0)
        denominators = self.processes.summed(denominators.to(device))
        self.objective.zero_grad(set_to_none=True)
        total = torch.zeros(5, device=device)
        for number, batch in enumerate(batches, 1):
            with self.processes.accumulating(self.model, last=number == len(batches)):
                objective, sums, _, _ = self.model(batch.to(device), denominators)
                # Of the processes' gradients the mean is taken; the objective of the step is their sum.
                self.processes.accelerator.backward(objective * self.processes.count)
            total += sums.stacked()
        norm = self.processes.clip(self.drafter.parameters(), self._clip_norm)
        return norm, self.processes.summed(total)

    def move(self, rate: float) -> None:
        """Take the step that the gradients ask for, at this learning rate."""
        with fast_products(self.processes.device):
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        """The trained parameters by name, whole, on the CPU; all processes take part, the first one gets them."""
        gathered = {}
        for name, value in self.drafter.state_dict().items():
            tensor = whole(value)
            if self.processes.first:
                gathered[name] = tensor
        return gathered

    def optimizer_state(self) -> dict[str, Tensor]:
        """The optimizers' state, in the same way."""
        return optimizer_tensors(self.optimizers, self.names, wanted=self.processes.first)

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor], optimizer: dict[str, Tensor]) -> None:
        """Go on from weights and optimizer state as they were returned."""
        for parameter, name in self.names.items():
            parameter.copy_(placed(weights[name], parameter))
        restore_optimizers(self.optimizers, self.names, optimizer)

    def finished(self, weights: dict[str, Tensor], new: Callable[[], Drafter]) -> Drafter:
        """The drafter with these weights, in one piece, in eval mode; training is over.

        Args:
            new: makes another drafter of the same architecture. One whose weights were spread stays bound to its
                processes, hooks and all.
        """
        drafter = new().to(self.processes.device) if self.processes.sharded else self.drafter
        drafter.load_state_dict(weights)
        return drafter.eval().requires_grad_(False)
