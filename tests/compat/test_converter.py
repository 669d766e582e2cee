"""What llama.cpp's own converter makes of our checkpoint, against what our GGUF writer makes of the same drafter.

The sources are those inside xllamacpp's source distribution: `convert_hf_to_gguf.py`, `conversion/` and its own gguf
package, at the build that dspark serves with (b11549). The whole script is run, with `--target-model-dir` on a tiny
Llama with a sentencepiece vocabulary; nothing of it is replaced.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark.drafters.checkpoint import read_checkpoint, union_tensors
from dspark.errors import DataError, IntegrityError
from dspark.export.dflash import file_problems, tensor_names
from dspark.export.gguf import load_drafter_gguf, write_drafter_gguf
from dspark.io.gguffile import GGUFFile, read_gguf

SOURCES = "xllamacpp-2026.10.11549.tar.gz"
PARTS = ("convert_hf_to_gguf.py", "conversion/*", "gguf-py/gguf/*")
TEXT = "the quick brown fox jumps over the lazy dog, and 0123456789 times more."
# About the file and not about the drafter: the name of its folder, how many parameters, which precision.
ABOUT = {"general.name", "general.size_label", "general.quantization_version", "general.file_type"}


@pytest.fixture(scope="module")
def convert(released: Any, run_reader: Any, made: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    sources = released(SOURCES, only=PARTS, top="thirdparty/llama.cpp/")
    path = [released("sentencepiece-*.whl", compiled=True)]

    def run(folder: Path, out: Path, *options: Any) -> Any:
        return run_reader(sources / "convert_hf_to_gguf.py", folder, "--outfile", out, *options, path=path)

    return run


@pytest.fixture(scope="module")
def target(made: Any, released: Any, convert: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GGUFFile]:
    """The target's folder with a vocabulary that the converter knows, and the file that it makes of the two."""
    folder = tmp_path_factory.mktemp("spm") / "target"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(made.folder / name, folder / name)
    sys.path.insert(0, str(released("sentencepiece-*.whl", compiled=True)))
    try:
        from sentencepiece import SentencePieceTrainer
    finally:
        del sys.path[0]
    vocabulary = io.BytesIO()
    # Bytes and control tokens, and the letters of the text.
    options = {"model_type": "bpe", "byte_fallback": True, "hard_vocab_limit": False, "minloglevel": 2}
    SentencePieceTrainer.train(sentence_iterator=iter([TEXT]), model_writer=vocabulary, vocab_size=310, **options)
    (folder / "tokenizer.model").write_bytes(vocabulary.getvalue())
    done = convert(folder, folder / "target.gguf", "--outtype", "f32")
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, read_gguf(folder / "target.gguf")


def converted(convert: Any, folder: Path, target: Path, outtype: str) -> GGUFFile:
    out = folder / f"{outtype}.gguf"
    done = convert(folder, out, "--target-model-dir", target, "--outtype", outtype)
    assert done.returncode == 0, done.stderr[-4000:]
    return read_gguf(out)


def test_the_converter_and_our_writer_make_the_same_keys_and_tensors(
    made: Any, checkpoint: Any, convert: Any, target: tuple[Path, GGUFFile], tmp_path: Path
):
    folder, served = target
    theirs = converted(convert, checkpoint(), folder, "f32")
    assert file_problems(theirs, made.drafter.config, served) == []
    write_drafter_gguf(tmp_path / "ours.gguf", made.drafter, served)
    mine = read_gguf(tmp_path / "ours.gguf")

    keys = {name: key for name, key in theirs.keys.items() if name not in ABOUT}
    assert keys == {name: key for name, key in mine.keys.items() if name not in ABOUT}
    assert keys["dflash.target_layers"].value == [2, 4]  # of taps 1 and 3
    assert keys["tokenizer.ggml.mask_token_id"].value == made.record.mask_token_id
    assert theirs.shapes == mine.shapes
    assert theirs.types == mine.types
    expected = mine.tensors()
    assert all(np.array_equal(values, expected[name]) for name, values in theirs.tensors().items())


@pytest.mark.parametrize("outtype", ["f32", "bf16", "auto"])
def test_a_converted_file_gives_the_drafter_back(
    made: Any, checkpoint: Any, convert: Any, target: tuple[Path, GGUFFile], outtype: str
):
    """`dspark certify` takes files that others made; the converter stores the confidence head like any matrix."""
    theirs = converted(convert, checkpoint(), target[0], outtype)
    values = theirs.tensors()
    for name, tensor in union_tensors(made.drafter).items():
        assert np.array_equal(values[tensor_names(made.drafter.config)[name]], tensor.numpy()), name
    loaded = load_drafter_gguf(theirs.path, made.record, made.target.embedding.float(), made.target.head.float())
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, made.drafter.state_dict()[name]), name


def test_the_sources_are_those_of_the_runtime_that_dspark_pins():
    version = SOURCES.removeprefix("xllamacpp-").removesuffix(".tar.gz")
    try:
        assert importlib.metadata.version("xllamacpp") == version
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("xllamacpp is not installed: pip install 'dspark[llamacpp]'")


def test_a_head_of_another_kind_is_refused_by_both(
    made: Any, checkpoint: Any, convert: Any, target: tuple[Path, GGUFFile]
):
    wrong = checkpoint(markov_head_type="rnn")
    with pytest.raises(IntegrityError, match=r"markov_head\.joint_proj\.weight is missing"):
        read_checkpoint(wrong, made.drafter.embedding, made.drafter.head)
    done = convert(wrong, wrong / "x.gguf", "--target-model-dir", target[0])
    assert done.returncode != 0
    assert "unsupported markov_head_type 'rnn'" in done.stderr


@pytest.mark.parametrize(
    ("changes", "reason", "said"),
    [
        (
            {"mask_token_id": 320},
            "mask_token_id 320 is outside the vocabulary of 320",
            "tokenizer.ggml.mask_token_id 320 is outside the vocabulary of 320",
        ),
        ({"block_size": 5}, None, "dflash.block_size is 5, not 4"),
        ({"rope_theta": 1e3, "rope_parameters": None}, None, "dflash.rope.freq_base is 1000.0, not 20000.0"),
        (
            {"sample_from_anchor": False},
            "sample_from_anchor is False, not True",
            "dflash.sample_from_anchor is False, not True",
        ),
    ],
)
def test_what_the_converter_takes_without_a_word_is_refused_by_us(
    made: Any,
    checkpoint: Any,
    convert: Any,
    target: tuple[Path, GGUFFile],
    changes: dict[str, Any],
    reason: str | None,
    said: str,
):
    """The config where it contradicts itself, and the file wherever it is not the drafter's."""
    wrong = checkpoint(**changes)
    if "rope_theta" in changes:  # it stands in the nested config too, which is merged over the flat one
        value = json.loads((wrong / "config.json").read_text())
        value["transformer_layer_config"] |= {"rope_theta": 1e3, "rope_parameters": None}
        (wrong / "config.json").write_text(json.dumps(value))
    if reason:
        with pytest.raises(IntegrityError, match=reason):
            read_checkpoint(wrong, made.drafter.embedding, made.drafter.head)
    theirs = converted(convert, wrong, target[0], "f32")
    assert said in file_problems(theirs, made.drafter.config, target[1])
    if reason:
        with pytest.raises(DataError):
            load_drafter_gguf(theirs.path, made.record, made.target.embedding, made.target.head)
