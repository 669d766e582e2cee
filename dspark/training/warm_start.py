"""Training from the weights of an earlier drafter instead of from counts alone.

Everything is carried over as it is. With a reduced draft vocabulary the new responses may need tokens that the earlier
drafter could not propose; they take the places of those that these responses hold least (`vocabulary.py`), and so the
size stays, and with it all that was measured of the geometry. The Markov row of such a token starts where it would say
what the responses do, in the terms that the carried-over W1 already has: its bias as far from log p as those of the
tokens around it, its other channels by least squares on the residuals R of `initialisation.py`,

    min over w  sum_u n(u) (w W1[u] - R(u, v))^2 + lambda |w|^2

A drafter without heads can be given them (DFlash into DSpark). The new sequential head then starts with W2 = 0, so that
the drafts are at first those of the earlier drafter, and its W1 is random, so that W2 learns; the confidence head
starts as random as ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dspark.drafters.base import Drafter
from dspark.drafters.checkpoint import MARKOV_W2, parameters
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.reduced import read_trainable
from dspark.errors import IntegrityError
from dspark.io.digest import digest_file
from dspark.training.initialisation import SMOOTHING, UNSEEN, bigrams
from dspark.training.sequences import TrainingSequence

if TYPE_CHECKING:
    from dspark.targets.record import TargetRecord

RIDGE = 1e-3  # lambda, in parts of the mean square of the fitted channels: W1 may have directions no text uses


@dataclass(frozen=True)
class Initial:
    """An earlier drafter.

    Attributes:
        drafter: float32, with its own draft vocabulary.
        where: it was read, for messages.
    """

    drafter: Drafter
    where: str = "the initial weights"

    @property
    def digest(self) -> str:
        """sha256 of its tensors by name and of its draft vocabulary: what a checkpoint continues from."""
        digest = hashlib.sha256()
        tensors = parameters(self.drafter) | {"draft_token_ids": self.drafter.draft_token_ids.cpu()}
        for name, value in sorted(tensors.items()):
            digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
            digest.update(value.contiguous().numpy().tobytes())
        return digest.hexdigest()

    @property
    def known_tokens(self) -> Tensor | None:
        """Its draft vocabulary, ascending int64 [Vd]; None: the whole one."""
        return self.drafter.draft_token_ids.cpu() if self.drafter.config.draft_vocab_size is not None else None


def read_initial(
    package: Path, files: Mapping[str, str], embedding: Tensor, head: Tensor, record: TargetRecord
) -> Initial:
    """The drafter of a package that was verified before; what is read now must still be that.

    Args:
        files: sha256 of its drafter's files, by path in the package.
        embedding, head: the target's, [V, d].
    Raises:
        IntegrityError: a file is missing or another one since, or the drafter belongs to another target.
    """
    for path, sha256 in files.items():
        if not (package / path).is_file() or digest_file(package / path) != sha256:
            raise IntegrityError(
                f"{package / path}: missing, or not the file that was verified", f"remove {package} and fetch it again"
            )
    folders = {(package / path).parent for path in files}
    if len(folders) != 1:
        raise IntegrityError(f"{package}: the files of its drafter lie in {len(folders)} folders, not in one")
    return Initial(read_trainable(folders.pop(), embedding, head, record=record), str(package))


@torch.no_grad()
def warm_start(
    drafter: DSparkDrafter, initial: Initial, sequences: Sequence[TrainingSequence], columns: Tensor | None
) -> None:
    """Give a new drafter, on the CPU, the weights of an earlier one.

    Args:
        sequences: that it will be trained on; they decide the rows of tokens that the earlier one could not propose.
        columns: column of the draft logits of every target id, int64 [V], -1 outside; None: the whole vocabulary.
    Raises:
        SettingsError: see `DrafterConfig.require_startable`.
    """
    drafter.config.require_startable(initial.drafter.config, initial.where)
    tensors = parameters(initial.drafter)
    known = initial.known_tokens
    if drafter.config.markov_type != initial.drafter.config.markov_type:
        drafter.markov_head.markov_w2.weight.zero_()
    elif drafter.config.markov_type != "none" and columns is not None and known is not None:
        rows = drafter.markov_head.markov_w2.weight.detach().clone()
        there = columns[known] >= 0
        rows[columns[known[there]]] = tensors[MARKOV_W2][there]
        fresh = torch.ones(len(rows), dtype=torch.bool)
        fresh[columns[known[there]]] = False
        if bool(fresh.any()):
            w1 = tensors["markov_head.markov_w1.weight"]
            rows[fresh] = _fitted_rows(w1, rows, fresh, *bigrams(sequences, columns))
        tensors[MARKOV_W2] = rows
    drafter.load_state_dict(parameters(drafter) | tensors)


def _fitted_rows(w1: Tensor, rows: Tensor, fresh: Tensor, previous: Tensor, following: Tensor) -> Tensor:
    """W2 rows of the tokens that `fresh` marks, [fresh, r]; see the module's own text.

    Args:
        w1: of the earlier drafter, [V, r]; channel 0 is the constant.
        rows: W2, right where `fresh` is False, [Vd, r].
        previous, following: pairs of neighbouring response tokens, the second as a column, int64 [n] each.
    """
    frequencies = torch.bincount(following, minlength=len(rows)).double() + UNSEEN
    probability = frequencies / frequencies.sum()
    kept = ~fresh
    level = ((rows[kept, 0].double() - probability[kept].log()) * probability[kept]).sum() / probability[kept].sum()

    width = len(rows)
    pairs, counts = torch.unique(previous * width + following, return_counts=True)
    before, after = pairs // width, pairs % width
    wanted = fresh[after]
    before, after, counts = before[wanted], after[wanted], counts[wanted].double()
    residual = torch.log1p(counts / (SMOOTHING * probability[after]))
    weight = torch.bincount(previous, minlength=len(w1)).double()  # n(u)
    channels = w1[:, 1:].double()
    gram = channels.T @ (weight.unsqueeze(1) * channels)
    gram += torch.eye(len(gram), dtype=torch.float64) * (
        RIDGE * gram.diagonal().mean() + torch.finfo(torch.float32).eps
    )
    places = fresh.cumsum(0) - 1
    right = torch.zeros(int(fresh.sum()), channels.shape[1], dtype=torch.float64)
    right.index_add_(0, places[after], (weight[before] * residual).unsqueeze(1) * channels[before])
    fitted = torch.linalg.solve(gram, right.T).T
    bias = (probability[fresh].log() + level).unsqueeze(1)
    return torch.cat([bias, fitted], dim=1).float()
