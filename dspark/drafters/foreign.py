"""Drafters that others wrote: DeepSpec's flat layout, SpecForge's nested one, speculators' (engine-formats.md, 1.6, 4).

Hardly any engine notices a missing tensor. Here only a drafter whose forward pass is known in full is loaded, from its
`config.json` (`dialects.py`) to the last tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, arange, equal

from dspark.drafters.base import Drafter
from dspark.drafters.checkpoint import CONFIG, EMBEDDING, HEAD, read_checkpoint, tensor_problems
from dspark.drafters.config import DrafterConfig
from dspark.drafters.dialects import foreign_config, with_confidence
from dspark.drafters.kinds import build_drafter
from dspark.drafters.weights import drafter_files
from dspark.errors import DataError
from dspark.io.jsonfile import read_json

if TYPE_CHECKING:
    from dspark.targets.record import TargetRecord

_OFFSETS = "d2t"  # target id of draft token v, minus v
_IGNORED = (EMBEDDING, "t2d")  # of the target, or derived: engines skip them as well


def load_drafter(folder: Path, record: TargetRecord, embedding: Tensor, head: Tensor) -> Drafter:
    """The drafter of a checkpoint folder, whoever wrote it, for a target; in float32, where the target is.

    One of our own is checked to the byte.

    Args:
        embedding, head: of the target, [V, d].
    Raises:
        DataError: no checkpoint, or one of a kind that is not known here.
        IntegrityError: one of our own that is damaged, or another target's.
    """
    value = read_json(folder / CONFIG, DataError)
    if isinstance(value, dict) and isinstance(value.get("dspark"), dict):
        drafter = read_checkpoint(folder, embedding, head, record=record)
    else:
        config = foreign_config(value, record, str(folder / CONFIG))
        tensors = _tensors(folder)
        config = with_confidence(config, tensors, str(folder))
        ids = _draft_token_ids(folder, tensors, config, head)
        drafter = build_drafter(config, embedding, head, ids)
        _check(folder, tensors, drafter)
        drafter.load_state_dict(tensors)
    return drafter.to(embedding.device).float().eval().requires_grad_(False)


def _draft_token_ids(folder: Path, tensors: dict[str, Tensor], config: DrafterConfig, head: Tensor) -> Tensor | None:
    """Target ids of a reduced draft vocabulary, int64 [Vd]; None for the whole one.

    Raises:
        DataError: they are missing, or the drafter has a head of its own that is not the target's rows of them.
    """
    offsets, own = tensors.pop(_OFFSETS, None), tensors.pop(HEAD, None)
    if config.draft_vocab_size is None:
        return None
    if offsets is None or own is None or offsets.shape != (config.draft_vocab_size,):
        raise DataError(
            f"{folder}: a draft vocabulary of {config.draft_vocab_size} needs {_OFFSETS} and {HEAD} of as many rows",
            "fetch the drafter again",
        )
    ids = offsets.long() + arange(len(offsets))
    if not bool(((ids >= 0) & (ids < config.vocab_size)).all()):
        raise DataError(f"{folder}: {_OFFSETS} leads outside the vocabulary of {config.vocab_size}")
    if not equal(own, head.cpu()[ids].to(own.dtype)):
        raise DataError(f"{folder}: its {HEAD} is not made of the target's rows, which is not supported")
    return ids


def _tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, without a prefix.

    Raises:
        DataError: none, or unreadable ones.
    """
    found: dict[str, Tensor] = {}
    for path in (folder / name for name in drafter_files(folder)):
        try:
            found |= {name.removeprefix("model."): value for name, value in load_file(path).items()}
        except (SafetensorError, OSError) as reason:
            raise DataError(f"{path}: not a safetensors file: {reason}", "fetch the drafter again") from None
    return {name: value for name, value in found.items() if name not in _IGNORED and "rotary_emb" not in name}


def _check(folder: Path, kept: dict[str, Tensor], drafter: Drafter) -> None:
    """Refuse other tensors than the drafter's own.

    Raises:
        DataError: names them all.
    """
    problems = tensor_problems(kept, drafter)
    problems += [f"{name} is not finite" for name, value in kept.items() if not bool(value.isfinite().all())]
    if problems:
        raise DataError(f"{folder}: {'; '.join(problems)}", "fetch the drafter again, or name the target it is for")
