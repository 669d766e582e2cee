"""The training loop, on accelerate: one process or many (`processes.py`).

AdamW (or Muon) on float32 master weights, linear warm-up, cosine to zero, clipping (DSpark, section 3.3). What a step
sees is a function of (seed, step), so a run that was killed continues, on the same machine, to the same bits; on
another number of processes to the same values but for the order of sums.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from dspark.config.models import TrainingSettings
from dspark.drafters.config import DrafterConfig
from dspark.drafters.kinds import build_drafter
from dspark.errors import Interrupted, StageError
from dspark.features.ahead import READ_BUDGET
from dspark.io.progress import Progress
from dspark.processor import arithmetic
from dspark.training.confidence import ConfidenceFit
from dspark.training.development import DevBatches, dev_metrics, dev_sums
from dspark.training.learner import Learner
from dspark.training.methods import method_of
from dspark.training.metrics import DevMetrics, TrainMetrics
from dspark.training.objective import mean_losses
from dspark.training.optimisation import learning_rate
from dspark.training.processes import Processes
from dspark.training.results import COLUMNS, Row, TrainingResult
from dspark.training.resume import (
    BestWeights,
    TrainingState,
    best_weights,
    check_identity,
    read_best,
    read_latest,
    run_identity,
    write_best,
    write_checkpoint,
)
from dspark.training.sequences import TrainingSequence, token_digest, usable_sequences
from dspark.training.steps import TrainingSteps
from dspark.training.vocabulary import coverage, draft_columns, select_draft_tokens
from dspark.training.warm_start import Initial

Enough = Callable[[Mapping[str, Any]], bool]


def train(
    config: DrafterConfig,
    embedding: Tensor,
    head: Tensor,
    train_sequences: Sequence[TrainingSequence],
    dev_sequences: Sequence[TrainingSequence],
    settings: TrainingSettings,
    work: Path,
    progress: Progress | None = None,
    *,
    eos_token_ids: Iterable[int] = (),
    initial: Initial | None = None,
    read_budget: int = READ_BUDGET,
    enough: Enough | None = None,
) -> TrainingResult:
    """Train a drafter on a target's features.

    Args:
        embedding, head: the target's, [V, d]; frozen.
        train_sequences, dev_sequences: with features; those too short for one anchor are left out.
        work: folder of the checkpoints; training continues from the newest one there.
        eos_token_ids: are always in a reduced draft vocabulary.
        initial: the drafter that training starts from; None: it starts from random weights and bigrams.
        read_budget: bytes of memory for features: half for reading those of coming steps, half for the dev split.
        enough: ends training before its last step when it says so of an evaluation (`development.dev_metrics`).
    Returns:
        the drafter with the weights of the best `dev_anchor_tau`, and how it got there.
    Raises:
        SettingsError: the initial drafter has another architecture, or a step does not fit into the read budget.
        DataError: no usable sequences, too few for the mixture, or `work` holds another run's checkpoints.
        PreflightError: processes read different checkpoints.
        StageError: the gradient is not finite, or the confidence head's logits on the dev split.
        Interrupted: a stop was requested; a checkpoint was written first.
    """
    trainer = Trainer(
        config, embedding, head, train_sequences, dev_sequences, settings, work, eos_token_ids, initial, read_budget
    )
    try:
        return trainer.run(progress or Progress(), enough)
    finally:
        trainer.steps.close()


class Trainer:
    """One run: model, optimizer, data and the point they have reached."""

    def __init__(
        self,
        config: DrafterConfig,
        embedding: Tensor,
        head: Tensor,
        train_sequences: Sequence[TrainingSequence],
        dev_sequences: Sequence[TrainingSequence],
        settings: TrainingSettings,
        work: Path,
        eos_token_ids: Iterable[int] = (),
        initial: Initial | None = None,
        read_budget: int = READ_BUDGET,
    ) -> None:
        if settings.initial is not None and initial is None:
            raise ValueError("training.initial names weights, but none were given")
        self.method = method_of(config)
        if initial is not None:
            self.method.require_startable(config, initial)
        self.initial = initial
        self.config, self.settings, self.work = config, settings, work
        self.train_sequences = usable_sequences(train_sequences, settings.max_length, "train")
        self.dev_sequences = usable_sequences(dev_sequences, settings.max_length, "dev")
        self.skipped = len(train_sequences) - len(self.train_sequences)
        self.processes = Processes()
        self.device = self.processes.device
        self.low_precision = arithmetic(settings.precision, self.device.type) == "bfloat16"
        ids = None
        if config.draft_vocab_size is not None:
            ids = select_draft_tokens(
                self.train_sequences,
                config.draft_vocab_size,
                config.vocab_size,
                always=eos_token_ids,
                never=[config.mask_token_id],
                known=None if initial is None else initial.known_tokens,
            )
        self.columns = None if ids is None else draft_columns(ids, config.vocab_size)
        self.new = partial(build_drafter, config, embedding, head, ids, seed=settings.seed)
        drafter = self.new()
        if initial is None:
            self.method.initialise(drafter, self.train_sequences, self.columns, seed=settings.seed)
        else:
            self.method.warm_start(drafter, initial, self.train_sequences, self.columns)
        self.whole_head = head.detach().to(self.device)
        self.objective = self.method.objective(drafter.to(self.device), settings.loss, low_precision=self.low_precision)
        self.learner = Learner(self.objective, settings, self.processes)
        self.read_budget = read_budget
        self.steps = TrainingSteps(
            self.train_sequences, config, self.columns, settings, self.processes, read_budget // 2
        )
        digests = {"train_tokens": token_digest(self.train_sequences), "dev_tokens": token_digest(self.dev_sequences)}
        if initial is not None:
            digests["initial"] = initial.digest
        self.identity = run_identity(config, settings, digests)
        self.step, self.seconds = 0, 0.0
        self.rows: list[Row] = []
        self.dev: dict[str, Any] = {}
        self.before: dict[str, Any] | None = None  # what the initial drafter did on the dev split
        self.best: BestWeights | None = None
        self.saved_at = -1

    def run(self, progress: Progress, enough: Enough | None = None) -> TrainingResult:
        """Train to the end, or until an evaluation is enough, and return the best drafter."""
        if self.settings.precision == "bfloat16" and not self.low_precision:
            progress.note("this processor has no bfloat16 arithmetic: training in float32")
        dev = DevBatches(
            self.dev_sequences[self.processes.share],
            self.objective,
            self.whole_head,
            self.columns,
            size=self.settings.sequences_per_step,
            max_length=self.settings.max_length,
            device=self.device,
            keep_bytes=self.read_budget // 2,
        )
        if self.initial is not None:
            self.before = {"step": 0, **self.measured(dev)}
        self.restore()
        if self.step:
            progress.note(f"training goes on from its checkpoint of step {self.step} of {self.settings.steps}")
        progress.start("train", total=self.settings.steps, done=self.step)
        last = self.step == self.settings.steps or self.suffices(enough)
        while not last:
            started = time.perf_counter()
            row = self.train_step()
            last = self.step == self.settings.steps
            if last or self.step % self.settings.dev_every_steps == 0:
                row |= self.evaluate(dev)
                last = last or self.suffices(enough)
            self.seconds += time.perf_counter() - started
            self.rows.append(row | {"seconds": round(self.seconds, 3)})
            if last or self.step % self.settings.checkpoint_every_steps == 0:
                self.save()
            tau = self.dev.get("dev_anchor_tau")
            fields = {"loss": row["loss"]} if tau is None else {"loss": row["loss"], "dev_anchor_tau": tau}
            together = self.processes.stop_together()
            try:
                progress.advance(1, **fields)
            except Interrupted:
                if not together:
                    continue  # the others hear of it with the next step
                self.save()
                raise
        return self.result()

    def train_step(self) -> Row:
        """One optimizer step; returns its row of `curves.csv`."""
        rate = learning_rate(self.step, self.settings)
        norm, sums = self.learner.gradients(self.steps.batches(self.step))
        if not math.isfinite(norm):
            raise StageError(
                f"training step {self.step + 1}: the gradient is not finite",
                "lower training.learning_rate, or set training.precision to float32",
            )
        self.learner.move(rate)
        self.step += 1
        losses = mean_losses(sums)
        weights = self.settings.loss
        loss = (
            weights.cross_entropy * losses["cross_entropy"]
            + weights.l1 * losses["l1"]
            + weights.confidence * losses["confidence"]
        )
        if not self.config.confidence:
            del losses["confidence"]  # an empty cell, not a loss of 0
        return {"step": self.step, "loss": loss, **losses, "gradient_norm": norm, "learning_rate": rate}

    def measured(self, dev: DevBatches) -> dict[str, Any]:
        """How the weights do on the dev split as they are."""
        with self.processes.gathered(self.learner.model):
            sums = dev_sums(self.objective, dev, self.device)
        return dict(dev_metrics(self.processes.summed(sums), self.config.gamma, confidence=self.config.confidence))

    def evaluate(self, dev: DevBatches) -> Row:
        """Evaluate on the dev split, keep the weights if they are the best so far; returns columns for `curves.csv`."""
        self.dev = {"step": self.step, **self.measured(dev)}
        if self.best is None or self.dev["dev_anchor_tau"] > self.best.metrics["dev_anchor_tau"]:
            weights = self.learner.weights()
            if self.processes.first:
                write_best(self.work, self.step, weights)
            self.processes.wait()
            self.best = best_weights(self.work, self.step, self.dev)
        return {key: value for key, value in self.dev.items() if key in COLUMNS and key != "step"}

    def save(self) -> None:
        """Write a checkpoint of this step unless there is one."""
        if self.saved_at == self.step:
            return
        weights, optimizer = self.learner.weights(), self.learner.optimizer_state()
        if self.processes.first:
            state = TrainingState(
                step=self.step,
                identity=self.identity,
                rows=self.rows,
                dev=self.dev,
                seconds=self.seconds,
                best=self.best,
            )
            write_checkpoint(self.work, state, weights, optimizer, self.settings.keep_checkpoints)
        self.processes.wait()
        self.saved_at = self.step

    def restore(self) -> None:
        """Continue from the newest checkpoint in `work`, if there is one."""
        found = read_latest(self.work)
        self.processes.agree(-1 if found is None else found[0].step, "the newest checkpoint", str(self.work))
        if found is None:
            return
        state, weights, optimizer = found
        check_identity(self.work, state.identity, self.identity)
        self.learner.load(weights, optimizer)
        self.step, self.seconds, self.saved_at = state.step, state.seconds, state.step
        self.rows, self.dev, self.best = list(state.rows), state.dev, state.best

    def result(self) -> TrainingResult:
        """The drafter with its best weights, and the metrics."""
        if self.best is None:
            raise RuntimeError("training ended without an evaluation")
        drafter = self.learner.finished(read_best(self.work, self.best), self.new)
        head = getattr(drafter, "confidence_head", None)
        if self.settings.fit_confidence and head is not None:
            ConfidenceFit(*self.best.metrics["dev_confidence_fit"]).fold(head)
        self.processes.wait()  # nobody may remove `work` while others read
        metrics = TrainMetrics(
            geometry=self.config.geometry,
            trainable_parameters=sum(parameter.numel() for parameter in self.learner.names),
            steps=self.step,
            train_sequences=len(self.train_sequences),
            train_tokens=int(self.steps.schedule.lengths.sum()),
            seen_tokens=self.steps.schedule.seen_tokens(self.step),
            skipped_sequences=self.skipped,
            dev_sequences=len(self.dev_sequences),
            draft_vocab_size=self.config.proposed_vocab_size,
            draft_vocab_coverage=coverage(self.dev_sequences, self.columns),
            precision="bfloat16" if self.low_precision else "float32",
            drawn_sequences=self.steps.schedule.drawn(self.step),
            initial=None if self.before is None else DevMetrics.model_validate(self.before),
            best=DevMetrics.model_validate(self.best.metrics),
            final=DevMetrics.model_validate(self.dev),
        )
        return TrainingResult(drafter, metrics, self.rows, self.seconds, self.processes.first)

    def suffices(self, enough: Enough | None) -> bool:
        """Whether the last evaluation ends training."""
        return enough is not None and bool(self.dev) and enough(self.dev)
