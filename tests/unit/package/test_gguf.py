"""The drafter's GGUF file in a package: read without the gguf package, and held against the drafter."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import fake_build
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


def write(path: Path, **changes: Key) -> Path:
    keys = {
        **drafter_keys(CONFIG),
        TOKENS: Key([f"t{number}" for number in range(VOCABULARY)], "STRING"),
        MASK: Key(CONFIG.mask_token_id, "UINT32"),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(path, keys | changes, {"x": TensorSource((2,), lambda: [1.0, 2.0], "F32")})  # type: ignore[arg-type]
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
    assert header.tensors == 1
    assert header.keys["dflash.target_layers"] == [tap + 1 for tap in CONFIG.taps]
    assert header.keys[TOKENS] == VOCABULARY
    assert {name: header.keys[name] for name in more} == {name: key.value for name, key in more.items()}


def test_a_header_that_is_cut_short_anywhere_is_refused(tmp_path: Path):
    data = write(tmp_path / "d.gguf").read_bytes()
    end = data.index(MASK.encode()) + len(MASK) + 8
    assert read(data[:end]).keys[MASK] == CONFIG.mask_token_id
    for length in range(0, end, 7):
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
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * struct.pack("<Q1sIB", 1, b"a", 0, 1), "'a' twice"),
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
