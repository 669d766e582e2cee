"""From a torch module to ONNX files: the graph, its weights in files beside it, and nothing about where it was made.

The files are a function of the module alone: no time, no source path, no name of a machine or user is in them, so
that equal modules have equal digests (package.md, rule 12 and "Digests").
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import onnx_ir as ir
import torch
from onnx import checker
from torch import Tensor, nn
from torch.export import Dim

from dspark import __version__
from dspark.engines.onnx_io import GraphSpec, TensorSpec, WeightsSpec
from dspark.errors import StageError
from dspark.io.atomic import atomic_path, write_bytes
from dspark.io.digest import digest_file

_EXTERNAL_BYTES = 1024  # smaller tensors stay in the graph
_ALIGNMENT = 4096  # of weights in their file, so that a runtime can map them


def floats(name: str, *shape: int | str, meaning: str) -> TensorSpec:
    """A float32 input or output; an axis is a size or the name of a size that may vary."""
    return TensorSpec(name=name, dtype="float32", shape=shape, meaning=meaning)


def integers(name: str, *shape: int | str, meaning: str) -> TensorSpec:
    """An int64 input or output; an axis is a size or the name of a size that may vary."""
    return TensorSpec(name=name, dtype="int64", shape=shape, meaning=meaning)


def trace(module: nn.Module, example: tuple[Tensor, ...], spec: GraphSpec, opset: int) -> ir.Model:
    """The graph of a module; its weights are still in memory.

    Args:
        module: in float32, on the CPU.
        example: one tensor per input. No size that may vary may be 0 or 1 there, nor equal to another: the tracer would
            take it for a constant.
        spec: what the graph must come out as.
        opset: of the default ONNX domain.
    Raises:
        StageError: torch exports no graph, or one with other inputs or outputs.
    """
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


def describe_weights(path: Path) -> WeightsSpec:
    """Size and digest of a file of weights."""
    return WeightsSpec(file=path.name, bytes=path.stat().st_size, sha256=digest_file(path))


def digests_of(**matrices: Tensor) -> dict[str, tuple[str, bool]]:
    """(name, transposed?) by the digest of the matrices' bytes: the exporter may have turned them round."""
    found: dict[str, tuple[str, bool]] = {}
    for name, matrix in matrices.items():
        for transposed in (False, True):
            side = (matrix.T if transposed else matrix).contiguous().numpy()
            found.setdefault(hashlib.sha256(side.data).hexdigest(), (name, transposed))
    return found


def move_weights(models: Sequence[ir.Model], path: Path, belongs: Callable[[str], bool]) -> dict[str, int]:
    """Write large tensors of all models into one file, equal ones once, and leave references in the models.

    Args:
        belongs: whether a tensor of that digest goes into this file.
    Returns:
        the offset in the file by digest.
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
    return {digest: offset for digest, (offset, _) in places.items()}


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


def write_graph(model: ir.Model, path: Path, opset: int) -> None:
    """Write a graph whose weights lie in files beside it, without what the exporter noted, and read it back.

    Raises:
        StageError: it is not valid ONNX, or needs another opset or domain.
    """
    _anonymise(model)
    write_bytes(path, ir.to_proto(model).SerializeToString(deterministic=True))
    check_graph(path, opset)


def check_graph(path: Path, opset: int) -> None:
    """Refuse a file that is no graph for runtimes that know the default domain up to `opset`.

    Raises:
        StageError: as it says.
    """
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
