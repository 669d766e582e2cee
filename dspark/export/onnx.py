"""ONNX: both graphs of a drafter, the files of weights that they share, and `io.json`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dspark.drafters.base import Drafter
from dspark.drafters.config import DrafterConfig
from dspark.drafters.kinds import require_dspark
from dspark.engines.onnx_io import (
    CACHED,
    ENDS,
    IO_FILE,
    STATELESS,
    WEIGHTS,
    EndsPiece,
    EndsSpec,
    GraphSpec,
    OnnxIO,
    TensorSpec,
)
from dspark.export.graphs import CachedBlock, StatelessBlock
from dspark.export.onnx_files import describe_weights, digests_of, floats, integers, move_weights, trace, write_graph
from dspark.io.jsonfile import write_model

if TYPE_CHECKING:
    from dspark.targets.record import TargetRecord


def export_onnx(
    drafter: Drafter, record: TargetRecord, out: Path, *, opset: int = 20, stateless: bool = True
) -> OnnxIO:
    """Write both graphs, the drafter's weights, those that are the target's, and `io.json` into a folder.

    Args:
        drafter: any dtype; exported in float32.
        record: the target it belongs to.
        out: the folder; made if it is not there.
        opset: of the default ONNX domain, at most 20 (TensorRT's limit).
        stateless: False leaves that graph's file out: a drafter that is only decoded with has no use for it, and each
            graph takes the exporter many seconds.
    Raises:
        SettingsError: a kind of drafter that has no graphs.
        StageError: the graph that came out is not valid ONNX or needs another opset or domain.
    """
    out.mkdir(parents=True, exist_ok=True)
    exact = copy.deepcopy(require_dspark(drafter, "the export as ONNX")).float().cpu().eval()
    config = drafter.config
    specs = _stateless_spec(config), _cached_spec(config)
    models = {}
    if stateless:
        models[STATELESS] = trace(StatelessBlock(exact), _stateless_example(config), specs[0], opset)
    models[CACHED] = trace(CachedBlock(exact), _cached_example(config), specs[1], opset)
    theirs = digests_of(embedding=exact.embedding, head=exact.head)
    places = move_weights(list(models.values()), out / ENDS, theirs.__contains__)
    move_weights(list(models.values()), out / WEIGHTS, lambda digest: digest not in theirs)
    for name, model in models.items():
        write_graph(model, out / name, opset)
    description = OnnxIO(
        opset=opset,
        gamma=config.gamma,
        stateless=specs[0],
        cached=specs[1],
        weights=describe_weights(out / WEIGHTS),
        ends=_describe_ends(out / ENDS, places, theirs),
        taps=config.taps,
        hidden_size=config.hidden_size,
        mask_token_id=config.mask_token_id,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.proposed_vocab_size,
        draft_token_ids=None if config.draft_vocab_size is None else tuple(exact.draft_token_ids.tolist()),
        layers=config.layers,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position=config.max_position,
        embedding_digest=record.embedding_digest,
        head_digest=record.head_digest,
    )
    write_model(out / IO_FILE, description)
    return description


def _describe_ends(path: Path, places: dict[str, int], theirs: dict[str, tuple[str, bool]]) -> EndsSpec:
    """The file of the target's ends, and how it is put together from the target."""
    pieces = [
        EndsPiece.model_validate({"tensor": theirs[digest][0], "transposed": theirs[digest][1], "offset": offset})
        for digest, offset in sorted(places.items(), key=lambda item: item[1])
    ]
    return EndsSpec(**describe_weights(path).model_dump(), pieces=tuple(pieces))


# ---------------------------------------------------------------- inputs and outputs


def _stateless_spec(config: DrafterConfig) -> GraphSpec:
    return GraphSpec(
        file=STATELESS,
        inputs=(
            floats("features", "batch", "context", config.context_size, meaning="taps of positions 0, 1, ..."),
            integers("context_length", "batch", meaning="positions of the row that count, the rest is padding"),
            integers("anchor_ids", "batch", meaning="last committed token, at position context_length"),
        ),
        outputs=_drafted(config),
    )


def _cached_spec(config: DrafterConfig) -> GraphSpec:
    def state(name: str, axis: str, meaning: str) -> TensorSpec:
        return floats(name, config.layers, "batch", config.num_key_value_heads, axis, config.head_dim, meaning=meaning)

    logits = (config.gamma, config.proposed_vocab_size)
    return GraphSpec(
        file=CACHED,
        inputs=(
            floats("features", "batch", "new", config.context_size, meaning="taps of the positions behind the past"),
            integers("new_count", "batch", meaning="how many of them the row keeps"),
            state("past_keys", "past", "keys of positions 0, 1, ..."),
            state("past_values", "past", "values of positions 0, 1, ..."),
            integers("past_length", "batch", meaning="past positions of the row that count, the rest is not read"),
            integers("anchor_ids", "batch", meaning="last committed token, at position past_length + new_count"),
            floats("temperature", "batch", meaning="of the row's sampling; 0: the most likely tokens"),
            floats("noise", "batch", *logits, meaning="independent standard Gumbel numbers, never used twice"),
        ),
        outputs=(
            *_drafted(config),
            floats(
                "draft_logits",
                "batch",
                *logits,
                meaning="of the draft vocabulary; draft_ids are the token ids of"
                " argmax(draft_logits + temperature * noise)",
            ),
            state("new_keys", "new", "keys to store behind the row's past"),
            state("new_values", "new", "values to store behind the row's past"),
        ),
    )


def _drafted(config: DrafterConfig) -> tuple[TensorSpec, ...]:
    drafted = integers("draft_ids", "batch", config.gamma, meaning="drafted tokens, ids of the target")
    if not config.confidence:
        return (drafted,)
    meaning = "sigmoid: P(accepted | the tokens before it were)"
    return drafted, floats("confidence_logits", "batch", config.gamma, meaning=meaning)


# No size that may vary is 0 or 1 here, nor equal to another: the tracer would take it for a constant.
def _stateless_example(config: DrafterConfig) -> tuple[Tensor, ...]:
    return torch.zeros(2, 5, config.context_size), torch.tensor([4, 5]), torch.tensor([0, 1])


def _cached_example(config: DrafterConfig) -> tuple[Tensor, ...]:
    past = torch.zeros(config.layers, 2, config.num_key_value_heads, 7, config.head_dim)
    features = torch.zeros(2, 5, config.context_size)
    noise = torch.zeros(2, config.gamma, config.proposed_vocab_size)
    lengths = torch.tensor([4, 5]), torch.tensor([6, 7])
    return features, lengths[0], past, past.clone(), lengths[1], torch.tensor([0, 1]), torch.ones(2), noise
