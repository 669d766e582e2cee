"""The exported files, drafting: each dialect read back from disk and run on the blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark.decoding.draws import CounterDraws
from dspark.engines.onnx_io import IO_FILE, OnnxIO
from dspark.engines.onnxruntime import OnnxProposer, open_session
from dspark.export.blocks import Drafts, ProbeBlocks
from dspark.io.jsonfile import read_model

_BATCH = 8


def draft_stateless(folder: Path, blocks: ProbeBlocks, *, threads: int) -> Drafts:
    """Draft with `draft_block.onnx` in batches of unequal contexts whose padding is NaN.

    Raises:
        PreflightError: ONNX Runtime is not installed.
        IntegrityError: the files do not load.
    """
    io = read_model(folder / IO_FILE, OnnxIO)
    session = open_session(folder / io.stateless.file, threads=threads)
    names = [item.name for item in io.stateless.inputs]
    outputs = [item.name for item in io.stateless.outputs]
    found: list[dict[str, Any]] = []
    for start in range(0, len(blocks), _BATCH):
        inputs = blocks.padded(slice(start, start + _BATCH), np.nan)
        found.append(dict(zip(outputs, session.run(outputs, dict(zip(names, inputs, strict=True))), strict=True)))
    confidence = np.concatenate([one["confidence_logits"] for one in found]) if "confidence_logits" in outputs else None
    return Drafts(np.concatenate([one["draft_ids"] for one in found]), confidence)


def draft_cached(folder: Path, blocks: ProbeBlocks, *, threads: int, seed: int = 0) -> Drafts:
    """Draft as the engine does, with `draft_block_cached.onnx`: each context arrives in two parts, split anywhere.

    Raises:
        PreflightError: ONNX Runtime is not installed.
        IntegrityError: the files do not load.
    """
    proposer = OnnxProposer(folder, threads=threads)
    generator = np.random.default_rng(seed)
    tokens, confidences = [], []
    for start in range(0, len(blocks), _BATCH):
        rows = slice(start, start + _BATCH)
        features, lengths, anchors = blocks.padded(rows, np.nan)
        first = generator.integers(0, lengths + 1)
        rest = np.full_like(features, np.nan)
        for row, (split, length) in enumerate(zip(first, lengths, strict=True)):
            rest[row, : length - split] = features[row, split:length]
        proposer.begin(len(lengths), int(lengths.max()))
        proposer.extend(torch.from_numpy(features), first)
        proposer.extend(torch.from_numpy(rest), lengths - first)
        requests = np.arange(len(lengths))
        proposal = proposer.propose(torch.from_numpy(anchors), 0.0, CounterDraws([0] * len(lengths)), requests)
        tokens.append(proposal.tokens.numpy())
        if proposal.confidence_logits is not None:
            confidences.append(proposal.confidence_logits.numpy())
    return Drafts(np.concatenate(tokens), np.concatenate(confidences) if confidences else None)
