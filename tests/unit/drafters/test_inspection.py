"""A drafter described from its config and headers alone, and a target that brings its drafter along."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # foreign_layouts.py

from foreign_layouts import LAYOUTS, chain, flat, write

from dspark.drafters.checkpoint import write_union
from dspark.drafters.inspection import BundledInspection, Inspection, inspect_folder
from dspark.drafters.kinds import build_drafter
from dspark.errors import DataError

# As the config of the released DeepSeek-V4-Flash-DSpark says it (SGLang's own tests), with the target's keys beside.
V4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "vocab_size": 129280,
    "max_position_embeddings": 1048576,
    "quantization_config": {"quant_method": "fp8"},
    "dspark_block_size": 5,
    "dspark_markov_rank": 256,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_noise_token_id": 128799,
}


def header_only(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    """A safetensors file of these dtypes, shapes and bytes; its data are a hole in the file."""
    header, position = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    with path.open("wb") as handle:
        handle.write(struct.pack("<Q", len(text)) + text)
        handle.truncate(8 + len(text) + position)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_shows_the_same_drafter(make_drafter: Any, tmp_path: Path, layout: str) -> None:
    drafter = make_drafter()
    found = inspect_folder(write(tmp_path / "d", LAYOUTS[layout](drafter), drafter.state_dict()))
    assert isinstance(found, Inspection)
    assert (found.layout, found.gamma, found.layers, found.taps, found.mask_token_id) == (layout, 4, 2, (1, 3), 5)
    assert (found.hidden_size, found.intermediate_size, found.head_dim, found.vocab_size) == (32, 48, 6, 40)
    assert (found.markov_type, found.markov_rank, found.confidence_head) == ("vanilla", 4, True)
    assert found.target == ("org/target" if layout == "speculators" else None)
    assert found.problems == () and found.weights is not None
    assert found.weights.parameters == sum(value.numel() for value in drafter.state_dict().values())
    assert found.weights.dtypes == {"F32": found.weights.parameters}
    assert found.weights.tensors == found.weights.described == len(drafter.state_dict())


def test_nothing_is_filled_in_and_what_keeps_it_out_is_said(make_drafter: Any, tmp_path: Path) -> None:
    drafter = make_drafter()
    value = flat(drafter) | {"mask_token_id": None, "is_causal": True}
    tensors = {name: tensor for name, tensor in drafter.state_dict().items() if name != "confidence_head.proj.bias"}
    tensors |= {"embed_tokens.weight": drafter.embedding, "lm_head.weight": drafter.head}
    found = inspect_folder(write(tmp_path / "d", value, tensors))
    assert isinstance(found, Inspection)
    assert found.mask_token_id is None and found.confidence_head is False and found.target_layers is None
    assert found.stores_target_ends == ("embed_tokens.weight", "lm_head.weight")
    assert [text.partition(":")[0] for text in found.problems] == [
        "mask_token_id is missing",
        "its blocks attend causally or through a window, which is not supported",
        "its confidence head is not whole",
    ]
    (tmp_path / "d/model.safetensors").unlink()
    without = inspect_folder(tmp_path / "d")
    assert isinstance(without, Inspection) and without.weights is None and without.confidence_head is None


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_drafters_without_heads_are_shown_as_such(
    make_drafter: Any, make_config: Any, record: Any, tmp_path: Path, kind: str
) -> None:
    headless = {"markov_type": "none", "markov_rank": 0, "confidence": False}
    if kind == "dspark":
        drafter = make_drafter(**headless)
        value = {key: inner for key, inner in flat(drafter).items() if key != "markov_head_type"}
    else:
        config = make_config(kind=kind, layers=1, **headless)
        drafter = build_drafter(config, torch.zeros(40, 32), torch.zeros(40, 32))
        value = chain(drafter)
    found = inspect_folder(write(tmp_path / "d", value, drafter.state_dict()))
    assert isinstance(found, Inspection)
    assert (found.kind, found.gamma, found.markov_type, found.markov_rank) == (kind, 4, "none", 0)
    assert found.confidence_head is False and found.problems == ()
    write_union(tmp_path / "ours", drafter, record, untrained=True)
    ours = inspect_folder(tmp_path / "ours")
    assert isinstance(ours, Inspection) and (ours.layout, ours.kind, ours.problems) == ("dspark", kind, ())
    assert (ours.gamma, ours.markov_type, ours.markov_rank, ours.confidence_head) == (4, "none", 0, False)


def test_pickles_and_cut_off_files_are_refused_by_name(make_drafter: Any, tmp_path: Path) -> None:
    drafter = make_drafter()
    folder = write(tmp_path / "d", flat(drafter), drafter.state_dict())
    whole = (folder / "model.safetensors").read_bytes()
    for content in (whole[:-1], b"no", struct.pack("<Q", 1 << 60) + b"{}"):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(DataError, match=r"model\.safetensors: not a whole safetensors file"):
            inspect_folder(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"pickled \(pytorch_model.bin\); pickles can run code"):
        inspect_folder(folder)


def test_fields_of_another_kind_are_named(make_drafter: Any, tmp_path: Path) -> None:
    drafter = make_drafter()
    with pytest.raises(DataError, match=r"config\.json: gamma: .*integer"):
        inspect_folder(write(tmp_path / "d", flat(drafter) | {"block_size": "many"}, drafter.state_dict()))


# ---------------------------------------------------------------- a drafter inside its target


@pytest.fixture
def v4(tmp_path: Path) -> Path:
    """Two shards of a target: one with the drafter's stages, one that is not here; 12 GB by the headers."""
    folder = tmp_path / "v4"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(V4))
    stages = {
        "mtp.0.main_proj.weight": ("F8_E4M3", [4096, 12288], 4096 * 12288),
        "mtp.1.ffn.experts.0.w1.weight": ("I8", [1024, 1024], 1024 * 1024),
        "mtp.2.markov_head.markov_w1.weight": ("BF16", [129280, 256], 129280 * 512),
        "mtp.2.confidence_head.proj.weight": ("F32", [1, 4352], 4 * 4352),
    }
    header_only(
        folder / "model-00002-of-00002.safetensors", stages | {"layers.0.w": ("F8_E4M3", [2, 6 << 30], 12 << 30)}
    )
    places = dict.fromkeys((*stages, "layers.0.w"), "model-00002-of-00002.safetensors")
    places["layers.1.w"] = "model-00001-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def test_a_bundled_drafter_is_described_without_reading_a_weight(v4: Path) -> None:
    found = inspect_folder(v4)
    assert isinstance(found, BundledInspection)
    drafter = found.drafter
    assert (drafter.gamma, drafter.markov_rank, drafter.mask_token_id) == (5, 256, 128799)
    assert (drafter.target_layer_ids, drafter.target_layers, drafter.quantisation) == ((40, 41, 42), 43, "fp8")
    assert drafter.keys == {key: value for key, value in V4.items() if key.startswith("dspark_")}
    assert found.stages == 3 and found.problems == ()
    assert found.weights is not None and found.drafter_weights is not None
    assert (found.weights.tensors, found.weights.described) == (6, 5)
    assert found.weights.absent == ("model-00001-of-00002.safetensors",)
    assert found.drafter_weights.tensors == 4
    assert found.drafter_weights.dtypes == {"F8_E4M3": 50331648, "BF16": 33095680, "I8": 1048576, "F32": 4352}


def test_an_index_alone_tells_the_stages(v4: Path) -> None:
    (v4 / "model-00002-of-00002.safetensors").unlink()
    found = inspect_folder(v4)
    assert isinstance(found, BundledInspection) and found.stages == 3 and found.drafter_weights is not None
    assert (found.drafter_weights.tensors, found.drafter_weights.described, found.drafter_weights.bytes) == (4, 0, 0)
    (v4 / "model.safetensors.index.json").unlink()
    bare = inspect_folder(v4)
    assert isinstance(bare, BundledInspection) and bare.stages is None and bare.weights is None


def test_a_target_without_its_drafter_is_not_taken_for_one_with_it(v4: Path) -> None:
    path = v4 / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = {"layers.1.w": "model-00001-of-00002.safetensors"}
    path.write_text(json.dumps(index))
    found = inspect_folder(v4)
    assert isinstance(found, BundledInspection) and "the drafter is not among them" in found.problems[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict.fromkeys([key for key in V4 if key.startswith("dspark_")]), "no DSpark drafter in it: dspark_block_size"),
        ({"dspark_markov_rank": None}, "described in part: dspark_markov_rank missing"),
        ({"dspark_noise_token_id": 129280}, "dspark_noise_token_id 129280 is outside the vocabulary of 129280"),
        ({"dspark_target_layer_ids": [40, 43]}, r"\[40, 43\] leave the target's 43 layers"),
        ({"dspark_block_size": 0}, "gamma: .*greater than or equal to 1"),
    ],
)
def test_a_bundled_drafter_that_cannot_be_is_refused(v4: Path, change: dict[str, Any], reason: str) -> None:
    (v4 / "config.json").write_text(json.dumps(V4 | change))
    with pytest.raises(DataError, match=reason):
        inspect_folder(v4)


def test_inspecting_loads_no_torch() -> None:
    code = "import sys, dspark.drafters.inspection; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_header_that_is_read_is_what_safetensors_wrote(make_drafter: Any, tmp_path: Path) -> None:
    from dspark.drafters.weights import read_header

    drafter = make_drafter()
    tensors = {name: value.to(torch.bfloat16) for name, value in drafter.state_dict().items()}
    folder = write(tmp_path / "d", flat(drafter), tensors)
    found = read_header(folder / "model.safetensors")
    assert {name: tensor.shape for name, tensor in found.items()} == {k: tuple(v.shape) for k, v in tensors.items()}
    assert {tensor.dtype for tensor in found.values()} == {"BF16"}
