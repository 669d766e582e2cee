"""The drafter as a GGUF file: written, read back, and checked both times (`dflash.py` has the format)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dspark.drafters.base import Drafter
from dspark.drafters.checkpoint import MARKOV_W2, parameters, served_form
from dspark.drafters.config import DrafterConfig
from dspark.drafters.dspark import DSparkDrafter
from dspark.engines import ENGINES
from dspark.engines.base import require_support
from dspark.errors import IntegrityError
from dspark.export.dflash import (
    CONFIDENCE,
    DRAFT_IDS,
    draft_id_problems,
    drafter_config,
    drafter_keys,
    file_problems,
    tensor_names,
    tensor_problems,
)
from dspark.io.gguffile import (
    FILE_TYPE,
    INTEGERS,
    MASK,
    Floats,
    GGUFFile,
    Integers,
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
        state: its tensors by the drafter's own names, float32; with a reduced vocabulary `head` is among them.
        draft_token_ids: target ids of the rows of `head`, [Vd]; None: the whole vocabulary.
    """

    file: GGUFFile
    state: dict[str, Floats]
    draft_token_ids: Integers | None


@dataclass(frozen=True)
class Fault:
    """One way to make a drafter's file wrong.

    Attributes:
        keys: that are written instead of the right ones.
        shift: added to the ids of a reduced vocabulary, round the end of the target's.
    """

    keys: Keys = field(default_factory=dict)
    shift: int = 0


def write_drafter_gguf(path: Path, drafter: Drafter, target: GGUFFile, *, precision: Precision = "F32") -> None:
    """Write a drafter for a target that is a GGUF file too, if nothing about it would mislead llama.cpp.

    A reduced draft vocabulary stays one, so that drafting costs a head of its rows only. A drafter without a sequential
    head gets the neutral one of `served_form`, with which llama.cpp takes it for DSpark and its slots for DSpark's.

    Args:
        target: whose tokenizer keys the file repeats.
        precision: of the matrices, the head's rows included; norms and the confidence head stay F32.
    Raises:
        SettingsError: a drafter that llama.cpp cannot run.
        IntegrityError: the target's file is another target's.
        PreflightError: the gguf package is missing.
    """
    served = served_form(drafter)
    config = served.config
    require_support(ENGINES["llamacpp"], config)
    keys, tensors = _content(served, target, precision)
    if problems := file_problems(_planned(path, keys, tensors), config, target):
        raise IntegrityError(f"{path}: not written: {'; '.join(problems)}", "make the target's GGUF file again")
    write_gguf(path, keys, tensors)


def write_with_fault(path: Path, drafter: Drafter, target: GGUFFile, fault: Fault) -> None:
    """Write a drafter's file that is wrong in one way, unchecked: for negative controls."""
    keys, tensors = _content(served_form(drafter), target, "F32")
    if fault.shift:
        shifted = (drafter.draft_token_ids.cpu() + fault.shift) % drafter.config.vocab_size
        tensors[DRAFT_IDS] = _integers(shifted)
    write_gguf(path, {**keys, **fault.keys}, tensors)


def read_drafter_gguf(path: Path, config: DrafterConfig, target: GGUFFile) -> DrafterGGUF:
    """Read a drafter's file back, checked against the drafter and the target that it should be for.

    Raises:
        IntegrityError: not a GGUF file, or not this drafter's; names every problem.
    """
    file = read_gguf(path)
    if problems := file_problems(file, config, target):
        raise IntegrityError(f"{path}: {'; '.join(problems)}", "write it again: an engine would not notice all of this")
    tensors, ids = file.tensors(), file.integers().get(DRAFT_IDS)
    if ids is not None and (problems := draft_id_problems(ids, config)):
        raise IntegrityError(f"{path}: {'; '.join(problems)}", "write it again: an engine would not notice")
    broken = [name for name, values in tensors.items() if not np.isfinite(values).all()]
    if broken:
        raise IntegrityError(f"{path}: not finite: {', '.join(broken)}", "train the drafter again")
    names = {name: stored for name, stored in tensor_names(config).items() if stored != DRAFT_IDS}
    return DrafterGGUF(file, {name: tensors[stored] for name, stored in names.items()}, ids)


def load_drafter_gguf(path: Path, record: TargetRecord, embedding: Tensor, head: Tensor) -> DSparkDrafter:
    """The drafter of a file that anybody may have written, for a target; float32, where the target is.

    A reduced vocabulary comes with the file's own rows of the head, as the engine uses these and not the target's; rows
    that are not in the order of their ids are put into it.

    Args:
        embedding, head: of the target, [V, d].
    Raises:
        IntegrityError: not a GGUF file, or its tensors are not those that its keys describe.
        DataError: not a DSpark drafter for this target.
    """
    file = read_gguf(path)
    config = drafter_config(file, record)
    config.require_target(record, path.name)
    problems = tensor_problems(file, config)
    ids = None if problems else file.integers().get(DRAFT_IDS)
    if ids is not None:
        problems = draft_id_problems(ids, config)
    if problems:
        raise IntegrityError(f"{path}: {'; '.join(problems)}", "fetch or convert the drafter again")
    tensors = file.tensors()
    state = {
        name: torch.tensor(tensors[stored]) for name, stored in tensor_names(config).items() if stored != DRAFT_IDS
    }
    if ids is None:
        drafter = DSparkDrafter(config, embedding, head)
    else:
        order = torch.from_numpy(ids).argsort()
        drafter = DSparkDrafter(config, embedding, head, torch.from_numpy(ids)[order])
        drafter.head = state.pop("head")[order]
        state[MARKOV_W2] = state[MARKOV_W2][order]
    drafter.load_state_dict(state)
    return drafter.to(embedding.device).float().eval().requires_grad_(False)


def _content(
    drafter: Drafter, target: GGUFFile, precision: Precision
) -> tuple[dict[str, Key], dict[str, TensorSource]]:
    config = drafter.config
    keys = {
        **drafter_keys(config),
        FILE_TYPE: file_type(precision),
        **target.tokenizer(),
        MASK: Key(config.mask_token_id, "UINT32"),
    }
    state = {**parameters(drafter), "head": drafter.head.cpu()}

    def source(name: str, stored: str) -> TensorSource:
        if stored == DRAFT_IDS:
            return _integers(drafter.draft_token_ids.cpu())
        shape = tuple(state[name].shape)
        kind = "F32" if stored in CONFIDENCE else precision_of(shape, precision)
        return TensorSource(shape, _loader(state[name]), kind)

    return keys, {stored: source(name, stored) for name, stored in tensor_names(config).items()}


def _planned(path: Path, keys: Keys, tensors: Mapping[str, TensorSource]) -> GGUFFile:
    """What a file will be, before it is written."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return GGUFFile(path, dict(keys), shapes, {name: str(tensor.precision) for name, tensor in tensors.items()})


def _integers(ids: Tensor) -> TensorSource:
    return TensorSource(tuple(ids.shape), lambda: ids.numpy(), INTEGERS)


def _loader(tensor: Tensor) -> Callable[[], Floats]:
    return lambda: tensor.float().numpy()
