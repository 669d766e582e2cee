"""ONNX: both graphs of a drafter, the files of weights that they share, and `io.json`.

The files are a function of the drafter alone: no time, no source path, no name of a machine or user is in them, so
that equal drafters have equal digests (package.md, rule 12 and "Digests").
"""

from __future__ import annotations

import copy
import hashlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import onnx_ir as ir
import torch
from onnx import checker
from torch import Tensor, nn
from torch.export import Dim

from dspark import __version__
from dspark.drafters.config import DrafterConfig
from dspark.drafters.dspark import DSparkDrafter
from dspark.engines.onnx_io import CACHED, ENDS, IO_FILE, STATELESS, WEIGHTS, GraphSpec, OnnxIO, TensorSpec, WeightsSpec
from dspark.errors import StageError
from dspark.export.graphs import CachedBlock, StatelessBlock
from dspark.io.atomic import atomic_path, write_bytes
from dspark.io.digest import digest_file
from dspark.io.jsonfile import write_model

if TYPE_CHECKING:
    from dspark.targets.record import TargetRecord

_EXTERNAL_BYTES = 1024  # smaller tensors stay in the graph
_ALIGNMENT = 4096  # of weights in their file, so that a runtime can map them


def export_onnx(drafter: DSparkDrafter, record: TargetRecord, out: Path, *, opset: int = 20) -> OnnxIO:
    """Write both graphs, the drafter's weights, those that are the target's, and `io.json` into a folder.

    Args:
        drafter: any dtype; exported in float32.
        record: the target it belongs to.
        out: the folder; made if it is not there.
        opset: of the default ONNX domain, at most 20 (TensorRT's limit).
    Raises:
        StageError: the graph that came out is not valid ONNX or needs another opset or domain.
    """
    out.mkdir(parents=True, exist_ok=True)
    exact = copy.deepcopy(drafter).float().cpu().eval()
    stateless, cached = _stateless_spec(drafter.config), _cached_spec(drafter.config)
    models = {
        STATELESS: _to_onnx(StatelessBlock(exact), _stateless_example(drafter.config), stateless, opset),
        CACHED: _to_onnx(CachedBlock(exact), _cached_example(drafter.config), cached, opset),
    }
    theirs = _digests(exact.embedding, exact.head)
    _move_weights(list(models.values()), out / ENDS, theirs.__contains__)
    _move_weights(list(models.values()), out / WEIGHTS, lambda digest: digest not in theirs)
    for name, model in models.items():
        _anonymise(model)
        write_bytes(out / name, ir.to_proto(model).SerializeToString(deterministic=True))
        _check(out / name, opset)
    config = drafter.config
    description = OnnxIO(
        opset=opset,
        gamma=config.gamma,
        stateless=stateless,
        cached=cached,
        weights=_weights(out / WEIGHTS),
        ends=_weights(out / ENDS),
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


# ---------------------------------------------------------------- inputs and outputs


def _stateless_spec(config: DrafterConfig) -> GraphSpec:
    return GraphSpec(
        file=STATELESS,
        inputs=(
            _float("features", "batch", "context", config.context_size, meaning="taps of positions 0, 1, ..."),
            _int("context_length", "batch", meaning="positions of the row that count, the rest is padding"),
            _int("anchor_ids", "batch", meaning="last committed token, at position context_length"),
        ),
        outputs=_drafted(config),
    )


def _cached_spec(config: DrafterConfig) -> GraphSpec:
    def state(name: str, axis: str, meaning: str) -> TensorSpec:
        return _float(name, config.layers, "batch", config.num_key_value_heads, axis, config.head_dim, meaning=meaning)

    logits = (config.gamma, config.proposed_vocab_size)
    return GraphSpec(
        file=CACHED,
        inputs=(
            _float("features", "batch", "new", config.context_size, meaning="taps of the positions behind the past"),
            _int("new_count", "batch", meaning="how many of them the row keeps"),
            state("past_keys", "past", "keys of positions 0, 1, ..."),
            state("past_values", "past", "values of positions 0, 1, ..."),
            _int("past_length", "batch", meaning="past positions of the row that count, the rest is not read"),
            _int("anchor_ids", "batch", meaning="last committed token, at position past_length + new_count"),
            _float("temperature", "batch", meaning="of the row's sampling; 0: the most likely tokens"),
            _float("noise", "batch", *logits, meaning="independent standard Gumbel numbers, never used twice"),
        ),
        outputs=(
            *_drafted(config),
            _float(
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


def _drafted(config: DrafterConfig) -> tuple[TensorSpec, TensorSpec]:
    return (
        _int("draft_ids", "batch", config.gamma, meaning="drafted tokens, ids of the target"),
        _float("confidence_logits", "batch", config.gamma, meaning="sigmoid: P(accepted | the tokens before it were)"),
    )


def _float(name: str, *shape: int | str, meaning: str) -> TensorSpec:
    return TensorSpec(name=name, dtype="float32", shape=shape, meaning=meaning)


def _int(name: str, *shape: int | str, meaning: str) -> TensorSpec:
    return TensorSpec(name=name, dtype="int64", shape=shape, meaning=meaning)


# No size that may vary is 0 or 1 here, nor equal to another: the tracer would take it for a constant.
def _stateless_example(config: DrafterConfig) -> tuple[Tensor, ...]:
    return torch.zeros(2, 5, config.context_size), torch.tensor([4, 5]), torch.tensor([0, 1])


def _cached_example(config: DrafterConfig) -> tuple[Tensor, ...]:
    past = torch.zeros(config.layers, 2, config.num_key_value_heads, 7, config.head_dim)
    features = torch.zeros(2, 5, config.context_size)
    noise = torch.zeros(2, config.gamma, config.proposed_vocab_size)
    lengths = torch.tensor([4, 5]), torch.tensor([6, 7])
    return features, lengths[0], past, past.clone(), lengths[1], torch.tensor([0, 1]), torch.ones(2), noise


# ---------------------------------------------------------------- graphs


def _to_onnx(module: nn.Module, example: tuple[Tensor, ...], spec: GraphSpec, opset: int) -> ir.Model:
    sizes = {axis: Dim(axis, min=1, max=2**20) for item in spec.inputs for axis in item.shape if isinstance(axis, str)}
    shapes = tuple(
        {index: sizes[axis] for index, axis in enumerate(item.shape) if isinstance(axis, str)} for item in spec.inputs
    )
    with torch.no_grad(), _quiet():
        program = torch.onnx.export(
            module.eval(),
            example,
            input_names=[item.name for item in spec.inputs],
            output_names=[item.name for item in spec.outputs],
            dynamo=True,
            opset_version=opset,
            dynamic_shapes=shapes,
            verbose=False,
        )
    if program is None:
        raise StageError(f"torch exported no graph for {spec.file}")
    model: ir.Model = program.model
    _check_signature(model, spec)
    return model


def _check_signature(model: ir.Model, spec: GraphSpec) -> None:
    for found, wanted in ((model.graph.inputs, spec.inputs), (model.graph.outputs, spec.outputs)):
        described = [(value.name, _shape(value)) for value in found]
        if described != [(item.name, item.shape) for item in wanted]:
            raise StageError(f"{spec.file}: torch exported {described}, expected {[item.name for item in wanted]}")


def _shape(value: ir.Value) -> tuple[int | str | None, ...]:
    return tuple(axis if isinstance(axis, int) else axis.value for axis in value.shape or ())


def _weights(path: Path) -> WeightsSpec:
    return WeightsSpec(file=path.name, bytes=path.stat().st_size, sha256=digest_file(path))


def _digests(*matrices: Tensor) -> set[str]:
    """Of the matrices' bytes, as they are and transposed: the exporter may have turned them round."""
    sides = (side for matrix in matrices for side in (matrix, matrix.T))
    return {hashlib.sha256(side.contiguous().numpy().data).hexdigest() for side in sides}


def _move_weights(models: Sequence[ir.Model], path: Path, belongs: Callable[[str], bool]) -> None:
    """Write large tensors of all models into one file, equal ones once, and leave references in the models.

    Args:
        belongs: whether a tensor of that digest goes into this file.
    """
    places: dict[str, tuple[int, int]] = {}
    with atomic_path(path) as temporary, temporary.open("wb") as handle:
        for model in models:
            for value in model.graph.initializers.values():
                tensor = value.const_value
                if tensor is None or tensor.nbytes < _EXTERNAL_BYTES or isinstance(tensor, ir.ExternalTensor):
                    continue
                data = tensor.tobytes()
                digest = hashlib.sha256(data).hexdigest()
                if not belongs(digest):
                    continue
                offset, length = _place(digest, data, places, handle)
                value.const_value = ir.ExternalTensor(
                    path.name,
                    offset,
                    length,
                    tensor.dtype,
                    shape=ir.Shape(tensor.shape.numpy()),
                    name=value.name or "",
                    base_dir=path.parent,
                )


def _place(digest: str, data: bytes, places: dict[str, tuple[int, int]], handle: BinaryIO) -> tuple[int, int]:
    if digest not in places:
        handle.write(b"\0" * (-handle.tell() % _ALIGNMENT))
        places[digest] = (handle.tell(), len(data))
        handle.write(data)
    return places[digest]


def _anonymise(model: ir.Model) -> None:
    """Remove what the exporter notes about where the model came from: stack traces, source files, scopes."""
    model.producer_name, model.producer_version = "dspark", __version__
    model.domain = model.doc_string = None
    model.metadata_props.clear()
    for function in model.functions.values():
        _forget(function)
        for node in function:
            _forget_node(node)
    _forget(model.graph)
    for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()):
        _forget(value)
    for node in model.graph.all_nodes():
        _forget_node(node)


def _forget_node(node: ir.Node) -> None:
    _forget(node)
    for value in node.outputs:
        _forget(value)


def _forget(item: Any) -> None:
    item.metadata_props.clear()
    item.doc_string = None


def _check(path: Path, opset: int) -> None:
    try:
        checker.check_model(str(path), full_check=True)
    except checker.ValidationError as reason:
        raise StageError(f"{path.name}: not valid ONNX: {reason}") from reason
    opsets = ir.load(path).opset_imports
    if opsets != {"": opset}:
        raise StageError(f"{path.name}: needs the operator sets {dict(opsets)}, only opset {opset} was asked for")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's remarks about packages that nobody needs here."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
