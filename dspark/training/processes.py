"""The processes that train together: who does what, how gradients are added, where whole tensors are at hand.

accelerate starts them and brings them together: its own launcher, torchrun, or either of them under Slurm. Weights and
optimizer state are in every process (DistributedDataParallel) or spread over them (FSDP2: `accelerate launch
--use_fsdp --fsdp_version 2`, which sets ACCELERATE_USE_FSDP). accelerate itself spreads nothing on CPUs, where tests
run, so that is done with torch's `fully_shard` here, on all devices alike. The whole drafter is one unit: it is small
beside the target, and one gathering a step is the least that there can be.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn

from dspark.device import CPU, accelerator, asked_for
from dspark.errors import PreflightError
from dspark.io.progress import request_stop, stop_requested


class Processes:
    """All processes of a run, seen from one of them.

    Attributes:
        accelerator: accelerate's view of them.
        count, index: how many there are, and which one this is.
        device: that this one trains on; `device.accelerator` has the same rule.
        sharded: whether weights and optimizer state are spread over them.
    """

    def __init__(self) -> None:
        handlers = [DistributedDataParallelKwargs(broadcast_buffers=False)]  # they are the target's, equal everywhere
        # Autocast is `objective`'s.
        self.accelerator = Accelerator(cpu=_on_cpu(), mixed_precision="no", kwargs_handlers=handlers)
        self.count: int = self.accelerator.num_processes
        self.index: int = self.accelerator.process_index
        self.device: torch.device = self.accelerator.device
        asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1", "yes")
        self.sharded = asked and self.count > 1

    @property
    def first(self) -> bool:
        """True in the one process that writes."""
        return self.index == 0

    @property
    def share(self) -> slice:
        """What this process takes of something that all of them share."""
        return slice(self.index, None, self.count)

    def wrapped(self, module: nn.Module) -> Any:
        """A module whose backward pass leaves the *mean* of all processes' gradients.

        Sharding replaces the module's parameters: optimizers are made afterwards.
        """
        if not self.sharded:
            return self.accelerator.prepare(module)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        sharded = fully_shard(module, mesh=init_device_mesh(self.device.type, (self.count,)))
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no mean; sums that are divided are as good
        return sharded

    def accumulating(self, model: Any, *, last: bool) -> Any:
        """Around all forward and backward passes of a step; gradients are exchanged after the last one only."""
        if self.count == 1 or (last and not self.sharded):
            return nullcontext()
        return _exchange(model, last) if self.sharded else model.no_sync()

    @contextmanager
    def gathered(self, model: Any) -> Iterator[None]:
        """While it lasts, forward passes exchange nothing, so that processes may do different numbers of them."""
        if not self.sharded:
            yield
            return
        model.unshard()
        try:
            yield
        finally:
            model.reshard()

    def clip(self, parameters: Iterable[Tensor], limit: float) -> float:
        """Scale all gradients so that their joint norm is `limit` at most; returns what the norm was."""
        parameters = list(parameters)
        norm = whole(
            torch.nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None]), self.device
        )
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return float(norm)

    def summed(self, value: Tensor) -> Tensor:
        """A tensor summed over processes."""
        total: Tensor = self.accelerator.reduce(value, reduction="sum")
        return total

    def wait(self) -> None:
        """Until all processes are here."""
        self.accelerator.wait_for_everyone()

    def stop_together(self) -> bool:
        """True if a requested stop is obeyed after this step, by all processes at once.

        Signals reach them one after the other. Whoever stopped alone would leave the others waiting for its gradients.
        """
        if self.count == 1:
            return True
        asked = float(self.summed(torch.tensor(float(stop_requested()), device=self.device))) > 0
        if asked:
            request_stop()
        return asked

    def agree(self, value: int, what: str, where: str) -> None:
        """Refuse to go on with processes that read different things.

        Raises:
            PreflightError: `value` is not the same in all of them.
        """
        if self.count == 1:
            return
        own = torch.tensor(float(value), device=self.device)
        if float(self.summed(own)) != value * self.count:
            raise PreflightError(
                f"{what} is not the same in all {self.count} processes ({value} in process {self.index})",
                f"put {where} on a file system that all nodes share",
            )


def process_state() -> PartialState:
    """Which process this is, and its device, for work that trains nothing."""
    return PartialState(cpu=_on_cpu())


def _on_cpu() -> bool:
    """Whether the environment keeps processes off the device that accelerate would choose.

    Raises:
        PreflightError: it asks for a GPU, and there is none.
    """
    return asked_for() is not None and accelerator() == CPU


def whole(value: Any, device: torch.device | str = "cpu") -> Tensor:
    """A tensor on one device; one that is spread over processes is gathered, in which all of them take part."""
    value = value.detach()
    if hasattr(value, "full_tensor"):  # a DTensor; to import it takes longer than a small step
        value = value.full_tensor()
    result: Tensor = value.to(device).contiguous()
    return result


def placed(value: Tensor, like: Any) -> Tensor:
    """A whole tensor where another one is: on its device, or this process's part of it."""
    if not hasattr(like, "full_tensor"):
        return value.to(like.device)
    from torch.distributed.tensor import distribute_tensor

    spread: Tensor = distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return spread


@contextmanager
def _exchange(model: Any, last: bool) -> Iterator[None]:
    model.set_requires_gradient_sync(last)
    yield
