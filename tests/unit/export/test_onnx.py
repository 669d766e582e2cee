"""The ONNX files: valid, equal to torch at every shape, the same bytes for the same drafter, and silent about us.

The reference is the drafter itself, one block at a time, without padding and without cache.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.torch import save_file

from dspark.drafters.checkpoint import write_training_checkpoint
from dspark.engines.onnx_io import CACHED, ENDS, IO_FILE, STATELESS, WEIGHTS, OnnxIO
from dspark.errors import DataError, StageError
from dspark.export.blocks import ProbeBlocks, draft
from dspark.export.graphs import CachedBlock, StatelessBlock
from dspark.export.onnx_files import check_graph
from dspark.export.parity import compare
from dspark.export.runtimes import draft_cached, draft_stateless
from dspark.features.shards import FeatureSequence
from dspark.io.digest import digest_file
from dspark.io.jsonfile import read_model, write_model
from dspark.package.materialise import write_ends

GRAPHS = (STATELESS, CACHED)


def session(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("longest", [1, 2, 9, 70])
def test_the_stateless_graph_drafts_as_torch_does_at_any_shape(
    trained: Any, exported: Path, blocks_of: Any, batch: int, longest: int
):
    """Rows of unequal length in one batch; the padding is NaN, so that reading any of it would show."""
    blocks = blocks_of(batch, longest, seed=batch * 100 + longest)
    features, lengths, anchors = blocks.padded(slice(None), np.nan)
    tokens, confidences = session(exported / STATELESS).run(
        None, {"features": features, "context_length": lengths, "anchor_ids": anchors}
    )
    reference = draft(trained.drafter, blocks)
    assert tokens.dtype == np.int64 and tokens.tolist() == reference.tokens.tolist()
    np.testing.assert_allclose(confidences, reference.confidence, atol=1e-4)
    assert set(tokens.ravel()) <= set(trained.drafter.draft_token_ids.tolist())


@pytest.mark.parametrize("split", ["at once", "one by one"])
def test_the_cached_graph_drafts_as_torch_does_however_the_context_arrives(
    trained: Any, exported: Path, blocks_of: Any, split: str
):
    blocks = blocks_of(1, 7)
    context, anchor = blocks.features[0], blocks.anchors
    step = len(context) if split == "at once" else 1
    graph = session(exported / CACHED)
    keys = values = np.zeros((2, 1, 2, 0, 8), np.float32)
    for start in range(0, len(context), step):
        tokens, confidences, logits, new_keys, new_values = graph.run(
            None,
            {
                "features": context[None, start : start + step],
                "new_count": np.array([step]),
                "past_keys": keys,
                "past_values": values,
                "past_length": np.array([start]),
                "anchor_ids": anchor,
                "temperature": np.zeros(1, np.float32),
                "noise": np.full((1, 3, 23), 9, np.float32),
            },
        )
        keys, values = np.concatenate([keys, new_keys], 3), np.concatenate([values, new_values], 3)
    reference = draft(trained.drafter, blocks)
    assert tokens.tolist() == reference.tokens.tolist()
    np.testing.assert_allclose(confidences, reference.confidence, atol=1e-4)
    np.testing.assert_allclose(logits[0], reference.logits[0], atol=1e-3)


def test_both_graphs_pass_the_comparison_of_the_export_gate(trained: Any, exported: Path, blocks_of: Any):
    blocks = blocks_of(20)
    reference = draft(trained.drafter, blocks)
    for drafts in (draft_stateless(exported, blocks, threads=1), draft_cached(exported, blocks, threads=1)):
        result = compare(reference, drafts, "torch")
        assert (result.verdict, result.differing_blocks, result.near_ties) == ("equal", 0, 0)
        assert result.max_confidence_difference < 1e-4


@pytest.mark.parametrize("draft_vocab_size", [23, None])
def test_both_graphs_are_the_drafter_with_and_without_a_reduced_vocabulary(
    make: Any, blocks_of: Any, draft_vocab_size: int | None
):
    """The graphs' modules in torch, where it costs no tracing. NaN as padding: read anywhere, it would spread."""
    made = make(draft_vocab_size=draft_vocab_size, gamma=5)
    blocks = blocks_of(6)
    features, lengths, anchors = (torch.from_numpy(part) for part in blocks.padded(slice(None), np.nan))
    reference = draft(made.drafter, blocks)
    with torch.no_grad():
        stateless = StatelessBlock(made.drafter)(features, lengths, anchors)
        nothing = torch.zeros(2, 6, 2, 0, 8)
        columns = draft_vocab_size or 61
        quiet = torch.zeros(6), torch.randn(6, 5, columns)
        cached = CachedBlock(made.drafter)(
            features, lengths, nothing, nothing, torch.zeros(6, dtype=torch.int64), anchors, *quiet
        )
    for tokens, confidences in (stateless, cached[:2]):
        assert tokens.tolist() == reference.tokens.tolist()
        np.testing.assert_allclose(confidences, reference.confidence, atol=1e-4)


def test_the_files_are_valid_onnx_of_the_default_domain_with_float32_weights_outside(exported: Path):
    for name in GRAPHS:
        onnx.checker.check_model(str(exported / name), full_check=True)
        model = onnx.load(str(exported / name), load_external_data=False)
        assert {(item.domain, item.version) for item in model.opset_import} == {("", 20)}
        outside = [item for item in model.graph.initializer if item.data_location == onnx.TensorProto.EXTERNAL]
        assert {onnx.TensorProto.DataType.Name(item.data_type) for item in outside} == {"FLOAT"}
        places = {entry.value for item in outside for entry in item.external_data if entry.key == "location"}
        assert places == {WEIGHTS, ENDS}
        inside = [item for item in model.graph.initializer if item not in outside]
        assert max(len(item.raw_data) for item in inside) < 1024


def test_the_graphs_share_their_weights(trained: Any, exported: Path):
    """Every weight once in float32, each on its own page at worst: two copies would exceed this."""
    drafter = trained.drafter
    for name, tensors in ((WEIGHTS, list(drafter.parameters())), (ENDS, [drafter.embedding, drafter.head])):
        outside = [tensor.numel() * 4 for tensor in tensors if tensor.numel() * 4 >= 1024]
        assert sum(outside) * 0.9 < (exported / name).stat().st_size <= sum(outside) + 4096 * (len(outside) + 1)


def test_what_is_the_targets_lies_in_a_file_of_its_own(trained: Any, exported: Path):
    """Whoever has the target can make it again: the embedding, and the rows of the head that can be proposed."""
    data = (exported / ENDS).read_bytes()
    for matrix in (trained.drafter.embedding, trained.drafter.head):
        sides = [side.float().contiguous().numpy().tobytes() for side in (matrix, matrix.T)]
        assert any(side in data for side in sides)
        assert not any(side in (exported / WEIGHTS).read_bytes() for side in sides)


def test_whoever_has_the_target_makes_that_file_again_to_the_byte(trained: Any, exported: Path, tmp_path: Path):
    """From bfloat16 files as a target is published, by what `io.json` says, without torch and without the drafter."""
    tensors = {"model.embed_tokens.weight": trained.embedding, "lm_head.weight": trained.head}
    save_file(tensors, tmp_path / "model.safetensors")
    io = read_model(exported / IO_FILE, OnnxIO)
    assert sorted(piece.tensor for piece in io.ends.pieces) == ["embedding", "head"]
    assert write_ends(tmp_path / "made", io, tmp_path, "bfloat16") == io.ends.sha256
    assert (tmp_path / "made").read_bytes() == (exported / ENDS).read_bytes()


def test_the_head_holds_only_the_rows_of_the_draft_vocabulary(trained: Any, exported: Path):
    model = onnx.load(str(exported / STATELESS))
    shapes = [sorted(item.dims) for item in model.graph.initializer]
    assert sorted([23, 24]) in shapes  # head, either way round
    assert shapes.count(sorted([61, 24])) == 1  # the embedding and nothing else has a row per token of the target


def test_nothing_in_the_files_tells_where_or_by_whom_they_were_made(exported: Path):
    """What torch's exporter writes by itself (it notes a stack trace at every node), and what we might."""
    telling = [getpass.getuser(), socket.gethostname(), str(Path.home()), str(Path.cwd()), str(exported)]
    telling += [".py", "stack_trace", "pkg.torch", "fx_node", "namespace", "torch", "site-packages", "dspark/", "File "]
    for name in (*GRAPHS, IO_FILE):  # the third file is numbers only
        data = (exported / name).read_bytes()
        # dspark/ stands in io.json's own schema.
        words = [word for word in telling if len(word) > 3 and (name != IO_FILE or word != "dspark/")]
        assert not [word for word in words if word.encode() in data], name
    for name in GRAPHS:
        model = onnx.load(str(exported / name), load_external_data=False)
        assert not model.doc_string and not model.graph.doc_string and not model.metadata_props
        assert not any(node.doc_string or node.metadata_props for node in model.graph.node)
        values = [*model.graph.input, *model.graph.output, *model.graph.value_info, *model.graph.initializer]
        assert not any(value.doc_string for value in values)


AGAIN = """
import sys
from pathlib import Path
from safetensors.torch import load_file
from dspark.drafters.checkpoint import read_checkpoint
from dspark.export.onnx import export_onnx
from dspark.targets.record import read_record
kept = Path(sys.argv[1])
target = load_file(kept / "target.safetensors")
drafter = read_checkpoint(kept / "drafter", target["embedding"], target["head"])
export_onnx(drafter, read_record(kept / "record.json"), Path("out"))
"""


@pytest.mark.long
def test_equal_drafters_give_equal_bytes_in_another_process_and_folder(trained: Any, exported: Path, tmp_path: Path):
    """The other process hashes strings differently, so that an order taken from a set would show."""
    kept, elsewhere = tmp_path / "kept", tmp_path / "elsewhere"
    elsewhere.mkdir()
    write_training_checkpoint(kept / "drafter", trained.drafter, trained.record)
    save_file({"embedding": trained.embedding, "head": trained.head}, kept / "target.safetensors")
    write_model(kept / "record.json", trained.record)
    hashing = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = os.environ | {"PYTHONHASHSEED": hashing, "PYTHONPATH": str(Path.cwd())}
    subprocess.run([sys.executable, "-c", AGAIN, str(kept)], cwd=elsewhere, env=environment, check=True)
    assert {path.name: digest_file(path) for path in (elsewhere / "out").iterdir()} == {
        path.name: digest_file(path) for path in exported.iterdir()
    }


def test_io_json_describes_the_sessions_inputs_and_outputs(trained: Any, exported: Path):
    io = read_model(exported / IO_FILE, OnnxIO)
    for spec in (io.stateless, io.cached):
        opened = session(exported / spec.file)
        for described, found in ((spec.inputs, opened.get_inputs()), (spec.outputs, opened.get_outputs())):
            assert [(item.name, list(item.shape)) for item in described] == [(item.name, item.shape) for item in found]
            kinds = {"float32": "tensor(float)", "int64": "tensor(int64)"}
            assert [kinds[item.dtype] for item in described] == [item.type for item in found]
    assert (io.gamma, io.taps, io.mask_token_id, io.opset) == (3, (0, 2), 3, 20)
    assert (io.vocab_size, io.draft_vocab_size) == (61, 23)
    assert io.embedding_digest == trained.record.embedding_digest
    assert io.weights.sha256 == digest_file(exported / WEIGHTS)
    assert sorted(path.name for path in exported.iterdir()) == sorted([*GRAPHS, WEIGHTS, ENDS, IO_FILE])


def test_io_json_that_contradicts_itself_is_refused(exported: Path, tmp_path: Path):
    io = read_model(exported / IO_FILE, OnnxIO)
    for change in ({"mask_token_id": 61}, {"draft_vocab_size": 62}, {"taps": [2, 0]}):
        raw = io.model_dump(mode="json", by_alias=True) | change
        with pytest.raises(ValueError):
            OnnxIO.model_validate(raw)


def test_a_graph_that_needs_another_opset_or_is_broken_is_not_an_export(exported: Path, tmp_path: Path):
    shutil.copytree(exported, tmp_path / "copy")
    with pytest.raises(StageError, match="only opset 18"):
        check_graph(tmp_path / "copy" / STATELESS, 18)
    model = onnx.load(str(tmp_path / "copy" / STATELESS), load_external_data=False)
    model.graph.node[-1].op_type = "NoSuchOperator"
    onnx.save(model, str(tmp_path / "copy" / STATELESS))
    with pytest.raises(StageError, match="not valid ONNX"):
        check_graph(tmp_path / "copy" / STATELESS, 20)


def test_exporting_does_not_change_the_drafter(trained: Any, exported: Path, make: Any):
    fresh = make().drafter
    assert trained.drafter.embedding.dtype == torch.bfloat16
    for (name, before), after in zip(fresh.named_parameters(), trained.drafter.parameters(), strict=True):
        assert torch.equal(before, after), name


def test_blocks_are_taken_at_response_tokens_with_everything_before_them():
    features = torch.arange(30, dtype=torch.bfloat16).view(10, 3)
    sequence = FeatureSequence("a", "math", torch.arange(100, 110), 6, features, features[:, :1], torch.zeros(10))
    blocks = ProbeBlocks.of_sequences([sequence], count=20, longest=8)
    assert set(blocks.lengths) == {6, 7, 8}
    for context, anchor in zip(blocks.features, blocks.anchors, strict=True):
        assert anchor == 100 + len(context)
        assert context.dtype == np.float32 and context[-1].tolist() == features[len(context) - 1].tolist()


def test_sequences_that_hold_no_block_are_refused():
    features = torch.zeros(4, 3)
    short = FeatureSequence("a", "math", torch.arange(4), 4, features, features, torch.zeros(4))
    with pytest.raises(DataError, match="long enough"):
        ProbeBlocks.of_sequences([short])
    with pytest.raises(DataError, match="without context"):
        ProbeBlocks.of_arrays(np.zeros((1, 2, 3), np.float32), np.array([0]), np.array([1]))
    with pytest.raises(DataError, match="no blocks"):
        ProbeBlocks((), np.zeros(0, np.int64))
