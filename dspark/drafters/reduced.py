"""A reduced draft vocabulary, taken back out of the checkpoint that engines load.

The union dialect stores such a drafter with the whole vocabulary (`checkpoint.py`). Which rows are its own is written
in the rows themselves: those of all other tokens are zero but for channel 0, which keeps them out of reach.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from dspark.drafters.checkpoint import CONFIG, MARKOV_W2, UNREACHABLE, parameters, read_checkpoint
from dspark.drafters.config import DrafterConfig
from dspark.drafters.description import trained_config
from dspark.drafters.dspark import DSparkDrafter
from dspark.errors import IntegrityError
from dspark.io.jsonfile import read_json

if TYPE_CHECKING:
    from dspark.targets.record import TargetRecord


def read_trainable(
    folder: Path, embedding: Tensor, head: Tensor, *, record: TargetRecord | None = None
) -> DSparkDrafter:
    """Read any dialect as it was trained: with its own draft vocabulary, in float32.

    Args:
        embedding, head, record: as of `read_checkpoint`.
    Raises:
        IntegrityError: as `read_checkpoint`, or the rows that stand for tokens are not as many as the config says.
    """
    drafter = read_checkpoint(folder, embedding, head, record=record)
    config = trained_config(read_json(folder / CONFIG, IntegrityError), str(folder / CONFIG))
    if config != drafter.config:
        drafter = _reduced(drafter, config, folder)
    return drafter.float()


def _reduced(drafter: DSparkDrafter, config: DrafterConfig, folder: Path) -> DSparkDrafter:
    tensors = parameters(drafter)
    rows = tensors[MARKOV_W2]
    outside = (rows[:, 0] == UNREACHABLE) & (rows[:, 1:] == 0).all(-1)
    ids = (~outside).nonzero().squeeze(-1)
    if len(ids) != config.draft_vocab_size or not drafter.markov_head.constant_channel:
        raise IntegrityError(
            f"{folder}: {len(ids)} rows of {MARKOV_W2} stand for tokens, {CONFIG} says {config.draft_vocab_size}",
            "fetch the package again, or make it again with `dspark run`",
        )
    result = DSparkDrafter(config, drafter.embedding, drafter.head, ids)
    result.load_state_dict(tensors | {MARKOV_W2: rows[ids].contiguous()}, assign=True)
    return result.to(drafter.embedding.device).eval().requires_grad_(False)
