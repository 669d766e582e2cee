"""The forms of the drafter that engines load: each is of the drafter that the manifest describes."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from dspark.drafters.description import read_description
from dspark.engines.onnx_io import OnnxIO
from dspark.engines.tensorrt_build import Recipe
from dspark.package.comparing import compare, entry_of, typed
from dspark.package.contents import Content
from dspark.package.gguf import GGUFHeader
from dspark.package.layout import DRAFTER_CONFIG
from dspark.package.manifest import Manifest

GGUF = "engines/llamacpp/drafter.gguf"
IO = "engines/onnxruntime/io.json"
RECIPE = "engines/tensorrt/build.json"


def check_forms(manifest: Manifest, contents: Mapping[str, Content]) -> None:
    """Hold the GGUF file, the ONNX graphs and the recipe of a TensorRT plan against the manifest.

    Raises:
        ValueError: the first contradiction.
    """
    if GGUF in contents:
        header = typed(contents, GGUF, GGUFHeader)
        _check_gguf(manifest, typed(contents, DRAFTER_CONFIG, dict), header)
        _check_gguf_vocabulary(manifest, header, contents)
    if IO in contents:
        _check_onnx(manifest, typed(contents, IO, OnnxIO))
    if RECIPE in contents:
        _check_recipe(manifest, typed(contents, RECIPE, Recipe), typed(contents, IO, OnnxIO))


def _check_onnx(manifest: Manifest, onnx: OnnxIO) -> None:
    drafter, target = manifest.drafter, manifest.inputs.target
    listed = {entry.path for entry in manifest.files}
    for name in (onnx.stateless.file, onnx.cached.file, onnx.weights.file, onnx.ends.file):
        if f"engines/onnxruntime/{name}" not in listed:
            raise ValueError(f"{IO} names {name}, which is not in the package")
    files = {part: entry_of(manifest, f"engines/onnxruntime/{part.file}") for part in (onnx.weights, onnx.ends)}
    expected = {
        "gamma": (onnx.gamma, drafter.gamma),
        "taps": (onnx.taps, drafter.taps),
        "mask_token_id": (onnx.mask_token_id, drafter.mask_token_id),
        "draft_vocab_size": (onnx.draft_vocab_size, drafter.draft_vocab),
        "vocab_size": (onnx.vocab_size, target.vocab_physical),
        "embedding_digest": (onnx.embedding_digest, target.embedding_digest),
        "head_digest": (onnx.head_digest, target.head_digest),
        **{part.file: ((part.bytes, part.sha256), (file.bytes, file.sha256)) for part, file in files.items()},
    }
    compare(IO, expected)


def _check_gguf(manifest: Manifest, value: dict[str, Any], header: GGUFHeader) -> None:
    """llama.cpp loads a file with shifted taps, another RoPE base or another mask token without a word."""
    config, _ = read_description(value, DRAFTER_CONFIG)
    (theta,) = struct.unpack("<f", struct.pack("<f", config.rope["rope_theta"]))  # as the file stores it
    expected = {
        "general.architecture": "dflash",
        "dflash.block_size": config.gamma,
        "dflash.block_count": config.layers,
        "dflash.embedding_length": config.hidden_size,
        "dflash.target_layers": [tap + 1 for tap in config.taps],
        "dflash.rope.freq_base": theta,
        "dflash.sample_from_anchor": True,
        "dflash.has_confidence_head": config.confidence,
        "dflash.attention.causal": False,
        "tokenizer.ggml.mask_token_id": config.mask_token_id,
        "tokenizer.ggml.tokens": manifest.inputs.target.vocab_physical,  # how many there are
    }
    compare(GGUF, {key: (header.keys.get(key), wanted) for key, wanted in expected.items()})


def _check_gguf_vocabulary(manifest: Manifest, header: GGUFHeader, contents: Mapping[str, Content]) -> None:
    """A file drafts from the reduced vocabulary, its rows and their ids with it, or from the whole one."""
    drafter, target = manifest.drafter, manifest.inputs.target
    config, _ = read_description(typed(contents, DRAFTER_CONFIG, dict), DRAFTER_CONFIG)  # as it is stored
    width, ids = header.keys["dflash.embedding_length"], header.draft_ids
    rows = target.vocab_physical if ids is None else drafter.draft_vocab
    expected: dict[str, tuple[int, ...] | None] = {
        "markov_w1.weight": (target.vocab_physical, config.markov_rank),
        "markov_w2.weight": (rows, config.markov_rank),
        "output.weight": None if ids is None else (rows, width),
        "d2t": None if ids is None else (rows,),
    }
    compare(GGUF, {name: (header.shapes.get(name), shape) for name, shape in expected.items()})
    if ids is None:
        return
    if list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= target.vocab_physical:
        raise ValueError(f"{GGUF} d2t: not ascending ids in a vocabulary of {target.vocab_physical}")
    if IO in contents:
        theirs = typed(contents, IO, OnnxIO).draft_token_ids
        if ids != theirs:
            raise ValueError(f"{GGUF} d2t: other tokens than {IO} has")


def _check_recipe(manifest: Manifest, recipe: Recipe, onnx: OnnxIO) -> None:
    listed = {entry.path: entry.sha256 for entry in manifest.files}
    expected: dict[str, tuple[object, object]] = {
        "graph": (recipe.graph, onnx.stateless.file),
        "gamma": (recipe.gamma, manifest.drafter.gamma),
        "inputs and outputs": ((recipe.inputs, recipe.outputs), (onnx.stateless.inputs, onnx.stateless.outputs)),
        **{file: (digest, listed.get(f"engines/onnxruntime/{file}")) for file, digest in recipe.files.items()},
    }
    compare(RECIPE, expected)
