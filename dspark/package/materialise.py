"""Make the file of a target's embedding and head, which packages for large targets leave out, from the target itself.

The manifest holds its digest and `io.json` how it is put together; whoever serves has the target anyway. Works with
NumPy alone, in pieces of a few megabytes, and what comes out is kept only if it is the very file of the manifest.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.engines.onnx_io import EndsPiece, OnnxIO
from dspark.errors import IntegrityError, PreflightError
from dspark.io.atomic import atomic_path
from dspark.io.jsonfile import read_model, strict_loads
from dspark.io.progress import Progress
from dspark.package.layout import ONNX_IO
from dspark.package.manifest import FileEntry, Manifest
from dspark.package.tensors import read_header
from dspark.package.verify import read_manifest, verify
from dspark.targets.layout import INDEX, SINGLE
from dspark.targets.traits import EMBEDDINGS, HEAD

_BLOCK_ELEMENTS = 2**20
_KINDS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
_STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def left_out(manifest: Manifest) -> FileEntry | None:
    """The file that is to be made from the target, or None: the package is whole as it is."""
    return next((entry for entry in manifest.files if entry.made_from is not None), None)


def materialise(package: Path, target: Path, *, progress: Progress | None = None) -> Path | None:
    """Write the file that a package leaves out.

    Args:
        package: verified before and after.
        target: the target's model folder in the transformers layout; two of its tensors are read.
        progress: advanced by megabytes.
    Returns:
        the file, also if it was there; None: the package leaves nothing out.
    Raises:
        IntegrityError: the package is not sound, or the target is another one.
        PreflightError: the folder holds no such tensors, or space is short.
        Interrupted: at a safe point.
    """
    progress = progress or Progress()
    package = package.resolve()
    report = verify(package)
    entry = left_out(read_manifest(package))
    if entry is None or not report.absent:
        return None if entry is None else package / entry.path
    manifest = read_manifest(package)
    io = read_model(package / ONNX_IO, OnnxIO, IntegrityError)
    free = shutil.disk_usage(package).free
    if entry.bytes > free:
        raise PreflightError(
            f"{package}: {entry.bytes / 1e6:.0f} MB are to be written, {free / 1e6:.0f} MB are free", "free some space"
        )
    progress.start("materialise", -(-entry.bytes // 10**6), unit="MB")
    # Beside the package: a kill must leave no file in it that the manifest does not name.
    made = package.parent / f".{package.name}.{Path(entry.path).name}"
    with atomic_path(made) as temporary:
        if write_ends(temporary, io, target, manifest.inputs.target.dtype, progress) != entry.sha256:
            raise IntegrityError(
                f"{target}: its embedding and head are not those of {manifest.inputs.target.public_id} "
                f"at {manifest.inputs.target.revision}, which this drafter belongs to",
                "name a folder of that very target",
            )
    made.replace(package / entry.path)
    verify(package)
    return package / entry.path


def write_ends(path: Path, io: OnnxIO, target: Path, dtype: str, progress: Progress | None = None) -> str:
    """Put the file of a target's ends together as `io.json` describes it, holes as zeros.

    Args:
        path: to write.
        target: the model folder.
        dtype: that the target was loaded in.
    Returns:
        the digest of what was written.
    Raises:
        IntegrityError: the pieces lie over each other, or beyond the end.
        PreflightError: the folder holds no such tensors.
    """
    progress = progress or Progress()
    ends = _Ends(target, dtype, io)
    digest = hashlib.sha256()
    written = done = 0
    with path.open("wb") as handle:
        for piece in io.ends.pieces:
            if not written <= piece.offset < io.ends.bytes:
                raise IntegrityError(f"{ONNX_IO}: the pieces of {io.ends.file} lie over each other or beyond its end")
            for block in itertools.chain([bytes(piece.offset - written)], ends.blocks(piece)):
                handle.write(block)
                digest.update(block)
                written += len(block)
                progress.advance(written // 10**6 - done)
                done = written // 10**6
    return digest.hexdigest()


class _Ends:
    """The two matrices of a target's folder as they lie in its files."""

    def __init__(self, folder: Path, dtype: str, io: OnnxIO) -> None:
        self._dtype = dtype
        shape = (io.vocab_size, io.hidden_size)
        tied = io.head_digest == io.embedding_digest
        self._matrices = {
            "embedding": _map_tensor(folder, EMBEDDINGS, shape),
            "head": _map_tensor(folder, EMBEDDINGS if tied else (HEAD,), shape),
        }
        self._rows = None if io.draft_token_ids is None else np.array(io.draft_token_ids)

    def blocks(self, piece: EndsPiece) -> Iterator[bytes]:
        """The bytes of a piece: float32, by rows or, transposed, by columns."""
        kind, matrix = self._matrices[piece.tensor]
        rows = self._rows if piece.tensor == "head" else None
        length, width = len(matrix) if rows is None else len(rows), matrix.shape[1]
        lines, across = (width, length) if piece.transposed else (length, width)
        step = max(1, _BLOCK_ELEMENTS // across)
        for start in range(0, lines, step):
            some = slice(start, min(start + step, lines))
            if piece.transposed:
                block = (matrix[:, some] if rows is None else matrix[rows, some]).T
            else:
                block = matrix[some] if rows is None else matrix[rows[some]]
            yield _floats(np.ascontiguousarray(block), kind, self._dtype).tobytes()


def _floats(stored: NDArray[Any], kind: str, dtype: str) -> NDArray[np.float32]:
    """Stored numbers as float32, rounded to the target's dtype on the way where they are stored in another."""
    exact = (stored.astype(np.uint32) << 16).view(np.float32) if kind == "BF16" else stored.astype(np.float32)
    if _STORED[kind] == dtype or dtype == "float32":
        return exact
    if dtype == "float16":
        return exact.astype(np.float16).astype(np.float32)
    bits = exact.view(np.uint32)
    rounded: NDArray[np.uint32] = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)  # to nearest, even
    return rounded.view(np.float32)


def _map_tensor(folder: Path, names: Sequence[str], shape: tuple[int, int]) -> tuple[str, NDArray[Any]]:
    """(kind of its numbers, the matrix) of a tensor, mapped from its file.

    Args:
        names: that it has in one family or another.
    Raises:
        PreflightError: there is none of these names and that shape.
    """
    name = names[0]
    try:
        file = SINGLE
        if (folder / INDEX).is_file():
            places = strict_loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            name = next((one for one in names if one in places), name)
            file = str(places[name])
        if Path(file).name != file:
            raise ValueError(f"{INDEX} names {file!r}, which does not lie beside it")
        path = folder / file
        with path.open("rb") as handle:
            tensors = read_header(handle, path.stat().st_size)
        name = next((one for one in names if one in tensors), name)
        tensor = tensors[name]
        if tensor.shape != shape or tensor.dtype not in _KINDS:
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected numbers {list(shape)}")
        return tensor.dtype, np.memmap(path, _KINDS[tensor.dtype], "r", offset=tensor.start, shape=shape)
    except (OSError, ValueError, KeyError, TypeError) as reason:
        what = f"no {reason}" if isinstance(reason, KeyError) else str(reason)
        raise PreflightError(
            f"{folder}: {name} cannot be read: {what}", "name the target's folder: config.json and safetensors files"
        ) from None
