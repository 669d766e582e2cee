"""A package without its target's embedding and head is the same package; what the target gives is the very file."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import fake_build
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dspark.cli.boundary import run_command
from dspark.engines.onnx_io import EndsPiece, EndsSpec, OnnxIO
from dspark.errors import IntegrityError, PreflightError, SettingsError, StageError
from dspark.export.tensorrt import read_recipe
from dspark.io.jsonfile import read_model, write_model
from dspark.package import assemble as assembling
from dspark.package import materialise as materialising
from dspark.package.assemble import assemble
from dspark.package.materialise import materialise
from dspark.package.verify import read_manifest, verify
from dspark.workspace.target_folder import target_folder

V, D = fake_build.VOCABULARY, fake_build.HIDDEN
FILE = "engines/onnxruntime/target_ends.onnx.data"
IDS = (3, 5, 6, 20, 31)


def matrices(dtype=torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randn(V, D, generator=generator).to(dtype) for _ in range(2))


def target(
    folder: Path, *, sharded: bool = False, head: bool = True, name: str = "model.embed_tokens.weight", **tensors
) -> Path:
    """A model folder with both matrices among others."""
    folder.mkdir(parents=True)
    embedding, output = matrices()
    named = {name: embedding, "model.norm.weight": torch.ones(D), **tensors}
    named |= {"lm_head.weight": output} if head and "lm_head.weight" not in tensors else {}
    if not sharded:
        save_file(named, folder / "model.safetensors", {"format": "pt"})
        return folder
    places = {name: f"model-{number:05}-of-00003.safetensors" for number, name in enumerate(sorted(named), start=1)}
    for name, file in places.items():
        save_file({name: named[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def expected(pieces, ids=None, dtype=torch.bfloat16) -> bytes:
    """The file, put together by torch: every piece on a page of its own."""
    embedding, head = (matrix.to(dtype).float() for matrix in matrices(torch.float32))
    head = head if ids is None else head[list(ids)]
    data = b""
    for name, transposed in pieces:
        data += bytes(-len(data) % 4096)
        matrix = {"embedding": embedding, "head": head}[name]
        data += (matrix.T if transposed else matrix).contiguous().numpy().tobytes()
    return data


def sources_with(root: Path, pieces, *, setting="leave_out", ids=None, dtype="bfloat16", tied=False):
    """The fake build whose target's ends are real, and left out of its package."""
    sources = fake_build.make(root)
    if ids is not None:
        sources = fake_build.reduce(sources, ids)
    data = expected(pieces, ids, getattr(torch, dtype))
    onnx = sources.export / "onnxruntime"
    (onnx / "target_ends.onnx.data").write_bytes(data)
    offsets = [0]
    sizes = [4 * D * (len(ids) if ids is not None and name == "head" else V) for name, _ in pieces]
    for size in sizes[:-1]:
        offsets.append(-(-(offsets[-1] + size) // 4096) * 4096)
    described = EndsSpec(
        file="target_ends.onnx.data",
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        pieces=tuple(
            EndsPiece(tensor=name, transposed=transposed, offset=offset)
            for (name, transposed), offset in zip(pieces, offsets, strict=True)
        ),
    )
    io = read_model(onnx / "io.json", OnnxIO).model_copy(update={"ends": described})
    record = sources.record.model_copy(update={"dtype": dtype})
    if tied:
        record = record.model_copy(update={"head_digest": record.embedding_digest})
        io = io.model_copy(update={"head_digest": record.embedding_digest})
        path = sources.export / "drafter/config.json"
        value = json.loads(path.read_bytes())
        value["dspark"]["target"]["head_digest"] = record.embedding_digest
        path.write_text(json.dumps(value))
    write_model(onnx / "io.json", io)
    settings = sources.build.export.model_copy(update={"onnx_target_ends": setting})
    build = sources.build.model_copy(update={"export": settings})
    return type(sources)(**{**vars(sources), "build": build, "record": record})


EXACT = dict(zip(("model.embed_tokens.weight", "lm_head.weight"), matrices(torch.float32), strict=True))
BOTH = (("embedding", False), ("head", True))


@pytest.fixture(scope="module")
def lean(tmp_path_factory) -> Path:
    """A package without the file."""
    root = tmp_path_factory.mktemp("lean")
    assemble(sources_with(root, BOTH), root / "package", card=fake_build.card)
    return root / "package"


@pytest.fixture
def package(lean, tmp_path) -> Path:
    return Path(shutil.copytree(lean, tmp_path / "package"))


def test_left_out_or_included_it_is_the_same_model_and_the_same_package(lean, tmp_path):
    manifest = assemble(
        sources_with(tmp_path / "whole", BOTH, setting="include"), tmp_path / "whole/package", card=fake_build.card
    )
    whole, without = manifest.digests, read_manifest(lean).digests
    assert (whole.model_digest, whole.package_digest) == (without.model_digest, without.package_digest)
    assert verify(tmp_path / "whole/package").absent == () and verify(lean).absent == (FILE,)
    assert not (lean / FILE).exists()
    (entry,) = (entry for entry in read_manifest(lean).files if entry.path == FILE)
    assert (entry.made_from, entry.class_) == ("target", "model")
    assert entry.sha256 == hashlib.sha256(expected(BOTH)).hexdigest()
    assert verify(lean).files == len(read_manifest(lean).files) - 1


def test_auto_leaves_out_what_is_large(tmp_path, monkeypatch):
    assert assembling.LARGE_BYTES == 512 * 2**20
    for limit, absent in ((len(expected(BOTH)), ()), (len(expected(BOTH)) - 1, (FILE,))):
        monkeypatch.setattr(assembling, "LARGE_BYTES", limit)
        root = tmp_path / str(limit)
        assemble(sources_with(root, BOTH, setting="auto"), root / "package", card=fake_build.card)
        assert verify(root / "package").absent == absent


def test_what_could_not_be_made_again_is_never_left_out(tmp_path, monkeypatch):
    """A description without pieces, as earlier versions wrote it."""
    sources = sources_with(tmp_path, BOTH)
    path = sources.export / "onnxruntime/io.json"
    value = json.loads(path.read_bytes())
    del value["ends"]["pieces"]
    path.write_text(json.dumps(value))
    assemble(sources, tmp_path / "package", card=fake_build.card)
    assert verify(tmp_path / "package").absent == ()


def test_an_export_whose_file_is_another_than_it_says_makes_no_package(tmp_path):
    sources = sources_with(tmp_path, BOTH)
    (sources.export / FILE.removeprefix("engines/")).write_bytes(b"other")
    with pytest.raises(StageError, match=r"io\.json describes"):
        assemble(sources, tmp_path / "package", card=fake_build.card)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    ("block", "name"),
    [
        (1, "model.embed_tokens.weight"),
        (20, "model.language_model.embed_tokens.weight"),  # of a model that also sees
        (2**20, "model.embed_tokens.weight"),
    ],
)
def test_the_file_is_made_of_the_target_to_the_byte(package, tmp_path, monkeypatch, sharded, block, name):
    monkeypatch.setattr(materialising, "_BLOCK_ELEMENTS", block)
    made = materialise(package, target(tmp_path / "target", sharded=sharded, name=name))
    assert made == package / FILE and made.read_bytes() == expected(BOTH)
    assert verify(package).absent == ()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["package", "target"]
    assert materialise(package, tmp_path / "not even there") == made  # nothing is left to do


@pytest.mark.parametrize(
    ("pieces", "ids", "dtype", "stored"),
    [
        ((("head", False), ("embedding", True)), None, "bfloat16", {}),
        ((("embedding", False), ("head", True)), IDS, "bfloat16", {}),
        ((("embedding", False), ("head", False)), IDS, "bfloat16", {}),
        # Stored with more digits than the target is loaded with.
        (BOTH, None, "bfloat16", EXACT),
        (BOTH, None, "float16", EXACT),
    ],
)
def test_transposed_reduced_and_rounded_pieces(tmp_path, pieces, ids, dtype, stored):
    assemble(sources_with(tmp_path, pieces, ids=ids, dtype=dtype), tmp_path / "package", card=fake_build.card)
    made = materialise(tmp_path / "package", target(tmp_path / "target", **stored))
    assert made.read_bytes() == expected(pieces, ids, getattr(torch, dtype))


def test_a_tied_target_has_no_head_of_its_own(tmp_path):
    pieces = (("embedding", False), ("embedding", True))
    assemble(sources_with(tmp_path, pieces, tied=True), tmp_path / "package", card=fake_build.card)
    made = materialise(tmp_path / "package", target(tmp_path / "target", head=False))
    assert made.read_bytes() == expected(pieces)


def test_rounding_is_to_nearest_with_ties_to_even():
    """Against torch, on ties, on what carries into the exponent, and on the smallest and largest numbers."""
    bits = np.array([0x3F808000, 0x3F818000, 0x3F80FFFF, 0x3FFFFFFF, 0x00000001, 0x7F7F0000, 0x80000000], np.uint32)
    values = np.concatenate([bits.view(np.float32), np.random.default_rng(0).normal(size=1000).astype(np.float32)])
    for dtype in ("bfloat16", "float16", "float32"):
        wanted = torch.from_numpy(values).to(getattr(torch, dtype)).float().numpy()
        with np.errstate(over="ignore"):
            found = materialising._floats(values, "F32", dtype)
        assert found.view(np.uint32).tolist() == wanted.view(np.uint32).tolist()


def test_another_target_is_refused_and_leaves_nothing_behind(package, tmp_path):
    other = matrices()[1].clone()
    other[7, 3] += 1
    folder = target(tmp_path / "target", **{"lm_head.weight": other})
    with pytest.raises(IntegrityError, match="which this drafter belongs to") as caught:
        materialise(package, folder)
    assert caught.value.exit_code == 7
    assert verify(package).absent == (FILE,) and sorted(p.name for p in tmp_path.iterdir()) == ["package", "target"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "No such file"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100), "header"),
        (lambda folder: save_file({"x": torch.ones(1)}, folder / "model.safetensors"), "embed_tokens"),
        (
            lambda folder: save_file({"model.embed_tokens.weight": torch.ones(3, D)}, folder / "model.safetensors"),
            "expected numbers",
        ),
        (lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}'), "embed_tokens"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"model.embed_tokens.weight": "../secret.safetensors"}}'
            ),
            "does not lie beside it",
        ),
    ],
)
def test_what_is_no_target_is_said(package, tmp_path, change, said):
    folder = target(tmp_path / "target")
    change(folder)
    with pytest.raises(PreflightError, match=said):
        materialise(package, folder)
    assert verify(package).absent == (FILE,)


def test_a_made_file_is_verified_like_any_other(package, tmp_path):
    materialise(package, target(tmp_path / "target"))
    good = (package / FILE).read_bytes()
    for bad in (good[:-1] + bytes([good[-1] ^ 1]), good[:-1], b""):
        (package / FILE).write_bytes(bad)
        with pytest.raises(IntegrityError, match="target_ends"):
            verify(package)
    (package / FILE).write_bytes(good)
    verify(package)


def test_no_other_file_may_be_called_makeable(package, reseal):
    """Else whoever forges a manifest could have any file missing."""
    value = json.loads((package / "manifest.json").read_bytes())
    for entry in value["files"]:
        if entry["path"] == "drafter/model.safetensors":
            entry["made_from"] = "target"
    (package / "manifest.json").write_bytes(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())
    with pytest.raises(IntegrityError, match="cannot be made from the target"):
        verify(package)


def test_a_forged_description_writes_no_terabytes(package, tmp_path):
    folder = target(tmp_path / "target")
    io = read_model(package / "engines/onnxruntime/io.json", OnnxIO)
    for offsets in ((0, 2**50), (0, 8)):
        pieces = tuple(
            piece.model_copy(update={"offset": offset})
            for piece, offset in zip(io.ends.pieces, offsets, strict=True)
        )  # fmt: skip
        forged = io.model_copy(update={"ends": io.ends.model_copy(update={"pieces": pieces})})
        with pytest.raises(IntegrityError, match="over each other or beyond"):
            materialising.write_ends(tmp_path / "out", forged, folder, "bfloat16")


def test_a_package_that_leaves_nothing_out_needs_no_target(pristine):
    assert materialise(pristine, Path("/nowhere")) is None


def test_a_plan_of_tensorrt_waits_for_the_file(package):
    """The recipe's files are looked at before anything is built."""
    listed = {entry.path: entry.sha256 for entry in read_manifest(package).files}
    (package / "engines/tensorrt").mkdir()
    names = ("draft_block.onnx", "draft_block.onnx.data", "target_ends.onnx.data")
    from dspark.config.models import ExportSettings
    from dspark.engines.tensorrt_build import make_recipe

    io = read_model(package / "engines/onnxruntime/io.json", OnnxIO)
    spec = io.stateless.inputs[0].model_copy(update={"name": "features", "shape": ("batch", "context", 2)})
    io = io.model_copy(update={"stateless": io.stateless.model_copy(update={"inputs": (spec,)})})
    settings = ExportSettings()
    files = {name: listed[f"engines/onnxruntime/{name}"] for name in names}
    recipe = make_recipe(io, files, batch=settings.tensorrt_batch, context=settings.tensorrt_context)
    write_model(package / "engines/tensorrt/build.json", recipe)
    with pytest.raises(PreflightError, match="leaves the target's embedding and head out"):
        read_recipe(package)


def test_where_the_target_is_looked_for(lean, tmp_path):
    described = read_manifest(lean).inputs.target

    def nowhere():
        raise PreflightError("no workspace here")

    assert target_folder(str(tmp_path), described, nowhere) == tmp_path
    with pytest.raises(SettingsError, match="must be named"):
        target_folder(None, described, nowhere)
    with pytest.raises(SettingsError, match="no workspace here"):
        target_folder("qwen3-8b", described, nowhere)
    with pytest.raises(SettingsError, match="no such folder"):
        target_folder("/no/such/folder", described, nowhere)


def test_the_verb(package, tmp_path, capsys):
    folder = target(tmp_path / "target")
    assert run_command(["package", "verify", str(package)]) == 0
    assert "package materialise" in capsys.readouterr().out
    assert run_command(["package", "materialise", str(package)]) == 2
    assert run_command(["package", "materialise", str(package), "--target", str(folder), "--quiet"]) == 0
    assert "as the manifest names it" in capsys.readouterr().out
    assert run_command(["package", "verify", str(package)]) == 0
    assert "package materialise" not in capsys.readouterr().out
