from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dspark.errors import IntegrityError, PreflightError
from dspark.io import gguffile
from dspark.io.gguffile import Key, TensorSource, file_type, precision_of, read_gguf, write_gguf

KEYS = {
    "general.architecture": Key("dflash", "STRING"),
    "dflash.block_size": Key(7, "UINT32"),
    "dflash.target_layers": Key([2, -1], "INT32"),
    "dflash.rope.freq_base": Key(0.5, "FLOAT32"),
    "dflash.sample_from_anchor": Key(False, "BOOL"),
    "tokenizer.ggml.tokens": Key(["Ā", "Grüße\n"], "STRING"),
}


def tensors(seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, TensorSource]]:
    generator = np.random.default_rng(seed)
    values = {
        "norm": generator.standard_normal(5).astype(np.float32),
        "half": generator.standard_normal((3, 5)).astype(np.float32),
        "packed": generator.standard_normal((3, 64)).astype(np.float32),
        "whole": generator.standard_normal((2, 3)).astype(np.float32),
        # No float32 tells these apart.
        "ids": np.array([2**40, 2**40 + 1, -7], np.int64),
    }
    kinds = {"norm": "F32", "half": "F16", "packed": "Q8_0", "whole": "F32", "ids": "I64"}
    return values, {
        name: TensorSource(value.shape, lambda value=value: value, kinds[name]) for name, value in values.items()
    }


def test_keys_and_tensors_come_back_as_they_were(tmp_path: Path):
    values, sources = tensors()
    write_gguf(tmp_path / "x.gguf", KEYS, sources)
    file = read_gguf(tmp_path / "x.gguf")
    assert file.keys == KEYS and list(file.keys) == list(KEYS)
    assert file.shapes == {name: value.shape for name, value in values.items()}
    assert file.types == {"norm": "F32", "half": "F16", "packed": "Q8_0", "whole": "F32", "ids": "I64"}
    assert (file.value("dflash.block_size"), file.value("nothing")) == (7, None)
    read, integers = file.tensors(), file.integers()
    assert set(read) == {"norm", "half", "packed", "whole"} and set(integers) == {"ids"}
    assert np.array_equal(integers["ids"], values["ids"]) and integers["ids"].dtype == np.int64
    assert np.array_equal(read["norm"], values["norm"]) and np.array_equal(read["whole"], values["whole"])
    assert np.array_equal(read["half"], values["half"].astype(np.float16).astype(np.float32))
    # A block of 32 has one scale, its largest magnitude / 127 in float16: half a step, and what rounding it costs.
    steps = np.abs(values["packed"].reshape(3, 2, 32)).max(-1, keepdims=True) / 127
    assert (np.abs(read["packed"] - values["packed"]).reshape(3, 2, 32) <= 0.51 * steps + 127 * steps * 2**-11).all()


def test_equal_content_gives_equal_bytes_and_no_part_is_left(tmp_path: Path):
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name, KEYS, tensors()[1])
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "b.gguf"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path):
    write_gguf(tmp_path / "x.gguf", KEYS, tensors()[1])
    before = (tmp_path / "x.gguf").read_bytes()

    def broken() -> np.ndarray:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError):
        write_gguf(tmp_path / "x.gguf", KEYS, {"late": TensorSource((2, 2), broken, "F32")})
    assert (tmp_path / "x.gguf").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


@pytest.mark.parametrize("keep", [0, 3, 20, 200])
def test_a_file_cut_short_is_refused_by_name(tmp_path: Path, keep: int):
    write_gguf(tmp_path / "x.gguf", KEYS, tensors()[1])
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "x.gguf").read_bytes()[:keep])
    with pytest.raises(IntegrityError, match=r"cut\.gguf: not a GGUF file"):
        read_gguf(tmp_path / "cut.gguf")


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(IntegrityError, match=r"none\.gguf: file not found"):
        read_gguf(tmp_path / "none.gguf")


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(PreflightError, match="gguf package") as error:
        gguffile.gguf_package()
    assert error.value.hint == "pip install 'dspark[llamacpp]'"


def test_vectors_stay_float32_and_rows_that_do_not_divide_become_float16():
    assert precision_of((64,), "Q8_0") == precision_of((64,), "F16") == "F32"
    assert (precision_of((3, 64), "Q8_0"), precision_of((64, 3), "Q8_0")) == ("Q8_0", "F16")
    assert (precision_of((3, 64), "F16"), precision_of((3, 64), "F32")) == ("F16", "F32")
    # llama.cpp's enum: ALL_F32 0, MOSTLY_F16 1, MOSTLY_Q8_0 7.
    assert [file_type(kind).value for kind in ("F32", "F16", "Q8_0")] == [0, 1, 7]
