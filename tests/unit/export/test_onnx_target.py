"""The target as ONNX: what torch says, however the tokens arrive; and a graph that says anything else is refused.

The reference is the target itself, a whole sequence in one pass.
"""

from __future__ import annotations

import getpass
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from tokenizers import Tokenizer

from dspark.decoding.loop import decode
from dspark.engines.onnx_io import IO_FILE
from dspark.engines.onnx_target_io import TARGET, TARGET_WEIGHTS, TOKENIZER, OnnxTargetIO
from dspark.errors import DataError, GateError, SettingsError
from dspark.evaluation.tiny import tiny_target
from dspark.export import target_graph
from dspark.export.onnx_target import check_place, export_target
from dspark.export.target_graph import TargetStep, product_attention
from dspark.export.target_parity import Geometry, compare_target
from dspark.io.digest import digest_tree
from dspark.io.jsonfile import read_model
from dspark.targets.loading import Target
from dspark.targets.synthetic import byte_tokenizer

VOCABULARY, WIDTH = 280, 32


def make_target(family: str = "llama", *, tied: bool = False, **fields: Any) -> Target:
    """Three layers, taps 0 and 1, two heads of keys for four of queries, and a token per byte."""
    made = tiny_target(VOCABULARY, family=family, eos_token_ids=(2,), spread=0.3, **fields)
    if tied:
        made.model.lm_head.weight = made.model.model.embed_tokens.weight
    return Target(made.record, made.model, byte_tokenizer())


def prompts_of(target: Target) -> list[list[int]]:
    return [target.template.encode_chat([{"role": "user", "content": text}]) for text in ("Hello", "What is 2 + 3?")]


def tokens_of(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()


def reference(target: Target, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    taps, last_hidden = target.hidden(torch.tensor([ids]))
    return target.logits(last_hidden)[0].numpy(), taps[0].numpy()


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen3, tied", marks=pytest.mark.long)])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Path]:
    """A target and the folder that it was exported to."""
    family, _, tied = request.param.partition(", ")
    target = make_target(family, tied=bool(tied))
    out = tmp_path_factory.mktemp("exported") / "target"
    export_target(target, prompts_of(target), out, new_tokens=6)
    return target, out


@pytest.fixture
def graph(pair: tuple[Target, Path]) -> Callable[..., list[np.ndarray]]:
    session = onnxruntime.InferenceSession(str(pair[1] / TARGET), providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_inputs()]
    return lambda *inputs: session.run(None, dict(zip(names, inputs, strict=True)))


@pytest.mark.parametrize("pieces", [[20], [1] * 20, [7, 5, 5, 3]])
def test_it_says_what_torch_says_however_the_tokens_arrive(pair: Any, graph: Any, pieces: list[int]):
    target, _ = pair
    ids = tokens_of(len(pieces), 20)
    keys = values = Geometry.of(target.model.config).nothing()
    logits, features = [], []
    for end, count in zip(np.cumsum(pieces), pieces, strict=True):
        piece = np.array([ids[end - count : end]])
        now, taps, new_keys, new_values = graph(piece, keys, values, np.array([end - count]))
        logits.append(now[0])
        features.append(taps[0])
        keys, values = np.concatenate([keys, new_keys], 3), np.concatenate([values, new_values], 3)
    expected_logits, expected_features = reference(target, ids)
    np.testing.assert_allclose(np.concatenate(logits), expected_logits, atol=1e-4)
    np.testing.assert_allclose(np.concatenate(features), expected_features, atol=1e-4)


def test_rows_of_a_batch_have_pasts_of_their_own_length(pair: Any, graph: Any):
    """Beyond a row's past stands a large number, behind its new tokens a token of no meaning: neither may show."""
    target, _ = pair
    shape = Geometry.of(target.model.config)
    pasts, news = [9, 0, 4], [2, 4, 3]
    rows = [tokens_of(10 + row, past + new) for row, (past, new) in enumerate(zip(pasts, news, strict=True))]
    keys = np.full((shape.layers, 3, shape.heads, 9, shape.head_dim), 1e4, np.float32)
    values = keys.copy()
    ids = np.full((3, 4), 7)
    for row, (past, new) in enumerate(zip(pasts, news, strict=True)):
        ids[row, :new] = rows[row][past:]
        if past:
            nothing = shape.nothing()
            found = graph(np.array([rows[row][:past]]), nothing, nothing, np.array([0]))
            keys[:, row, :, :past], values[:, row, :, :past] = found[2][:, 0], found[3][:, 0]
    logits, features, _, _ = graph(ids, keys, values, np.array(pasts))
    for row, (past, new) in enumerate(zip(pasts, news, strict=True)):
        expected_logits, expected_features = reference(target, rows[row])
        np.testing.assert_allclose(logits[row, :new], expected_logits[past:], atol=1e-4)
        np.testing.assert_allclose(features[row, :new], expected_features[past:], atol=1e-4)


def test_its_greedy_text_is_that_of_the_reference_loop(pair: Any, graph: Any):
    target, _ = pair
    prompt = tokens_of(3, 11)
    expected = decode(target, None, [prompt], max_new_tokens=20)[0].token_ids
    keys = values = Geometry.of(target.model.config).nothing()
    piece, tokens = prompt, []
    while len(tokens) < len(expected):
        length = np.array([keys.shape[3]])
        logits, _, new_keys, new_values = graph(np.array([piece]), keys, values, length)
        keys, values = np.concatenate([keys, new_keys], 3), np.concatenate([values, new_values], 3)
        piece = [int(logits[0, -1].argmax())]
        tokens += piece
    assert tokens == expected


def test_the_file_is_valid_onnx_of_the_default_domain_with_every_weight_once_in_float32(pair: Any):
    target, out = pair
    onnx.checker.check_model(str(out / TARGET), full_check=True)
    model = onnx.load(str(out / TARGET), load_external_data=False)
    assert {(item.domain, item.version) for item in model.opset_import} == {("", 20)}
    outside = [item for item in model.graph.initializer if item.data_location == onnx.TensorProto.EXTERNAL]
    assert {onnx.TensorProto.DataType.Name(item.data_type) for item in outside} == {"FLOAT"}
    # parameters() yields a tied matrix once.
    sizes = [item.numel() * 4 for item in target.model.parameters() if item.numel() * 4 >= 1024]
    assert sum(sizes) * 0.9 < (out / TARGET_WEIGHTS).stat().st_size <= sum(sizes) + 4096 * (len(sizes) + 1)


def test_nothing_in_the_files_tells_where_or_by_whom_they_were_made(pair: Any):
    telling = [getpass.getuser(), socket.gethostname(), str(Path.home()), str(Path.cwd()), str(pair[1])]
    telling += [".py", "stack_trace", "pkg.torch", "fx_node", "namespace", "site-packages", "transformers", "File "]
    for name in (TARGET, IO_FILE):
        data = (pair[1] / name).read_bytes()
        assert not [word for word in telling if len(word) > 3 and word.encode() in data], name


def test_io_json_describes_the_session_the_target_and_the_comparison(pair: Any):
    target, out = pair
    io = read_model(out / IO_FILE, OnnxTargetIO)
    session = onnxruntime.InferenceSession(str(out / io.graph.file), providers=["CPUExecutionProvider"])
    for described, found in ((io.graph.inputs, session.get_inputs()), (io.graph.outputs, session.get_outputs())):
        assert [(item.name, list(item.shape)) for item in described] == [(item.name, item.shape) for item in found]
        kinds = {"float32": "tensor(float)", "int64": "tensor(int64)"}
        assert [kinds[item.dtype] for item in described] == [item.type for item in found]
    assert (io.taps, io.layers, io.num_key_value_heads, io.head_dim) == ((0, 1), 3, 2, 8)
    assert (io.eos_token_ids, io.mask_token_id, io.vocab_size, io.max_position) == ((2,), 0, VOCABULARY, 128)
    assert (io.embedding_digest, io.head_digest) == (target.record.embedding_digest, target.record.head_digest)
    assert io.compared.verdict == "equal" and io.compared.prompts == 2 and io.compared.differing_tokens == 0
    assert 0 < io.compared.max_logit_difference < 1e-4
    assert sorted(path.name for path in out.iterdir()) == sorted([TARGET, TARGET_WEIGHTS, TOKENIZER, IO_FILE])


def test_io_json_that_contradicts_itself_is_refused(pair: Any):
    io = read_model(pair[1] / IO_FILE, OnnxTargetIO)
    raw = io.model_dump(mode="json", by_alias=True)
    changes = {"mask_token_id": 280}, {"eos_token_ids": [280]}, {"taps": [1, 0]}, {"taps": [3]}, {"tokenizer": None}
    for change in changes:
        with pytest.raises(ValueError):
            OnnxTargetIO.model_validate(raw | change)


@pytest.mark.parametrize("text", ["Hi", "two\n\nlines", "é 🎉"])
def test_the_two_strings_and_the_tokenizer_alone_give_the_prompts_tokens(pair: Any, text: str):
    target, out = pair
    io = read_model(out / IO_FILE, OnnxTargetIO)
    assert io.chat is not None and io.tokenizer is not None
    alone = Tokenizer.from_file(str(out / io.tokenizer))
    found = alone.encode(io.chat.before + text + io.chat.after, add_special_tokens=False).ids
    assert found == target.template.encode_chat([{"role": "user", "content": text}])


def test_exporting_leaves_the_target_as_it_was(pair: Any):
    assert pair[0].model.config._attn_implementation == "sdpa"


# ---------------------------------------------------------------- what is compared


def stepped(
    target: Target,
    inputs: Callable[[list[np.ndarray]], list[np.ndarray]] = lambda given: given,
    outputs: Callable[[list[np.ndarray]], list[np.ndarray]] = lambda found: found,
) -> Callable[..., list[np.ndarray]]:
    """The graph's module in torch, where it costs no tracing, with a fault in what goes in or comes out."""
    step = TargetStep(target)

    def run(*given: np.ndarray) -> list[np.ndarray]:
        with product_attention(target), torch.no_grad():
            return outputs([one.numpy() for one in step(*map(torch.from_numpy, inputs(list(given))))])

    return run


def compared(target: Target, run: Callable[..., list[np.ndarray]]) -> Any:
    return compare_target(target, Geometry.of(target.model.config), run, prompts_of(target), new_tokens=12)


def test_the_module_itself_passes():
    target = make_target()
    result = compared(target, stepped(target))
    assert (result.verdict, result.differing_tokens, result.near_ties) == ("equal", 0, 0)
    assert result.greedy_tokens == 24 and result.max_logit_difference < 1e-4


def replaced(place: int, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[list[np.ndarray]], list[np.ndarray]]:
    return lambda arrays: [change(array) if number == place else array for number, array in enumerate(arrays)]


FAULTS: dict[str, dict[str, Any]] = {
    "taps in another order": {"outputs": replaced(1, lambda features: np.roll(features, WIDTH, -1))},
    "answers one position further on": {"inputs": replaced(3, lambda length: length + (length > 0))},
    "a past that is not seen": {"inputs": replaced(3, np.zeros_like)},
    "keys of the wrong layer": {"outputs": replaced(2, lambda keys: np.roll(keys, 1, 0))},
    "values of the wrong layer": {"outputs": replaced(3, lambda values: np.roll(values, 1, 0))},
    "logits of the position before": {"outputs": replaced(0, lambda logits: np.roll(logits, 1, 1))},
    "logits a little off": {"outputs": replaced(0, lambda logits: logits + np.float32(2e-3))},
    "not a number": {"outputs": replaced(0, lambda logits: logits * np.float32(np.nan))},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_graph_does_not_pass(fault: str):
    target = make_target()
    assert compared(target, stepped(target, **FAULTS[fault])).verdict == "different"


def test_tokens_that_see_those_behind_them_do_not_pass(monkeypatch: pytest.MonkeyPatch):
    target = make_target()
    visible = target_graph._visible
    monkeypatch.setattr(target_graph, "_visible", lambda *given: torch.ones_like(visible(*given)))
    result = compared(target, stepped(target))
    assert result.verdict == "different" and result.max_logit_difference > result.logit_tolerance


def test_a_tie_that_falls_the_other_way_is_counted_and_no_difference():
    """The head has the first greedy token's row twice: torch takes the first of equals, the other side the last."""
    target = make_target()
    prompt = prompts_of(target)[0]
    first = decode(target, None, [prompt], max_new_tokens=1)[0].token_ids[0]
    twin = VOCABULARY - 1
    assert first != twin
    with torch.no_grad():
        target.head[twin] = target.head[first]

    def prefer(logits: np.ndarray) -> np.ndarray:
        logits[..., twin] += 1e-5
        return logits

    run = stepped(target, outputs=replaced(0, prefer))
    result = compare_target(target, Geometry.of(target.model.config), run, [prompt], new_tokens=1)
    assert (result.verdict, result.near_ties, result.differing_tokens) == ("equal", 1, 0)


@pytest.mark.long
def test_a_graph_that_is_not_the_target_is_refused_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Traced with a fault, so that it is the file that speaks wrongly."""
    target = make_target()
    visible = target_graph._visible
    monkeypatch.setattr(target_graph, "_visible", lambda *given: torch.ones_like(visible(*given)))
    with pytest.raises(GateError, match="its ONNX graph is not the target"):
        export_target(target, prompts_of(target), tmp_path / "out", new_tokens=4)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- where it is written


@pytest.mark.long
def test_an_earlier_export_is_replaced_by_the_same_bytes(pair: Any):
    target, out = pair
    before = digest_tree(out)
    export_target(target, prompts_of(target), out, new_tokens=6)
    assert digest_tree(out) == before
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path):
    target = make_target()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SettingsError, match="there is no folder"):
        check_place(tmp_path / "none" / "out")
    with pytest.raises(SettingsError, match="holds something else"):
        export_target(target, prompts_of(target), tmp_path)
    with pytest.raises(SettingsError, match="is not a folder"):
        export_target(target, prompts_of(target), tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_cannot_be_exported_is_refused_with_its_reason(tmp_path: Path):
    target = make_target()
    with pytest.raises(DataError, match="no prompts"):
        export_target(target, [], tmp_path / "out")
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2}
    record = target.record.model_copy(update={"text_config": {**target.record.text_config, "rope_parameters": rope}})
    with pytest.raises(SettingsError, match="'dynamic' depends on the length"):
        export_target(Target(record, target.model, target.tokenizer), prompts_of(target), tmp_path / "out")
    half = make_target(dtype=torch.bfloat16)
    with pytest.raises(DataError, match="exported in float32, it is loaded in"):
        export_target(half, prompts_of(half), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}, "choose experts"),
        ("mistral", {"sliding_window": 8}, "attend within a window"),
        ("gemma4_unified_text", {"layer_types": ["full_attention"] * 3, "global_head_dim": 16}, "shape keys by kind"),
    ],
)
def test_layers_that_one_graph_cannot_follow_are_refused_before_anything_is_traced(
    tmp_path: Path, family: str, changes: dict[str, Any], reason: str
) -> None:
    target = make_target(family, changes=changes)
    with pytest.raises(SettingsError, match=f"tiny: it cannot be exported: .*{reason}"):
        export_target(target, prompts_of(target), tmp_path / "out")
    assert not (tmp_path / "out").exists()
