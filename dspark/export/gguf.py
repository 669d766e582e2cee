"""The drafter as a GGUF file: written, read back, and checked both times (`dflash.py` has the format)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dspark.drafters.checkpoint import union_tensors
from dspark.drafters.config import DrafterConfig
from dspark.drafters.dspark import DSparkDrafter
from dspark.engines import ENGINES
from dspark.engines.base import require_support
from dspark.errors import DataError, IntegrityError
from dspark.export.dflash import (
    CONFIDENCE,
    drafter_config,
    drafter_keys,
    file_problems,
    tensor_names,
    tensor_problems,
)
from dspark.io.gguffile import (
    FILE_TYPE,
    MASK,
    Floats,
    GGUFFile,
    Key,
    Keys,
    Precision,
    TensorSource,
    file_type,
    precision_of,
    read_gguf,
    write_gguf,
)
from dspark.targets.record import TargetRecord


@dataclass(frozen=True)
class DrafterGGUF:
    """A drafter's file that was read and checked.

    Attributes:
        file: its keys and what its tensors are.
        state: its tensors by the drafter's own names, float32; with the whole vocabulary.
    """

    file: GGUFFile
    state: dict[str, Floats]


def write_drafter_gguf(path: Path, drafter: DSparkDrafter, target: GGUFFile, *, precision: Precision = "F32") -> None:
    """Write a drafter for a target that is a GGUF file too, if nothing about it would mislead llama.cpp.

    A reduced draft vocabulary is written as a whole one, as in the union checkpoint.

    Args:
        target: whose tokenizer keys the file repeats.
        precision: of the matrices; norms and the confidence head stay F32.
    Raises:
        SettingsError: a drafter that llama.cpp cannot run.
        IntegrityError: the target's file is another target's.
        PreflightError: the gguf package is missing.
    """
    config = drafter.config
    require_support(ENGINES["llamacpp"], config)
    keys, tensors = _content(drafter, target, precision)
    if problems := file_problems(_planned(path, keys, tensors), config, target):
        raise IntegrityError(f"{path}: not written: {'; '.join(problems)}", "make the target's GGUF file again")
    write_gguf(path, keys, tensors)


def write_with_fault(path: Path, drafter: DSparkDrafter, target: GGUFFile, fault: Keys) -> None:
    """Write a drafter's file with keys that are wrong, unchecked: for negative controls."""
    keys, tensors = _content(drafter, target, "F32")
    write_gguf(path, {**keys, **fault}, tensors)


def read_drafter_gguf(path: Path, config: DrafterConfig, target: GGUFFile) -> DrafterGGUF:
    """Read a drafter's file back, checked against the drafter and the target that it should be for.

    Raises:
        IntegrityError: not a GGUF file, or not this drafter's; names every problem.
    """
    file = read_gguf(path)
    if problems := file_problems(file, config, target):
        raise IntegrityError(f"{path}: {'; '.join(problems)}", "write it again: an engine would not notice all of this")
    tensors = file.tensors()
    broken = [name for name, values in tensors.items() if not np.isfinite(values).all()]
    if broken:
        raise IntegrityError(f"{path}: not finite: {', '.join(broken)}", "train the drafter again")
    return DrafterGGUF(file, {name: tensors[stored] for name, stored in tensor_names(config.layers).items()})


def load_drafter_gguf(path: Path, record: TargetRecord, embedding: Tensor, head: Tensor) -> DSparkDrafter:
    """The drafter of a file that anybody may have written, for a target; float32.

    Args:
        embedding, head: of the target, [V, d].
    Raises:
        IntegrityError: not a GGUF file, or its tensors are not those that its keys describe.
        DataError: not a DSpark drafter for this target.
    """
    file = read_gguf(path)
    config = drafter_config(file, record)
    for what, found, expected in (
        ("vocabulary", config.vocab_size, record.vocab_physical),
        ("hidden size", config.hidden_size, record.hidden_size),
    ):
        if found != expected:
            raise DataError(
                f"{path.name}: its {what} is {found}, that of target {record.name} is {expected}",
                "name the target that the drafter was trained for",
            )
    if problems := tensor_problems(file, config):
        raise IntegrityError(f"{path}: {'; '.join(problems)}", "fetch or convert the drafter again")
    tensors = file.tensors()
    drafter = DSparkDrafter(config, embedding, head)
    state = {name: torch.tensor(tensors[stored]) for name, stored in tensor_names(config.layers).items()}
    drafter.load_state_dict(state)
    return drafter.float().eval().requires_grad_(False)


def _content(
    drafter: DSparkDrafter, target: GGUFFile, precision: Precision
) -> tuple[dict[str, Key], dict[str, TensorSource]]:
    state = union_tensors(drafter)
    keys = {
        **drafter_keys(drafter.config),
        FILE_TYPE: file_type(precision),
        **target.tokenizer(),
        MASK: Key(drafter.config.mask_token_id, "UINT32"),
    }
    tensors = {
        stored: TensorSource(
            tuple(state[name].shape),
            _loader(state[name]),
            "F32" if stored in CONFIDENCE else precision_of(state[name].shape, precision),
        )
        for name, stored in tensor_names(drafter.config.layers).items()
    }
    return keys, tensors


def _planned(path: Path, keys: Keys, tensors: Mapping[str, TensorSource]) -> GGUFFile:
    """What a file will be, before it is written."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return GGUFFile(path, dict(keys), shapes, {name: str(tensor.precision) for name, tensor in tensors.items()})


def _loader(tensor: Tensor) -> Callable[[], Floats]:
    return lambda: tensor.float().numpy()
