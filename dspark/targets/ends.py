"""A target's embedding and head alone: all that training and exporting a drafter need of its weights.

Read tensor by tensor, so that neither the model is built nor its layers are loaded: for a target of billions of
parameters that is the difference between one gigabyte and its whole size.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from dspark.errors import PreflightError
from dspark.io.jsonfile import strict_loads
from dspark.targets.layout import INDEX, weight_files
from dspark.targets.record import TargetRecord
from dspark.targets.traits import HEAD, family_of


class Ends(NamedTuple):
    """Both ends of a target, in its dtype."""

    embedding: Tensor  # [V, d]
    head: Tensor  # [V, d]; the same tensor as the embedding where the target ties them


def read_ends(record: TargetRecord, root: Path) -> Ends:
    """Read the embedding and the head of a materialised target from the workspace `root`.

    Raises:
        PreflightError: its files are not in the store.
    """
    folder = record.folder(root)
    if not (folder / "config.json").is_file():
        raise PreflightError(f"target {record.name!r} is not in {folder}", f"dspark targets fetch {record.name}")
    dtype = getattr(torch, record.dtype)
    embedding = read_weight(folder, family_of(record.architecture).embedding).to(dtype)
    tied = record.head_digest == record.embedding_digest
    return Ends(embedding, embedding if tied else read_weight(folder, HEAD).to(dtype))


def read_weight(folder: Path, name: str) -> Tensor:
    """One tensor of a model folder, read alone.

    Raises:
        PreflightError: there is no such tensor.
    """
    if (folder / INDEX).is_file():
        file = strict_loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].get(name, "")
    else:
        file = weight_files(folder)[0]
    if file:
        with safe_open(folder / file, framework="pt") as handle:
            if name in handle.keys():  # noqa: SIM118
                tensor: Tensor = handle.get_tensor(name)
                return tensor
    raise PreflightError(f"{folder}: its weights hold no {name}")
