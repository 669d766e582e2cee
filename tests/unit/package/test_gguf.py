"""The drafter's GGUF file in a package: read without the gguf package, and held against the drafter."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import fake_build
import numpy as np
import pytest

from dspark.drafters.config import DrafterConfig
from dspark.errors import IntegrityError, StageError
from dspark.export.dflash import drafter_keys
from dspark.io.gguffile import MASK, TOKENS, Key, TensorSource, write_gguf
from dspark.io.jsonfile import read_json
from dspark.package.assemble import assemble
from dspark.package.gguf import read_gguf_header
from dspark.package.verify import verify

CONFIG = DrafterConfig.of(fake_build.record(), fake_build.build().drafter)
VOCABULARY = CONFIG.vocab_size


def source(*shape: int, ids: list[int] | None = None) -> TensorSource:
    if ids is not None:
        return TensorSource(shape, lambda: np.array(ids), "I64")
    return TensorSource(shape, lambda: np.ones(shape, np.float32), "F32")


def tensors(ids: list[int] | None = None) -> dict[str, TensorSource]:
    """Those that differ with the vocabulary; `x` moves the others off a multiple of anything."""
    rank, hidden = fake_build.RANK, fake_build.HIDDEN
    rows = VOCABULARY if ids is None else len(ids)
    found = {"x": source(3), "markov_w1.weight": source(VOCABULARY, rank), "markov_w2.weight": source(rows, rank)}
    if ids is not None:
        found |= {"output.weight": source(rows, hidden), "d2t": source(rows, ids=ids), "y": source(2)}
    return found


def write(path: Path, made: dict[str, TensorSource] | None = None, **changes: Key) -> Path:
    keys = {
        **drafter_keys(CONFIG),
        TOKENS: Key([f"t{number}" for number in range(VOCABULARY)], "STRING"),
        MASK: Key(CONFIG.mask_token_id, "UINT32"),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(path, keys | changes, tensors() if made is None else made)
    return path


def read(data: bytes) -> Any:
    return read_gguf_header(io.BytesIO(data), len(data))


def test_keys_are_read_as_the_gguf_package_wrote_them(tmp_path: Path):
    more = {
        "a.text": Key("é", "STRING"),
        "a.float": Key(0.5, "FLOAT32"),
        "a.long": Key(-(2**40), "INT64"),
        "a.flags": Key([True, False], "BOOL"),
    }
    header = read(write(tmp_path / "d.gguf", **more).read_bytes())
    assert header.shapes == {"x": (3,), "markov_w1.weight": (32, 4), "markov_w2.weight": (32, 4)}
    assert header.draft_ids is None
    assert header.keys["dflash.target_layers"] == [tap + 1 for tap in CONFIG.taps]
    assert header.keys[TOKENS] == VOCABULARY
    assert {name: header.keys[name] for name in more} == {name: key.value for name, key in more.items()}


def test_a_header_that_is_cut_short_anywhere_is_refused(tmp_path: Path):
    data = write(tmp_path / "d.gguf", tensors([4, 9, 31])).read_bytes()
    end = data.index(struct.pack("<3q", 4, 9, 31)) + 24
    assert read(data[:end]).keys[MASK] == CONFIG.mask_token_id
    for length in [*range(0, end, 7), end - 1]:
        with pytest.raises(ValueError, match=r"cut short|begin as"):
            read(data[:length])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"FUGG" + bytes(20), "begin as a GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 2, 0, 0), "version 2"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**40), "overlong|cut short"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 99), "unknown kind 99"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 4, 2**40), "array of 1099511627776"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * struct.pack("<Q1sIB", 1, b"a", 0, 1), "the key 'a' twice"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + 2 * struct.pack("<Q1sIIQ", 1, b"a", 0, 0, 0), "the tensor 'a' twice"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"a", 2**30), "1073741824 axes"),
        (b"GGUF" + struct.pack("<IQQQ3sIQIQ", 3, 1, 0, 3, b"d2t", 1, 9, 0, 0), "d2t is no list of 64-bit integers"),
        (
            b"GGUF" + struct.pack("<IQQQ3sIQIQ", 3, 1, 0, 3, b"d2t", 1, 2**40, 27, 0) + bytes(99),
            "list of 1099511627776",
        ),
        (b"GGUF" + struct.pack("<IQQQ3sIQIQ", 3, 1, 0, 3, b"d2t", 1, 2, 27, 2**40) + bytes(99), "cut short"),
    ],
)
def test_what_is_no_header_is_refused(data: bytes, said: str):
    with pytest.raises(ValueError, match=said):
        read(data)


def test_a_package_with_the_file_is_sound_and_says_how_to_launch_it(sources: Any, tmp_path: Path):
    write(sources.export / "llamacpp/drafter.gguf")
    assemble(sources, tmp_path / "package", card=fake_build.card)
    assert verify(tmp_path / "package").files > 0
    engines = {item["engine"]: item for item in read_json(tmp_path / "package/certificate.json")["engines"]}
    assert engines["llamacpp"]["status"] == "written"
    script = (tmp_path / "package/engines/llamacpp/launch.sh").read_text()
    assert "--model-draft drafter.gguf" in script and f"--spec-draft-n-max {CONFIG.gamma}" in script
    assert "DSPARK_TARGET:?llama.cpp serves GGUF files" in script


def by_hand(alignment: int | None, offset: int = 0) -> bytes:
    """A file of nothing but two ids, `offset` bytes behind where the tensors begin."""
    key = b"" if alignment is None else struct.pack("<Q17sII", 17, b"general.alignment", 4, alignment)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(key) > 0) + key
    head += struct.pack("<Q3sIQIQ", 3, b"d2t", 1, 2, 27, offset)
    return head + bytes(-len(head) % (alignment or 32)) + bytes(offset) + struct.pack("<2q", 7, 9)


def test_ids_of_a_reduced_vocabulary_are_read_wherever_they_stand(tmp_path: Path):
    header = read(write(tmp_path / "d.gguf", tensors([4, 9, 31])).read_bytes())
    assert header.draft_ids == (4, 9, 31)
    assert header.shapes["output.weight"] == (3, 8) and header.shapes["d2t"] == (3,)
    for data in (by_hand(None), by_hand(8), by_hand(256), by_hand(64, offset=128)):
        assert read(data).draft_ids == (7, 9)
        with pytest.raises(ValueError, match="cut short"):
            read(data[:-1])
    with pytest.raises(ValueError, match="alignment 0"):
        read(by_hand(0))


@pytest.fixture
def reduced(sources: Any) -> Any:
    """The same build with a drafter that proposes tokens 4, 9 and 31 alone."""
    return fake_build.reduce(sources, (4, 9, 31))


def test_a_package_with_a_reduced_vocabulary_is_sound_in_either_form(reduced: Any, tmp_path: Path):
    """Files that hold the whole vocabulary draft the same; earlier builds wrote them."""
    for name, ids in (("small", [4, 9, 31]), ("whole", None)):
        write(reduced.export / "llamacpp/drafter.gguf", tensors(ids))
        assemble(reduced, tmp_path / name, card=fake_build.card)
        assert verify(tmp_path / name).files > 0


@pytest.mark.parametrize(
    ("ids", "change", "said"),
    [
        ([5, 10, 0], {}, "d2t: not ascending ids in a vocabulary of 32"),
        ([4, 9, 32], {}, "d2t: not ascending ids in a vocabulary of 32"),
        ([-1, 9, 31], {}, "d2t: not ascending ids in a vocabulary of 32"),
        ([4, 4, 31], {}, "d2t: not ascending ids in a vocabulary of 32"),
        ([5, 10, 31], {}, "d2t: other tokens than engines/onnxruntime/io.json has"),
        ([4, 9], {}, r"markov_w2.weight: \(2, 4\), expected \(3, 4\)"),
        ([4, 9, 31], {"output.weight": source(32, 8)}, r"output.weight: \(32, 8\), expected \(3, 8\)"),
        ([4, 9, 31], {"markov_w1.weight": source(3, 4)}, r"markov_w1.weight: \(3, 4\), expected \(32, 4\)"),
        (None, {"output.weight": source(32, 8)}, r"output.weight: \(32, 8\), expected None"),
    ],
)
def test_a_vocabulary_that_is_not_the_drafters_becomes_no_package(
    reduced: Any, tmp_path: Path, ids: list[int] | None, change: dict[str, TensorSource], said: str
):
    write(reduced.export / "llamacpp/drafter.gguf", tensors(ids) | change)
    with pytest.raises(StageError, match=said):
        assemble(reduced, tmp_path / "package", card=fake_build.card)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("dflash.target_layers", Key(list(CONFIG.taps), "INT32")),
        ("dflash.rope.freq_base", Key(1000.0, "FLOAT32")),
        (MASK, Key(0, "UINT32")),
        ("dflash.sample_from_anchor", Key(False, "BOOL")),
        ("dflash.block_size", Key(7, "UINT32")),
        (TOKENS, Key(["t"] * (VOCABULARY - 1), "STRING")),
    ],
)
def test_a_file_that_llamacpp_would_load_and_draft_badly_with_becomes_no_package(
    sources: Any, tmp_path: Path, key: str, change: Key
):
    write(sources.export / "llamacpp/drafter.gguf", **{key: change})
    with pytest.raises(StageError, match=key.replace(".", r"\.")):
        assemble(sources, tmp_path / "package", card=fake_build.card)
    assert not (tmp_path / "package").exists()


def test_a_damaged_file_is_refused_whatever_the_manifest_says(sources: Any, tmp_path: Path, reseal: Any):
    write(sources.export / "llamacpp/drafter.gguf")
    assemble(sources, tmp_path / "package", card=fake_build.card)
    path = tmp_path / "package/engines/llamacpp/drafter.gguf"
    path.write_bytes(path.read_bytes().replace(b"dflash.block_size", b"dflash.block_sizf"))
    with pytest.raises(IntegrityError, match=r"dflash\.block_size: None, expected"):
        verify(reseal(tmp_path / "package"))
