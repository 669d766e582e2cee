"""The drafter's GGUF file: its keys and tensors spelled out, what comes back, and everything that is refused."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark.drafters.checkpoint import union_tensors
from dspark.engines import ENGINES
from dspark.errors import DataError, IntegrityError, SettingsError
from dspark.evaluation.tiny import tiny_drafter, tiny_target
from dspark.export.dflash import drafter_keys, file_problems
from dspark.export.gguf import Fault, load_drafter_gguf, read_drafter_gguf, write_drafter_gguf, write_with_fault
from dspark.io.gguffile import GGUFFile, Key, TensorSource, read_gguf, write_gguf

VOCABULARY, HIDDEN, LAYERS = 61, 24, 6
MASK = "tokenizer.ggml.mask_token_id"


def target_file(**changes: Key) -> GGUFFile:
    keys = {
        "general.architecture": Key("llama", "STRING"),
        "llama.block_count": Key(LAYERS, "UINT32"),
        "llama.embedding_length": Key(HIDDEN, "UINT32"),
        "tokenizer.ggml.model": Key("gpt2", "STRING"),
        "tokenizer.ggml.tokens": Key([f"t{number}" for number in range(VOCABULARY)], "STRING"),
        "tokenizer.ggml.merges": Key(["t 1"], "STRING"),
        "tokenizer.ggml.eos_token_id": Key(2, "UINT32"),
    }
    return GGUFFile(Path("target.gguf"), keys | changes, {}, {})


@pytest.fixture(scope="module")
def written(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    """The file of a drafter that may propose 23 of the 61 tokens."""
    path = tmp_path_factory.mktemp("gguf") / "drafter.gguf"
    write_drafter_gguf(path, trained.drafter, target_file())
    return read_gguf(path)


def stored(file: GGUFFile, **changes: np.ndarray) -> dict[str, TensorSource]:
    """The tensors of a file, to be written again; names of the changes with `_` for `.`."""
    values: dict[str, np.ndarray] = {**file.tensors(), **file.integers()}
    values |= {name.replace("_weight", ".weight"): value for name, value in changes.items()}
    kinds = {name: "I64" if value.dtype == np.int64 else "F32" for name, value in values.items()}
    return {name: TensorSource(value.shape, lambda v=value: v, kinds[name]) for name, value in values.items()}


def test_the_keys_are_those_that_llamacpp_reads(written: GGUFFile):
    """Written out by hand from engine-formats.md, section 3.1; taps 0 and 2 are the inputs of layers 1 and 3."""
    assert {name: (key.value, key.kind) for name, key in written.keys.items() if "tokens" not in name} == {
        "general.architecture": ("dflash", "STRING"),
        "general.type": ("model", "STRING"),
        "general.file_type": (0, "UINT32"),
        "dflash.block_count": (2, "UINT32"),
        "dflash.context_length": (256, "UINT32"),
        "dflash.embedding_length": (24, "UINT32"),
        "dflash.feed_forward_length": (40, "UINT32"),
        "dflash.attention.head_count": (4, "UINT32"),
        "dflash.attention.head_count_kv": (2, "UINT32"),
        "dflash.attention.key_length": (8, "UINT32"),
        "dflash.attention.value_length": (8, "UINT32"),
        "dflash.attention.layer_norm_rms_epsilon": (float(np.float32(1e-5)), "FLOAT32"),
        "dflash.attention.causal": (False, "BOOL"),
        "dflash.rope.freq_base": (10000.0, "FLOAT32"),
        "dflash.block_size": (3, "UINT32"),
        "dflash.target_layers": ([1, 3], "INT32"),
        "dflash.sample_from_anchor": (True, "BOOL"),
        "dflash.has_confidence_head": (True, "BOOL"),
        "tokenizer.ggml.model": ("gpt2", "STRING"),
        "tokenizer.ggml.merges": (["t 1"], "STRING"),
        "tokenizer.ggml.eos_token_id": (2, "UINT32"),
        MASK: (3, "UINT32"),
    }


@pytest.mark.parametrize("reduced", [True, False])
def test_the_tensors_have_llamacpps_names_and_the_drafters_vocabulary(
    written: GGUFFile, make: Any, tmp_path: Path, reduced: bool
):
    """engine-formats.md, section 3.3; with the whole vocabulary the head is the target's."""
    if not reduced:
        write_drafter_gguf(tmp_path / "whole.gguf", make(draft_vocab_size=None).drafter, target_file())
        written = read_gguf(tmp_path / "whole.gguf")
    layer = {
        "attn_norm": (24,),
        "ffn_norm": (24,),
        "attn_q": (32, 24),
        "attn_k": (16, 24),
        "attn_v": (16, 24),
        "attn_output": (24, 32),
        "attn_q_norm": (8,),
        "attn_k_norm": (8,),
        "ffn_gate": (40, 24),
        "ffn_up": (40, 24),
        "ffn_down": (24, 40),
    }
    assert written.shapes == {
        "fc.weight": (24, 48),
        "enc.output_norm.weight": (24,),
        "output_norm.weight": (24,),
        "markov_w1.weight": (61, 6),
        "markov_w2.weight": (23, 6) if reduced else (61, 6),
        "conf_proj.weight": (1, 30),
        "conf_proj.bias": (1,),
        **({"output.weight": (23, 24), "d2t": (23,)} if reduced else {}),
        **{f"blk.{number}.{name}.weight": shape for number in (0, 1) for name, shape in layer.items()},
    }


def test_the_drafter_comes_back_bit_by_bit(trained: Any, written: GGUFFile):
    read = read_drafter_gguf(written.path, trained.drafter.config, target_file())
    ids = trained.drafter.draft_token_ids
    expected = {**trained.drafter.state_dict(), "head": trained.head[ids]}
    assert read.state.keys() == expected.keys()
    for name, values in read.state.items():
        assert np.array_equal(values, expected[name].float().numpy()), name
    # Absolute ids; checkpoints in safetensors have offsets.
    assert read.draft_token_ids is not None and read.draft_token_ids.tolist() == ids.tolist()
    assert read.file.types["d2t"] == "I64"


@pytest.mark.parametrize("precision", ["F16", "Q8_0"])
def test_smaller_files_keep_vectors_and_confidence_exact(trained: Any, tmp_path: Path, precision: Any):
    write_drafter_gguf(tmp_path / "d.gguf", trained.drafter, target_file(), precision=precision)
    read = read_drafter_gguf(tmp_path / "d.gguf", trained.drafter.config, target_file())
    kinds = {name for name, kind in read.file.types.items() if kind == "F32"}
    assert {"conf_proj.weight", "conf_proj.bias", "output_norm.weight", "blk.1.attn_k_norm.weight"} <= kinds
    # Rows of 24 do not divide into blocks of 32: Q8_0 leaves those matrices in F16.
    assert read.file.types["blk.0.attn_q.weight"] == "F16"
    assert read.file.types["blk.0.attn_output.weight"] == precision  # rows of 32
    assert (read.file.types["output.weight"], read.file.types["d2t"]) == ("F16", "I64")
    half = trained.drafter.fc.weight.half().float().numpy()
    assert np.array_equal(read.state["fc.weight"], half)


def test_equal_drafters_give_equal_bytes(trained: Any, written: GGUFFile, tmp_path: Path):
    write_drafter_gguf(tmp_path / "again.gguf", trained.drafter, target_file())
    assert (tmp_path / "again.gguf").read_bytes() == written.path.read_bytes()


FAULTS = [
    ("dflash.target_layers", Key([0, 2], "INT32"), r"target_layers is \[0, 2\], not \[1, 3\]"),
    ("dflash.target_layers", Key([0, 2], "INT32"), r"\[0\] are not inputs of layers 1 to 5"),
    ("dflash.target_layers", Key([1, 6], "INT32"), r"\[6\] are not inputs of layers 1 to 5"),
    ("dflash.target_layers", Key([1, 3], "UINT32"), "target_layers is of type UINT32, not INT32"),
    ("dflash.target_layers", None, "dflash.target_layers is missing"),
    (MASK, None, f"{MASK} is missing"),
    (MASK, Key(0, "UINT32"), f"{MASK} is 0, not 3"),
    (MASK, Key(61, "UINT32"), "61 is outside the vocabulary of 61"),
    ("dflash.block_size", Key(4, "UINT32"), "block_size is 4, not 3"),
    ("dflash.block_size", None, "block_size is missing"),
    ("dflash.rope.freq_base", Key(1000.0, "FLOAT32"), "freq_base is 1000.0, not 10000.0"),
    ("dflash.attention.layer_norm_rms_epsilon", Key(1e-6, "FLOAT32"), "epsilon is 1e-06, not 1e-05"),
    ("dflash.sample_from_anchor", Key(False, "BOOL"), "sample_from_anchor is False, not True"),
    ("dflash.attention.causal", Key(True, "BOOL"), "causal is True, not False"),
    ("dflash.has_confidence_head", Key(False, "BOOL"), "has_confidence_head is False, but conf_proj is there"),
    ("dflash.embedding_length", Key(32, "UINT32"), "embedding_length is 32, the target's is 24"),
    ("general.architecture", Key("qwen3", "STRING"), "architecture is qwen3, not dflash"),
    ("tokenizer.ggml.tokens", Key(["t0"], "STRING"), "markov_w1.weight has 61 rows, the vocabulary 1 tokens"),
    ("tokenizer.ggml.tokens", Key(["t0"], "STRING"), "tokens differs from the target's"),
    ("tokenizer.ggml.eos_token_id", None, "eos_token_id differs from the target's"),
    ("tokenizer.ggml.bos_token_id", Key(1, "UINT32"), "bos_token_id differs from the target's"),
]


@pytest.mark.parametrize(("name", "key", "said"), FAULTS)
def test_every_wrong_key_is_named(trained: Any, written: GGUFFile, name: str, key: Key | None, said: str):
    keys = {known: value for known, value in written.keys.items() if known != name} | ({name: key} if key else {})
    problems = file_problems(replace(written, keys=keys), trained.drafter.config, target_file())
    assert re.search(said, "; ".join(problems)), problems


def test_a_right_file_has_no_problem(trained: Any, written: GGUFFile):
    assert file_problems(written, trained.drafter.config, target_file()) == []
    # A target may name a mask token of its own; llama.cpp takes the drafter's.
    assert file_problems(written, trained.drafter.config, target_file(**{MASK: Key(9, "UINT32")})) == []


@pytest.mark.parametrize(
    ("name", "shape", "kind", "said"),
    [
        ("fc.weight", None, None, "tensor fc.weight is missing"),
        ("blk.1.attn_q_norm.weight", None, None, "tensor blk.1.attn_q_norm.weight is missing"),
        ("token_embd.weight", (61, 24), "F32", "tensor token_embd.weight is unexpected"),
        ("output.weight", None, None, "tensor output.weight is missing"),
        ("output.weight", (61, 24), "F32", r"tensor output.weight is \[61, 24\], not \[23, 24\]"),
        ("d2t", None, None, "tensor d2t is missing"),
        ("d2t", (24,), "I64", r"tensor d2t is \[24\], not \[23\]"),
        ("d2t", (23,), "I32", "tensor d2t is I32, it must be I64"),
        ("d2t", (23,), "F32", "tensor d2t is F32, it must be I64"),
        ("fc.weight", (24, 48), "I64", "tensor fc.weight is I64, which are integers"),
        ("markov_w2.weight", (61, 6), "F32", r"tensor markov_w2.weight is \[61, 6\], not \[23, 6\]"),
        ("conf_proj.weight", (1, 24), "F32", r"conf_proj.weight is \[1, 24\], not \[1, 30\]"),
        ("conf_proj.weight", (1, 30), "F16", "conf_proj.weight is F16, it must be F32"),
        ("output_norm.weight", (24,), "F16", "output_norm.weight is F16, it must be F32"),
        ("conf_proj.bias", None, None, "has_confidence_head is True, but conf_proj is not there"),
    ],
)
def test_every_wrong_tensor_is_named(trained: Any, written: GGUFFile, name: str, shape: Any, kind: Any, said: str):
    shapes = {known: value for known, value in written.shapes.items() if known != name}
    types = {known: value for known, value in written.types.items() if known != name}
    if shape is not None:
        shapes[name], types[name] = shape, kind
    problems = file_problems(replace(written, shapes=shapes, types=types), trained.drafter.config, target_file())
    assert re.search(said, "; ".join(problems)), problems


@pytest.mark.parametrize("extra", ["output.weight", "d2t"])
def test_a_file_of_the_whole_vocabulary_has_no_tensors_of_a_reduced_one(
    make: Any, written: GGUFFile, tmp_path: Path, extra: str
):
    drafter = make(draft_vocab_size=None).drafter
    write_drafter_gguf(tmp_path / "whole.gguf", drafter, target_file())
    tensors = stored(read_gguf(tmp_path / "whole.gguf")) | {extra: stored(written)[extra]}
    write_gguf(tmp_path / "more.gguf", written.keys, tensors)
    with pytest.raises(IntegrityError, match=f"tensor {extra} is unexpected"):
        read_drafter_gguf(tmp_path / "more.gguf", drafter.config, target_file())


BAD_IDS = [
    ([*range(22), 61], r"d2t: \[61\] are no ids in a vocabulary of 61"),
    ([-1, *range(22)], r"d2t: \[-1\] are no ids in a vocabulary of 61"),
    # Offsets of ids 3, 4, 5, 9, 10, ... from 0, 1, 2, ...
    ([3, 3, 3, *[6] * 20], "d2t: 21 of 23 ids are there already .they must be ids, not offsets."),
]


@pytest.mark.parametrize(("ids", "said"), BAD_IDS)
def test_ids_that_are_none_are_refused(trained: Any, written: GGUFFile, tmp_path: Path, ids: list[int], said: str):
    write_gguf(tmp_path / "bad.gguf", written.keys, stored(written, d2t=np.array(ids)))
    with pytest.raises(IntegrityError, match=said):
        read_drafter_gguf(tmp_path / "bad.gguf", trained.drafter.config, target_file())


def test_a_fault_of_the_ids_goes_round_the_end_of_the_vocabulary(trained: Any, written: GGUFFile, tmp_path: Path):
    write_with_fault(tmp_path / "fault.gguf", trained.drafter, target_file(), Fault(shift=1))
    faulty, right = read_gguf(tmp_path / "fault.gguf"), written.integers()["d2t"]
    assert faulty.integers()["d2t"].tolist() == [(token + 1) % 61 for token in right.tolist()]
    assert faulty.keys == written.keys and faulty.shapes == written.shapes


def test_reading_names_all_problems_at_once(trained: Any, tmp_path: Path):
    fault = Fault({"dflash.block_size": Key(9, "UINT32"), MASK: Key(0, "UINT32")})
    write_with_fault(tmp_path / "bad.gguf", trained.drafter, target_file(), fault)
    with pytest.raises(IntegrityError, match=r"bad\.gguf: dflash\.block_size is 9, not 3; .*mask_token_id is 0, not 3"):
        read_drafter_gguf(tmp_path / "bad.gguf", trained.drafter.config, target_file())


def test_weights_that_are_not_finite_are_refused(make: Any, tmp_path: Path):
    drafter = make().drafter
    drafter.fc.weight[0, 0] = torch.nan
    write_with_fault(tmp_path / "nan.gguf", drafter, target_file(), Fault())
    with pytest.raises(IntegrityError, match=r"not finite: fc\.weight"):
        read_drafter_gguf(tmp_path / "nan.gguf", drafter.config, target_file())


def test_another_targets_file_is_refused_before_anything_is_written(trained: Any, tmp_path: Path):
    shallow = target_file(**{"llama.block_count": Key(3, "UINT32")})
    with pytest.raises(IntegrityError, match=r"not written: .*\[3\] are not inputs of layers 1 to 2"):
        write_drafter_gguf(tmp_path / "d.gguf", trained.drafter, shallow)
    assert list(tmp_path.iterdir()) == []


def test_what_llamacpp_cannot_run_is_refused_with_the_reason(make: Any, tmp_path: Path):
    made = make()
    config = made.drafter.config
    assert ENGINES["llamacpp"].supports(config) is None
    reasons = {
        "vanilla Markov heads, this one is 'gated'": {"markov_type": "gated"},
        "no biases in attention": {"attention_bias": True},
        "RoPE is of type 'llama3'": {"rope": {"rope_type": "llama3", "rope_theta": 1e4}},
    }
    for reason, change in reasons.items():
        # model_copy does not validate: this one has a reduced vocabulary, which goes with vanilla heads alone.
        made.drafter.config = config.model_copy(update=change)
        with pytest.raises(SettingsError, match=reason):
            write_drafter_gguf(tmp_path / "d.gguf", made.drafter, target_file())
    assert list(tmp_path.iterdir()) == []


SIZES = {"llama.block_count": Key(3, "UINT32"), "llama.embedding_length": Key(32, "UINT32")}


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """A target, a drafter for it, and its file as anybody might have written it."""
    target = tiny_target(VOCABULARY)
    drafter = tiny_drafter(target, 3)
    path = tmp_path_factory.mktemp("foreign") / "drafter.gguf"
    write_drafter_gguf(path, drafter, target_file(**SIZES))
    return target, drafter, path


@dataclass(frozen=True)
class Elsewhere:
    """A reduced file whose W1 has no constant channel, whose ids are in no order and whose head is its own."""

    target: Any
    file: GGUFFile
    values: dict[str, np.ndarray]
    ids: np.ndarray


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Elsewhere:
    target = tiny_target(VOCABULARY)
    folder, generator = tmp_path_factory.mktemp("elsewhere"), np.random.default_rng(0)
    write_drafter_gguf(folder / "ours.gguf", tiny_drafter(target, 3, draft_token_ids=range(20)), target_file(**SIZES))
    ids = generator.permutation(VOCABULARY)[:20].astype(np.int64)
    changes = {
        "markov_w1_weight": generator.standard_normal((VOCABULARY, 4)).astype(np.float32),
        "output_weight": generator.standard_normal((20, 32)).astype(np.float32),
        "d2t": ids,
    }
    ours = read_gguf(folder / "ours.gguf")
    write_gguf(folder / "drafter.gguf", ours.keys, stored(ours, **changes))
    file = read_gguf(folder / "drafter.gguf")
    return Elsewhere(target, file, file.tensors(), ids)


def load(path: Path, target: Any) -> Any:
    return load_drafter_gguf(path, target.record, target.embedding, target.head)


def test_a_file_from_elsewhere_becomes_the_drafter_that_it_describes(foreign: tuple[Any, Any, Path]):
    target, drafter, path = foreign
    loaded = load(path, target)
    assert loaded.config.model_dump() == drafter.config.model_dump() | {
        "rms_norm_eps": float(np.float32(drafter.config.rms_norm_eps)),
        "rope": {"rope_type": "default", "rope_theta": float(np.float32(drafter.config.rope["rope_theta"]))},
    }
    for name, values in loaded.state_dict().items():
        assert torch.equal(values, drafter.state_dict()[name]), name
    assert loaded.head is target.head or torch.equal(loaded.head, target.head)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_reduced_file_from_elsewhere_is_loaded_as_it_is(elsewhere: Elsewhere, gradients: bool):
    """Logits of every id by hand from the file: row i of its head and of its W2 are those of token d2t[i]."""
    drafter, values = load(elsewhere.file.path, elsewhere.target), elsewhere.values
    assert drafter.draft_token_ids.tolist() == sorted(elsewhere.ids.tolist())
    generator = np.random.default_rng(1)
    hidden = generator.standard_normal((5, 32)).astype(np.float32)
    previous = generator.integers(0, VOCABULARY, 5)
    rows = hidden @ values["output.weight"].T + values["markov_w1.weight"][previous] @ values["markov_w2.weight"].T
    with torch.set_grad_enabled(gradients):
        found = drafter.base_logits(torch.tensor(hidden)) + drafter.chain().bias(
            torch.tensor(previous), torch.tensor(hidden)
        )
    order = {token: row for row, token in enumerate(elsewhere.ids.tolist())}
    columns = [order[token] for token in drafter.draft_token_ids.tolist()]
    assert np.allclose(found.numpy(), rows[:, columns], atol=1e-4)
    best = drafter.to_target_ids(found.argmax(-1))
    assert best.tolist() == elsewhere.ids[rows.argmax(-1)].tolist()


def test_a_reduced_file_from_elsewhere_survives_being_written_again(elsewhere: Elsewhere, tmp_path: Path):
    drafter = load(elsewhere.file.path, elsewhere.target)
    write_drafter_gguf(tmp_path / "again.gguf", drafter, target_file(**SIZES))
    again = load(tmp_path / "again.gguf", elsewhere.target)
    assert torch.equal(again.head, drafter.head) and torch.equal(again.draft_token_ids, drafter.draft_token_ids)
    for name, values in again.state_dict().items():
        assert torch.equal(values, drafter.state_dict()[name]), name
    with pytest.raises(SettingsError, match="no constant channel cannot be written with the whole one"):
        union_tensors(drafter)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([*range(19), 61], r"\[61\] are no ids in a vocabulary of 61"),
        ([-5, *range(19)], r"\[-5\] are no ids in a vocabulary of 61"),
        ([7] * 20, "19 of 20 ids are there already"),
        (list(range(19)), r"markov_w2.weight is \[20, 4\], not \[19, 4\]"),
    ],
)
def test_a_reduced_file_whose_ids_are_none_is_refused(elsewhere: Elsewhere, tmp_path: Path, ids: list[int], said: str):
    write_gguf(tmp_path / "d.gguf", elsewhere.file.keys, stored(elsewhere.file, d2t=np.array(ids)))
    with pytest.raises(IntegrityError, match=said):
        load(tmp_path / "d.gguf", elsewhere.target)


def test_ids_of_every_token_are_no_reduced_vocabulary(elsewhere: Elsewhere, tmp_path: Path):
    write_gguf(tmp_path / "d.gguf", elsewhere.file.keys, stored(elsewhere.file, d2t=np.arange(VOCABULARY)))
    with pytest.raises(DataError, match="draft_vocab_size must be smaller than vocab_size"):
        load(tmp_path / "d.gguf", elsewhere.target)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"general.architecture": Key("llama", "STRING")}, "its architecture is 'llama', not 'dflash'"),
        ({"dflash.sample_from_anchor": Key(False, "BOOL")}, "its first slot drafts nothing"),
        ({"dflash.attention.causal": Key(True, "BOOL")}, "attend causally"),
        ({"dflash.attention.sliding_window": Key(2048, "UINT32")}, "sliding window"),
        ({"dflash.rope.scaling.type": Key("yarn", "STRING")}, "RoPE is scaled"),
        ({"dflash.block_size": None}, "dflash.block_size is missing"),
        ({MASK: None}, f"{MASK} is missing"),
        ({"dflash.target_layers": Key([1, 3], "INT32")}, "tap 2 is the last"),
        ({"dflash.embedding_length": Key(48, "UINT32")}, "its hidden size is 48, that of target tiny is 32"),
    ],
)
def test_drafters_of_another_kind_are_refused(
    foreign: tuple[Any, Any, Path], tmp_path: Path, changes: dict[str, Key | None], said: str
):
    target, _, path = foreign
    file = read_gguf(path)
    keys = {name: key for name, key in {**file.keys, **changes}.items() if key is not None}
    write_gguf(tmp_path / "d.gguf", keys, stored(file))
    with pytest.raises(DataError, match=re.escape(said)):
        load(tmp_path / "d.gguf", target)


@pytest.mark.parametrize(
    ("dropped", "error", "said"),
    [
        ("markov_w1.weight", DataError, "this is a DFlash drafter, not a DSpark one"),
        ("conf_proj.bias", DataError, "half a confidence head: conf_proj.weight alone"),
        ("blk.0.attn_q.weight", IntegrityError, "tensor blk.0.attn_q.weight is missing"),
    ],
)
def test_drafters_without_a_part_are_refused(
    foreign: tuple[Any, Any, Path], tmp_path: Path, dropped: str, error: type[Exception], said: str
):
    target, _, path = foreign
    file = read_gguf(path)
    tensors = {name: source for name, source in stored(file).items() if name != dropped}
    write_gguf(tmp_path / "d.gguf", file.keys, tensors)
    with pytest.raises(error, match=re.escape(said)):
        load(tmp_path / "d.gguf", target)


def test_the_keys_of_a_config_are_json(trained: Any):
    """numpy numbers would be written as another type by the package, or not at all."""
    json.dumps([key.value for key in drafter_keys(trained.drafter.config).values()])


def test_a_confidence_head_stored_like_any_matrix_is_read(foreign: tuple[Any, Any, Path], tmp_path: Path):
    """As llama.cpp's converter stores it; vectors stay F32 there too."""
    target, drafter, path = foreign
    file = read_gguf(path)
    halves = {"conf_proj.weight", "fc.weight"}
    tensors = {
        name: TensorSource(values.shape, lambda v=values: v, "F16" if name in halves else "F32")
        for name, values in file.tensors().items()
    }
    write_gguf(tmp_path / "d.gguf", file.keys, tensors)
    loaded = load(tmp_path / "d.gguf", target)
    assert torch.equal(loaded.confidence_head.proj.weight, drafter.confidence_head.proj.weight.half().float())
    tensors["output_norm.weight"] = TensorSource((32,), tensors["output_norm.weight"].load, "F16")
    write_gguf(tmp_path / "d.gguf", file.keys, tensors)
    with pytest.raises(IntegrityError, match=r"output_norm\.weight is F16, it must be F32"):
        load(tmp_path / "d.gguf", target)


@pytest.mark.parametrize("vocabulary", [None, 23])
def test_a_drafter_without_heads_becomes_a_dspark_file_that_drafts_the_same(
    make: Any, tmp_path: Path, vocabulary: int | None
):
    """engine-formats.md, 3.1: has_confidence_head false, no conf_proj, and a Markov head, here of zeros."""
    headless = {"markov_type": "none", "markov_rank": 0, "confidence": False, "draft_vocab_size": vocabulary}
    made = make(**headless)
    path = tmp_path / "drafter.gguf"
    write_drafter_gguf(path, made.drafter, target_file())
    file = read_gguf(path)
    assert file.value("dflash.has_confidence_head") is False
    assert not any(name.startswith("conf_proj") for name in file.shapes)
    assert file.shapes["markov_w1.weight"] == (VOCABULARY, 16)
    assert not file.tensors()["markov_w2.weight"].any()
    loaded = load_drafter_gguf(path, made.record, made.embedding.float(), made.head.float())
    assert (loaded.config.markov_type, loaded.config.confidence) == ("vanilla", False)
    state = loaded.state_dict()
    assert all(torch.equal(state[name], value.float()) for name, value in made.drafter.state_dict().items())
