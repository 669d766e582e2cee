"""A drafter that somebody released, read in full and found usable in a build: nothing about it is taken on trust."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, cat, equal, zeros

from dspark.drafters.base import Drafter
from dspark.drafters.checkpoint import EMBEDDING, HEAD, MARKOV_W1, MARKOV_W2, parameters, unmoved
from dspark.drafters.config import DrafterConfig
from dspark.drafters.dialects import CONFIDENCE, layout_of
from dspark.drafters.fitting import read_released_config
from dspark.drafters.foreign import load_drafter
from dspark.drafters.kinds import build_drafter
from dspark.drafters.reduced import read_trainable
from dspark.drafters.weights import CONFIG, drafter_files, read_header
from dspark.errors import DataError
from dspark.io.jsonfile import read_json

if TYPE_CHECKING:
    from dspark.targets.record import TargetRecord

DTYPES = ("F32", "BF16", "F16")
TABLES = ("d2t", "t2d")  # of a reduced vocabulary: which tokens, not weights
CERTIFY = "`dspark certify` measures such a drafter on a server that runs it"


def read_released(folder: Path, record: TargetRecord, embedding: Tensor, head: Tensor) -> Drafter:
    """The drafter of a checkpoint folder in any layout, with its own draft vocabulary.

    Its tensors are those of the files, widened to float32. A reduced vocabulary of others gets the constant channel
    that exporting it takes (`fitting.with_channel`), which changes nothing that it says.

    Args:
        embedding, head: the target's, [V, d].
    Returns:
        float32, in eval mode, without gradients.
    Raises:
        DataError: another target's, tensors that are missing, unexpected, of another shape or not finite, or a drafter
            that a build could not go on with; says why.
        IntegrityError: one of our own that is damaged, or another target's.
    """
    config = read_released_config(folder, record)
    stored = {
        name.removeprefix("model."): tensor
        for file in drafter_files(folder)
        for name, tensor in read_header(folder / file).items()
    }
    if quantised := sorted({tensor.dtype for name, tensor in stored.items() if name not in TABLES} - {*DTYPES}):
        raise DataError(
            f"{folder}: tensors are stored as {', '.join(quantised)}, only {', '.join(DTYPES)} are read",
            "supply the drafter as it was before quantisation",
        )
    if layout_of(read_json(folder / CONFIG, DataError), str(folder / CONFIG)) == "dspark":
        drafter = read_trainable(folder, embedding, head, record=record)
    else:
        drafter = load_drafter(folder, record, embedding, head)
        if config != drafter.config:
            drafter = _with_channel(drafter, config, embedding, head)
    if still := unmoved(drafter):
        raise DataError(
            f"{folder}: all 0 or all 1, as if training had never moved them: {', '.join(still)}",
            f"fetch the drafter again; it is not exported like this. {CERTIFY}",
        )
    return drafter


def _with_channel(drafter: Drafter, config: DrafterConfig, embedding: Tensor, head: Tensor) -> Drafter:
    """The same drafter with more channels in its Markov head: the first is 1 in every row of W1, in W2 they are 0."""
    tensors, added = parameters(drafter), config.markov_rank - drafter.config.markov_rank
    w1, w2 = tensors[MARKOV_W1], tensors[MARKOV_W2]
    width, constant = config.hidden_size, zeros(len(w1), added)
    constant[:, 0] = 1
    tensors[MARKOV_W1] = cat([constant, w1], 1)
    tensors[MARKOV_W2] = cat([zeros(len(w2), added), w2], 1)
    if config.confidence:
        confidence = tensors[CONFIDENCE[0]]
        tensors[CONFIDENCE[0]] = cat([confidence[:, :width], zeros(1, added), confidence[:, width:]], 1)
    result = build_drafter(config, embedding, head, drafter.draft_token_ids.cpu())
    result.load_state_dict(tensors)
    return result.eval().requires_grad_(False)


def foreign_ends(folder: Path, embedding: Tensor, head: Tensor) -> list[str]:
    """Which of the target's matrices a checkpoint stores with other values: it was trained on another target's.

    Engines pass these over and use the target's own, so this is no fault of the files.

    Args:
        embedding, head: the target's, [V, d].
    Returns:
        their names; a head with the rows of a reduced vocabulary is held against the target when it is read.
    """
    from safetensors import safe_open

    found = []
    for file in drafter_files(folder):
        with safe_open(folder / file, framework="pt") as handle:
            for stored in handle.keys():  # noqa: SIM118
                name = stored.removeprefix("model.")
                wanted = {EMBEDDING: embedding, HEAD: head}.get(name)
                if wanted is None:
                    continue
                tensor = handle.get_tensor(stored)
                if tensor.shape == wanted.shape and not equal(tensor, wanted.cpu().to(tensor.dtype)):
                    found.append(name)
    return found
