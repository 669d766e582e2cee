"""Drafter checkpoints: the training, the union and DeepSpec's own dialect, written and read.

A folder of `config.json` and `model.safetensors`, tensor names without a prefix, the target's embedding and head left
out (engines share the target's). With a reduced draft vocabulary

- the training dialect keeps W2 as it is, [Vd, r], and says which tokens its rows are: `d2t_ids`, absolute, int64 [Vd];
- the union dialect has the whole vocabulary, which every engine loads: rows of W2 for the other tokens are zero but for
  channel 0, which is the constant 1 in every row of W1 (`heads.py`), so that their logits sink by 1000.

Engines know DSpark, and DFlash only with other slots: a drafter without a sequential head (DFlash as DeepSpec trains
it) is stored in the union with a neutral one, W2 = 0, which changes no draft and which every engine that reads DSpark
loads (`served_form`). The key `dspark` of `config.json` says that there was none.

DeepSpec's dialect is the union with the target's embedding and head beside it, which its evaluator wants; engines must
not be given it (engine-formats.md, section 0).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.config.models import DType
from dspark.drafters.base import Drafter
from dspark.drafters.config import DrafterConfig
from dspark.drafters.description import Dialect, describe, read_description
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.kinds import build_drafter
from dspark.errors import IntegrityError, SettingsError, StageError
from dspark.io.atomic import atomic_path
from dspark.io.digest import digest_file
from dspark.io.jsonfile import read_json, write_json

if TYPE_CHECKING:
    from dspark.targets.record import TargetRecord

CONFIG, WEIGHTS = "config.json", "model.safetensors"
DRAFT_IDS = "d2t_ids"
MARKOV_W1, MARKOV_W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
# Exact in bfloat16 and float16; beside it no trained logit counts, and exp() of it is 0 in float32.
UNREACHABLE = -1000.0
# Of a neutral sequential head. Small, and what a tile of a matrix unit takes at least.
NEUTRAL_RANK = 16


def write_training_checkpoint(folder: Path, drafter: Drafter, record: TargetRecord) -> None:
    """Write the training dialect, in the drafter's own dtype.

    Raises:
        StageError: if a tensor holds NaN or infinity.
    """
    tensors = parameters(drafter)
    if drafter.config.draft_vocab_size is not None:
        tensors[DRAFT_IDS] = drafter.draft_token_ids.cpu()
    dtype = str(drafter.dtype).removeprefix("torch.")
    _write(folder, tensors, drafter, record, dialect="training", dtype=dtype)


def write_union(
    folder: Path, drafter: Drafter, record: TargetRecord, *, dtype: DType = "bfloat16", untrained: bool = False
) -> None:
    """Write the union dialect: one checkpoint for SGLang, vLLM, speculators and llama.cpp's converter.

    Args:
        untrained: allow tensors that training never moved (a random drafter in a test).
    Raises:
        StageError: if a tensor holds NaN or infinity, or looks as if training never moved it.
    """
    if not untrained:
        _check_moved(drafter)
    wanted: torch.dtype = getattr(torch, dtype)
    served = served_form(drafter)
    tensors = {name: value.to(wanted) for name, value in union_tensors(served).items()}
    _write(folder, tensors, served, record, dialect="union", dtype=dtype, trained=drafter.config)


def write_deepspec(
    folder: Path,
    drafter: Drafter,
    record: TargetRecord,
    head: Tensor,
    *,
    dtype: DType = "bfloat16",
    untrained: bool = False,
) -> None:
    """Write the dialect of DeepSpec's evaluator: the union with the target's embedding and head, stored twice if tied.

    Args:
        head: the target's whole one, [V, d]; the drafter may hold some of its rows only.
        untrained: as in `write_union`.
    Raises:
        StageError: as `write_union`.
    """
    if not untrained:
        _check_moved(drafter)
    wanted: torch.dtype = getattr(torch, dtype)
    # Its evaluator runs drafters without a sequential head; a reduced vocabulary needs the neutral one.
    native = drafter.config.markov_type == "none" and drafter.config.draft_vocab_size is None
    stored = drafter if native else served_form(drafter)
    tensors = {**union_tensors(stored), EMBEDDING: drafter.embedding.cpu(), HEAD: head.cpu()}
    copies = {name: value.to(wanted, copy=True).contiguous() for name, value in tensors.items()}
    _write(folder, copies, stored, record, dialect="deepspec", dtype=dtype, trained=drafter.config)


def served_form(drafter: Drafter) -> Drafter:
    """The drafter as engines are given it: with a neutral sequential head if it has none, else itself.

    W1 is 1 in channel 0 and 0 beside it and W2 is 0: the bias is 0, so that it drafts exactly the same. A reduced
    vocabulary then has the channel that keeps other tokens out (`heads.py`).
    """
    config = drafter.config
    if not isinstance(drafter, DSparkDrafter) or config.markov_type != "none":
        return drafter
    ids = None if config.draft_vocab_size is None else drafter.draft_token_ids.cpu()
    described = config.model_copy(update={"markov_type": "vanilla", "markov_rank": NEUTRAL_RANK})
    embedding = drafter.embedding.cpu()
    # Its rows of the head are all that a reduced vocabulary has of it; they are put in afterwards.
    served = DSparkDrafter(described, embedding, embedding, ids).to(drafter.dtype)
    w1 = torch.zeros(config.vocab_size, NEUTRAL_RANK, dtype=drafter.dtype)
    w1[:, 0] = 1
    w2 = torch.zeros(config.proposed_vocab_size, NEUTRAL_RANK, dtype=drafter.dtype)
    served.load_state_dict(parameters(drafter) | {MARKOV_W1: w1, MARKOV_W2: w2})
    served.embedding, served.head = embedding, drafter.head.cpu()
    return served.eval().requires_grad_(False)


def union_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """The drafter's tensors with the whole vocabulary, by name, in its own dtype, on the CPU.

    Raises:
        SettingsError: a reduced vocabulary without the constant channel, which no drafter trained here has.
    """
    tensors = parameters(drafter)
    if drafter.config.draft_vocab_size is not None:
        if not isinstance(drafter, DSparkDrafter) or not drafter.markov_head.constant_channel:
            raise SettingsError(
                "a drafter with a reduced vocabulary whose Markov head has no constant channel cannot be written with "
                "the whole one: its other tokens could not be kept out",
                "use the file that it came from",
            )
        reduced = tensors[MARKOV_W2]
        whole = reduced.new_zeros(drafter.config.vocab_size, drafter.config.markov_rank)
        whole[:, 0] = UNREACHABLE
        whole[drafter.draft_token_ids.cpu()] = reduced
        tensors[MARKOV_W2] = whole
    return tensors


def read_checkpoint(folder: Path, embedding: Tensor, head: Tensor, *, record: TargetRecord | None = None) -> Drafter:
    """Read any dialect on the target's embedding and head, [V, d].

    All but the training dialect give a drafter with the whole vocabulary, as an engine would see it.

    Args:
        record: the target it must belong to; None: not checked.
    Returns:
        in eval mode, without gradients, in the stored dtype, on the embedding's device.
    Raises:
        IntegrityError: if the weights are not those the config names, a tensor is missing, unexpected, of another shape
            or not finite, or the drafter belongs to another target.
    """
    config, own = read_description(read_json(folder / CONFIG, IntegrityError), str(folder / CONFIG))
    if record is not None:
        _check_target(folder, own.get("target", {}), record)
    path = folder / WEIGHTS
    if not path.is_file() or digest_file(path) != own.get("weights_sha256"):
        raise IntegrityError(f"{path}: missing, or not the weights that {CONFIG} names")
    try:
        tensors = load_file(path)
    except SafetensorError as reason:
        raise IntegrityError(f"{path}: not a safetensors file: {reason}") from None
    if own["dialect"] == "deepspec":
        _take_ends(path, tensors, embedding, head)
    ids = tensors.pop(DRAFT_IDS, None)
    _check_finite(tensors, IntegrityError)
    try:
        drafter = build_drafter(config, embedding, head, ids)
    except SettingsError as reason:
        raise IntegrityError(f"{folder}: {reason.message}", reason.hint) from None
    _check_names(path, tensors, drafter)
    drafter.load_state_dict(tensors, assign=True)
    return drafter.to(embedding.device).eval().requires_grad_(False)


def _write(
    folder: Path,
    tensors: dict[str, Tensor],
    drafter: Drafter,
    record: TargetRecord,
    *,
    dialect: Dialect,
    dtype: str,
    trained: DrafterConfig | None = None,
) -> None:
    _check_finite(tensors, StageError)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / WEIGHTS) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    digest = digest_file(folder / WEIGHTS)
    description = describe(
        drafter.config, record, dialect=dialect, dtype=dtype, weights_sha256=digest, trained=trained or drafter.config
    )
    write_json(folder / CONFIG, description)  # last: it names the weights


def parameters(drafter: Drafter) -> dict[str, Tensor]:
    """The drafter's tensors as they are, by name, on the CPU."""
    return {name: value.detach().cpu().contiguous() for name, value in drafter.state_dict().items()}


def _check_finite(tensors: dict[str, Tensor], error: type[StageError] | type[IntegrityError]) -> None:
    broken = [name for name, value in tensors.items() if value.is_floating_point() and not value.isfinite().all()]
    if broken:
        raise error(f"the drafter's weights are not finite: {', '.join(broken)}", "train it again")


def unmoved(drafter: Drafter) -> list[str]:
    """Names of tensors that should have learned and are all 0 or all 1, as before training."""
    learned = {name: value.detach() for name, value in drafter.named_parameters()}  # buffers do not learn
    return [name for name, value in learned.items() if bool((value == 0).all()) or bool((value == 1).all())]


def _check_moved(drafter: Drafter) -> None:
    if still := unmoved(drafter):
        raise StageError(
            f"training never moved these tensors of the drafter, they are all 0 or all 1: {', '.join(still)}",
            "an export without them would load everywhere and draft badly: train longer, or look for a broken gradient",
        )


def tensor_problems(tensors: dict[str, Tensor], drafter: Drafter) -> list[str]:
    """In what names and shapes of tensors are not the drafter's."""
    expected = drafter.state_dict()
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [f"{name} is unexpected" for name in tensors if name not in expected]
    problems += [
        f"{name} is {list(value.shape)}, expected {list(expected[name].shape)}"
        for name, value in tensors.items()
        if name in expected and value.shape != expected[name].shape
    ]
    return problems


def _check_names(path: Path, tensors: dict[str, Tensor], drafter: Drafter) -> None:
    problems = tensor_problems(tensors, drafter)
    if len({value.dtype for value in tensors.values()}) > 1:
        problems.append("its tensors have different dtypes")
    if problems:
        raise IntegrityError(f"{path}: {'; '.join(problems)}")


def _take_ends(path: Path, tensors: dict[str, Tensor], embedding: Tensor, head: Tensor) -> None:
    """Take the target's matrices out of a checkpoint that stores them.

    Raises:
        IntegrityError: they are missing, or another target's.
    """
    for name, wanted in ((EMBEDDING, embedding), (HEAD, head)):
        found = tensors.pop(name, None)
        if found is None or not torch.equal(found, wanted.cpu().to(found.dtype)):
            raise IntegrityError(f"{path}: {name} is {'missing' if found is None else 'not that of the target'}")


def _check_target(folder: Path, found: dict[str, str], record: TargetRecord) -> None:
    wanted = {"embedding_digest": record.embedding_digest, "head_digest": record.head_digest}
    different = [key for key, value in wanted.items() if found.get(key) != value]
    if different:
        raise IntegrityError(
            f"{folder}: the drafter belongs to {found.get('name', 'another target')}, not to this {record.name} "
            f"({', '.join(different)} differ)",
            "train a drafter for this target",
        )
