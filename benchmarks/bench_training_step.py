"""A whole training step against a plain one: 512 anchors of 7 slots, vocabulary 49,152, DSpark on SmolLM2's widths.

The plain step has the same drafter, the same packed batch and the same optimizer; it forms all logits at once, takes
each softmax once, and leaves derivatives to autograd: in the losses, and in the norms, rotations and attention, for
which it runs the definitions that inference runs. Time is compared in one process, in turns; the most memory that a
step needs is measured in a process of its own for each.

    python benchmarks/bench_training_step.py [--device cuda] [--pairs 5]
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from pairs import ratio, report
from smollm2 import TAPS, VOCABULARY, WIDTH, drafter_config
from torch import Tensor
from torch.nn import functional

from dspark.config.models import TrainingSettings
from dspark.drafters import attention, fused
from dspark.drafters.backbone import rotate
from dspark.drafters.dspark import DSparkDrafter
from dspark.training.batches import Batch, make_batch
from dspark.training.learner import Learner
from dspark.training.objective import TrainingObjective
from dspark.training.processes import Processes

GAMMA = 7
SEQUENCES, ANCHORS, LENGTH = 4, 128, 512  # 512 anchors in all
TIMES, MEMORY = 1.5, 0.5  # the bars


def make_learner(processes: Processes) -> Learner:
    config = drafter_config(gamma=GAMMA, layers=5, markov_rank=256)
    embedding = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(0)) * 0.1
    drafter = DSparkDrafter(config, embedding, embedding, seed=1).to(processes.device)
    settings = TrainingSettings()
    low = settings.precision == "bfloat16" and processes.device.type == "cuda"
    return Learner(TrainingObjective(drafter, settings.loss, low_precision=low), settings, processes)


def make_batches(head: Tensor) -> tuple[Batch, Batch]:
    """The step's, in which every slot has a label, and one of a single block."""
    generator = torch.Generator().manual_seed(2)
    rows = []
    for _ in range(SEQUENCES):
        last = torch.randn(LENGTH, WIDTH, generator=generator)
        rows.append(
            SimpleNamespace(
                token_ids=torch.randint(0, VOCABULARY, (LENGTH,), generator=generator),
                prompt_length=16,
                taps=torch.randn(LENGTH, len(TAPS) * WIDTH, generator=generator),
                last_hidden=last,
                logsumexp=torch.cat([torch.logsumexp(part @ head.T, -1) for part in last.split(64)]),
            )
        )
    anchors = np.linspace(16, LENGTH - GAMMA - 2, ANCHORS).astype(np.int64)
    return make_batch(rows, [anchors] * SEQUENCES, GAMMA, None), make_batch(rows[:1], [anchors[:1]], GAMMA, None)


@contextmanager
def plain_backbone() -> Iterator[None]:
    """The definitions in place of the hand-written derivatives."""

    def norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(dtype)

    def norm_rotate(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(norm(x, weight, eps, x.dtype).transpose(1, 2), cos.unsqueeze(1), sin.unsqueeze(1))

    def attend(queries: Tensor, *others: Tensor) -> Tensor:
        return attention._attend(queries, *others[:-1], ~others[-1])

    before = fused.rms_norm, fused.norm_rotate, fused.attend
    fused.rms_norm, fused.norm_rotate, fused.attend = norm, norm_rotate, attend
    try:
        yield
    finally:
        fused.rms_norm, fused.norm_rotate, fused.attend = before


def plain_objective(objective: TrainingObjective, batch: Batch, denominators: Tensor) -> Tensor:
    drafter, settings, targets = objective.drafter, objective.settings, batch.targets
    hidden, embedded, latent = objective.states(batch)
    confidence = drafter.confidence_head(hidden, embedded)
    with torch.autocast(hidden.device.type, torch.bfloat16, enabled=objective.low_precision):
        rows = torch.cat([drafter.head, drafter.markov_head.markov_w2.weight], -1)
        logits = (torch.cat([hidden, latent], -1) @ rows.T).float()
        with torch.no_grad():
            known = (targets.target_hidden @ drafter.head.T).float()
            known = known.sub_(targets.logsumexp.unsqueeze(1)).exp_()
    log_draft = torch.log_softmax(logits, -1)
    l1 = (log_draft.exp() - known).abs().sum(-1)
    cross_entropy = functional.nll_loss(log_draft, targets.labels, reduction="none")
    wanted = (1 - l1.detach() / 2).clamp(0, 1)
    bce = functional.binary_cross_entropy_with_logits(confidence, wanted, reduction="none")
    weights = targets.weights(settings.decay)
    weight, labelled = denominators
    total = settings.cross_entropy * cross_entropy / labelled + (settings.l1 * l1 + settings.confidence * bce) / weight
    return (weights * total).sum()


def steps(learner: Learner, batch: Batch) -> dict[str, Callable[[], object]]:
    """One optimizer step each way."""

    def ours() -> None:
        learner.gradients([batch])
        learner.move(1e-6)

    def plain() -> None:
        learner.objective.zero_grad(set_to_none=True)
        with plain_backbone():
            plain_objective(learner.objective, batch, learner.objective.denominators(batch)).backward()
        learner.processes.clip(learner.drafter.parameters(), 1.0)
        learner.move(1e-6)

    def synchronised(work: Callable[[], None]) -> Callable[[], None]:
        def wait() -> None:
            work()
            torch.cuda.synchronize()

        return wait if batch.features.is_cuda else work

    return {"ours": synchronised(ours), "plain": synchronised(plain)}


def agreement(learner: Learner, batch: Batch) -> float:
    """The largest difference of a gradient between both ways, relative to the gradient."""
    learner.gradients([batch])
    found = {parameter: parameter.grad for parameter in learner.names}
    learner.objective.zero_grad(set_to_none=True)
    with plain_backbone():
        plain_objective(learner.objective, batch, learner.objective.denominators(batch)).backward()
    learner.processes.clip(learner.drafter.parameters(), 1.0)
    return max(float((one.grad - found[one]).norm() / one.grad.norm()) for one in learner.names)


def peak(way: str) -> dict[str, int]:
    """Bytes before the step and at its peak, of this process or of the GPU."""
    processes = Processes()
    learner = make_learner(processes)
    batch, small = make_batches(learner.drafter.head.cpu())
    step = steps(learner, batch.to(processes.device))[way]
    learner.gradients([small])  # the optimizer's state is no part of what differs
    learner.move(1e-6)
    learner.objective.zero_grad(set_to_none=True)
    if processes.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return {"before": before, "peak": torch.cuda.max_memory_allocated()}
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from what is resident now
    before = resident("VmRSS")
    step()
    return {"before": before, "peak": resident("VmHWM")}


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def peak_of(way: str, device: str) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, __file__, "--peak", way, "--device", device], capture_output=True, text=True, check=True
    )
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peak", choices=("ours", "plain"), help="measure one way's memory in this process")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    if arguments.peak:
        print(json.dumps(peak(arguments.peak)))
        return
    memory = {way: peak_of(way, arguments.device) for way in ("ours", "plain")}
    for way, found in memory.items():
        print(f"{way}: {found['peak'] / 2**30:.2f} GiB at the peak, {found['before'] / 2**30:.2f} GiB before the step")
    share = memory["ours"]["peak"] / memory["plain"]["peak"]
    added = [found["peak"] - found["before"] for found in memory.values()]
    print(f"memory at the peak: {share:.2f} of the plain step's (at most {MEMORY})")
    print(f"of which the step adds: {added[0] / added[1]:.2f} of what the plain one adds")
    processes = Processes()
    learner = make_learner(processes)
    batch = make_batches(learner.drafter.head.cpu())[0].to(processes.device)
    print(f"gradients agree to {agreement(learner, batch):.1e} of their size")
    ways = steps(learner, batch)
    measured = ratio(ways["ours"], ways["plain"], pairs=arguments.pairs, seconds=0.0)
    report("a training step, 512 anchors x 7, vocabulary 49,152", measured)
    if share > MEMORY or measured.value < TIMES:
        sys.exit(f"below the bar: {TIMES}x the speed, {MEMORY}x the memory")


if __name__ == "__main__":
    main()
