"""Stage `export`: every dialect of one drafter, each read back and compared before it counts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dspark.config.models import ExportSettings
from dspark.drafters.base import Drafter
from dspark.drafters.checkpoint import read_checkpoint, served_form, write_deepspec, write_union
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.kinds import require_dspark
from dspark.engines.llamacpp_files import DRAFTER
from dspark.errors import SettingsError
from dspark.export.blocks import ProbeBlocks, draft
from dspark.export.gguf import load_drafter_gguf, read_drafter_gguf, write_drafter_gguf
from dspark.export.onnx import export_onnx
from dspark.export.parity import compare, judge, negative_controls, rounded
from dspark.export.report import Comparison, ParityReport, Probes
from dspark.export.runtimes import draft_cached, draft_stateless
from dspark.export.tensorrt import write_recipe
from dspark.io.gguffile import GGUFFile, Precision
from dspark.io.jsonfile import write_model
from dspark.io.progress import Progress

if TYPE_CHECKING:
    from dspark.targets.record import TargetRecord

UNION, DEEPSPEC, ONNX, TENSORRT, LLAMACPP = "drafter", "deepspec", "onnxruntime", "tensorrt", "llamacpp"
PARITY = "parity.json"
GGUF_PRECISION: Precision = "F16"
_NO_GRAPHS = "drafters of kind {} are written as a checkpoint alone: no graph and no GGUF file is known of them"


def export_build(
    drafter: Drafter,
    record: TargetRecord,
    settings: ExportSettings,
    blocks: ProbeBlocks,
    out: Path,
    *,
    embedding: Tensor,
    head: Tensor,
    target_file: Callable[[], GGUFFile] | None = None,
    untrained: bool = False,
    progress: Progress | None = None,
) -> ParityReport:
    """Write `drafter/` (union checkpoint), `onnxruntime/`, `tensorrt/`, `llamacpp/` and `parity.json` into a folder.

    Args:
        drafter: the trained drafter.
        record: the target it belongs to.
        settings: dtype of the union checkpoint, which other dialects to write, and with which opset.
        blocks: real contexts and anchors to compare the dialects on.
        out: the folder; made if it is not there.
        embedding, head: of the target, [V, d].
        target_file: says what the target is as GGUF, which the drafter's file has to agree with; None: no GGUF.
        untrained: allow tensors that training never moved (a random drafter in a test).
        progress: advanced after each dialect.
    Raises:
        GateError: a dialect does not draft what the drafter drafts, or the comparison could not tell.
        StageError: weights that are not finite or that training never moved.
        PreflightError: ONNX Runtime, which the ONNX files are checked with, is not installed.
    """
    progress = progress or Progress()
    exact = copy.deepcopy(drafter).float().cpu().eval()
    absent = {}
    if exact.config.kind != "dspark":
        absent = {name: _NO_GRAPHS.format(exact.config.kind) for name in ("onnx", "tensorrt", "gguf")}
        settings = settings.model_copy(update={"onnx": False, "tensorrt": False, "gguf": False})
    as_gguf = target_file if settings.gguf else None
    progress.start("export", 2 + 2 * settings.onnx + (as_gguf is not None), unit="dialects")
    reference = draft(exact, blocks)
    dialects = {"union": _union(exact, record, settings, blocks, out / UNION, embedding, head, untrained)}
    progress.advance()
    if settings.deepspec:
        write_deepspec(out / DEEPSPEC, exact, record, head, dtype=settings.dtype, untrained=untrained)
        dialects["deepspec"] = _stored(exact, record, settings, blocks, out / DEEPSPEC, embedding, head)
    if settings.onnx:
        threads = torch.get_num_threads()
        export_onnx(exact, record, out / ONNX, opset=settings.onnx_opset)
        progress.advance()
        described = "the trained drafter in torch, float32"
        stateless = draft_stateless(out / ONNX, blocks, threads=threads)
        cached = draft_cached(out / ONNX, blocks, threads=threads)
        dialects |= {
            "onnx": compare(reference, stateless, described),
            "onnx_cached": compare(reference, cached, described),
        }
        if settings.tensorrt:
            write_recipe(out / TENSORRT, out / ONNX, settings)
        progress.advance()
    if as_gguf is not None:
        try:
            dialects["gguf"] = _gguf(
                require_dspark(exact, "llama.cpp"), record, blocks, out / LLAMACPP, as_gguf(), embedding, head
            )
        except SettingsError as reason:
            absent["gguf"] = reason.message
        progress.advance()
    report = ParityReport(
        probes=Probes(
            blocks=len(blocks), shortest_context=int(blocks.lengths.min()), longest_context=int(blocks.lengths.max())
        ),
        dialects=dialects,
        negative_controls=negative_controls(exact, blocks, reference),
        absent=absent,
    )
    judge(report)
    write_model(out / PARITY, report)
    progress.advance()
    return report


def _gguf(
    exact: DSparkDrafter,
    record: TargetRecord,
    blocks: ProbeBlocks,
    folder: Path,
    target: GGUFFile,
    embedding: Tensor,
    head: Tensor,
) -> Comparison:
    """Write the GGUF file and compare what it holds with the drafter whose matrices are rounded as the file's are.

    With a reduced vocabulary the head's rows are the file's too, not the target's.

    Raises:
        SettingsError: llama.cpp cannot run such a drafter.
    """
    path = folder / DRAFTER
    write_drafter_gguf(path, exact, target, precision=GGUF_PRECISION)
    read_drafter_gguf(path, served_form(exact).config, target)
    reloaded = load_drafter_gguf(path, record, embedding.float().cpu(), head.float().cpu())
    kept = ("norm", "confidence_head")  # float32 in the file
    stored = rounded(
        exact,
        torch.float16,
        keep=lambda name: any(part in name for part in kept),
        head=exact.config.draft_vocab_size is not None,
    )
    described = "the trained drafter in torch, matrices rounded to float16, float32"
    return compare(draft(stored, blocks), draft(reloaded, blocks), described)


def _union(
    exact: Drafter,
    record: TargetRecord,
    settings: ExportSettings,
    blocks: ProbeBlocks,
    folder: Path,
    embedding: Tensor,
    head: Tensor,
    untrained: bool,
) -> Comparison:
    """Write the union checkpoint and compare it."""
    write_union(folder, exact, record, dtype=settings.dtype, untrained=untrained)
    return _stored(exact, record, settings, blocks, folder, embedding, head)


def _stored(
    exact: Drafter,
    record: TargetRecord,
    settings: ExportSettings,
    blocks: ProbeBlocks,
    folder: Path,
    embedding: Tensor,
    head: Tensor,
) -> Comparison:
    """Compare what a reader of a checkpoint would load with the drafter in the stored dtype."""
    reloaded = read_checkpoint(folder, embedding.cpu(), head.cpu(), record=record).float()
    stored = draft(rounded(exact, getattr(torch, settings.dtype)), blocks)
    return compare(
        stored, draft(reloaded, blocks), f"the trained drafter in torch, weights rounded to {settings.dtype}, float32"
    )
