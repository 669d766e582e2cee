"""A reduced draft vocabulary and a missing sequential head, taken back out of the checkpoint that engines load.

The union dialect stores such a drafter with the whole vocabulary (`checkpoint.py`). Which rows are its own is written
in the rows themselves: those of all other tokens are zero but for channel 0, which keeps them out of reach. A
sequential head that stands for none has rows of zeros alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from dspark.drafters.base import Drafter
from dspark.drafters.checkpoint import CONFIG, MARKOV_W1, MARKOV_W2, UNREACHABLE, parameters, read_checkpoint
from dspark.drafters.config import DrafterConfig
from dspark.drafters.description import trained_config
from dspark.drafters.kinds import build_drafter, require_dspark
from dspark.errors import IntegrityError
from dspark.io.jsonfile import read_json

if TYPE_CHECKING:
    from dspark.targets.record import TargetRecord


def read_trainable(folder: Path, embedding: Tensor, head: Tensor, *, record: TargetRecord | None = None) -> Drafter:
    """Read any dialect as it was trained: with its own draft vocabulary, in float32.

    Args:
        embedding, head, record: as of `read_checkpoint`.
    Raises:
        IntegrityError: as `read_checkpoint`, or the rows that stand for tokens are not as many as the config says, or a
            sequential head that stands for none says something.
    """
    drafter = read_checkpoint(folder, embedding, head, record=record)
    config = trained_config(read_json(folder / CONFIG, IntegrityError), str(folder / CONFIG))
    if config != drafter.config:
        drafter = _as_trained(drafter, config, folder)
    return drafter.float()


def _as_trained(stored: Drafter, config: DrafterConfig, folder: Path) -> Drafter:
    drafter = require_dspark(stored, "reading a checkpoint back")
    tensors = parameters(drafter)
    rows, ids = tensors[MARKOV_W2], None
    if config.draft_vocab_size is not None:
        outside = (rows[:, 0] == UNREACHABLE) & (rows[:, 1:] == 0).all(-1)
        ids = (~outside).nonzero().squeeze(-1)
        if len(ids) != config.draft_vocab_size or not drafter.markov_head.constant_channel:
            raise IntegrityError(
                f"{folder}: {len(ids)} rows of {MARKOV_W2} stand for tokens, {CONFIG} says {config.draft_vocab_size}",
                "fetch the package again, or make it again with `dspark run`",
            )
        rows = rows[ids]
    if config.markov_type == "none":
        if bool((rows != 0).any()):
            raise IntegrityError(
                f"{folder}: {CONFIG} says that the drafter has no sequential head, {MARKOV_W2} holds one",
                "fetch the package again, or make it again with `dspark run`",
            )
        del tensors[MARKOV_W1], tensors[MARKOV_W2]
    else:
        tensors[MARKOV_W2] = rows.contiguous()
    result = build_drafter(config, drafter.embedding, drafter.head, ids)
    result.load_state_dict(tensors, assign=True)
    return result.to(drafter.embedding.device).eval().requires_grad_(False)
