"""The export gate: every dialect compared by its drafts, and the faults that it has to notice."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark.config.models import ExportSettings
from dspark.drafters.checkpoint import read_checkpoint
from dspark.drafters.dspark import DSparkDrafter
from dspark.errors import GateError, IntegrityError, SettingsError, StageError
from dspark.export import build as build_module
from dspark.export import export_build
from dspark.export.blocks import Drafts, draft
from dspark.export.parity import compare, judge, negative_controls, rounded
from dspark.export.report import ParityReport
from dspark.io.digest import digest_file
from dspark.io.gguffile import GGUFFile, Key
from dspark.io.jsonfile import read_model
from dspark.io.progress import Progress

NO_ONNX = ExportSettings(onnx=False)


class Steps(Progress):
    def __init__(self) -> None:
        self.total = self.done = 0

    def start(self, task: str, total: int, done: int = 0, unit: str = "steps") -> None:
        self.total = total

    def advance(self, count: int = 1, **fields: Any) -> None:
        self.done += count


def as_gguf(made: Any) -> GGUFFile:
    """The target of these drafters as llama.cpp would have it."""
    keys = {
        "general.architecture": Key("llama", "STRING"),
        "llama.block_count": Key(6, "UINT32"),
        "llama.embedding_length": Key(made.embedding.shape[1], "UINT32"),
        "tokenizer.ggml.model": Key("gpt2", "STRING"),
        "tokenizer.ggml.tokens": Key([f"t{number}" for number in range(made.embedding.shape[0])], "STRING"),
    }
    return GGUFFile(Path("target.gguf"), keys, {}, {})


def run(made: Any, blocks: Any, out: Path, settings: ExportSettings = NO_ONNX, **more: Any) -> ParityReport:
    return export_build(
        made.drafter, made.record, settings, blocks, out, embedding=made.embedding, head=made.head, **more
    )


def test_a_build_is_written_compared_and_reported(built: Path):
    report = read_model(built / "parity.json", ParityReport)
    names = ["draft_block.onnx", "draft_block.onnx.data", "draft_block_cached.onnx", "io.json", "target_ends.onnx.data"]
    assert sorted(path.name for path in (built / "onnxruntime").iterdir()) == names
    assert sorted(path.name for path in built.iterdir()) == ["drafter", "onnxruntime", "parity.json", "tensorrt"]
    assert set(report.dialects) == {"union", "onnx", "onnx_cached"}
    for result in report.dialects.values():
        assert (result.verdict, result.blocks, result.tokens, result.differing_blocks) == ("equal", 24, 72, 0)
        assert result.max_confidence_difference <= result.confidence_tolerance == 1e-4
    assert set(report.negative_controls) == {"taps shifted by one", "mask token 4", "RoPE theta / 10"}
    for result in report.negative_controls.values():
        assert result.verdict == "different" and result.differing_blocks > 0
    assert (report.probes.blocks, report.probes.shortest_context, report.probes.longest_context) == (24, 1, 40)


def test_progress_ends_where_it_said_it_would(trained: Any, blocks_of: Any, tmp_path: Path):
    steps = Steps()
    run(trained, blocks_of(4), tmp_path, progress=steps)
    assert steps.done == steps.total == 2


@pytest.mark.parametrize("draft_vocab_size", [23, None])
def test_the_union_checkpoint_drafts_as_the_drafter_in_its_dtype(
    make: Any, blocks_of: Any, tmp_path: Path, draft_vocab_size: int | None
):
    made = make(draft_vocab_size=draft_vocab_size)
    report = run(made, blocks_of(12), tmp_path)
    union = report.dialects["union"]
    assert union.verdict == "equal" and "draft_logits" in union.compared
    assert union.max_logit_difference is not None and union.max_logit_difference < 1e-3
    assert read_checkpoint(tmp_path / "drafter", made.embedding, made.head).fc.weight.dtype == torch.bfloat16
    assert not (tmp_path / "onnxruntime").exists()


@pytest.mark.parametrize("draft_vocab_size", [23, None])
def test_deepspecs_dialect_stores_the_targets_matrices_and_drafts_the_same(
    make: Any, blocks_of: Any, tmp_path: Path, draft_vocab_size: int | None
):
    from safetensors.torch import load_file, save_file

    made = make(draft_vocab_size=draft_vocab_size)
    report = run(made, blocks_of(12), tmp_path, NO_ONNX.model_copy(update={"deepspec": True}))
    assert set(report.dialects) == {"union", "deepspec"} and report.dialects["deepspec"].verdict == "equal"
    path = tmp_path / "deepspec/model.safetensors"
    tensors = load_file(path)
    assert torch.equal(tensors["embed_tokens.weight"], made.embedding)
    assert torch.equal(tensors["lm_head.weight"], made.head)
    assert (
        tensors.keys() - {"embed_tokens.weight", "lm_head.weight"}
        == load_file(tmp_path / "drafter/model.safetensors").keys()
    )
    config = json.loads((tmp_path / "deepspec/config.json").read_text())
    assert (config["has_embed_tokens"], config["dspark"]["dialect"]) == (True, "deepspec")
    with pytest.raises(IntegrityError, match=r"lm_head\.weight is not that of the target"):
        read_checkpoint(tmp_path / "deepspec", made.embedding, made.head.flip(0))
    del tensors["embed_tokens.weight"]
    save_file(tensors, path)
    config["dspark"]["weights_sha256"] = digest_file(path)
    (tmp_path / "deepspec/config.json").write_text(json.dumps(config))
    with pytest.raises(IntegrityError, match=r"embed_tokens\.weight is missing"):
        read_checkpoint(tmp_path / "deepspec", made.embedding, made.head)


def test_the_exported_config_holds_both_conventions_of_taps(trained: Any, blocks_of: Any, tmp_path: Path):
    """Output of layer k for SGLang, k + 1 for speculators: nobody notices when they are swapped."""
    run(trained, blocks_of(4), tmp_path)
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert config["target_layer_ids"] == [0, 2]
    assert config["aux_hidden_state_layer_ids"] == [1, 3]
    assert (config["sample_from_anchor"], config["is_causal"], config["has_embed_tokens"]) == (True, False, False)


def test_an_export_whose_weights_came_out_wrong_is_refused(
    trained: Any, blocks_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def transposed(*arguments: Any, **more: Any) -> Any:
        drafter = read_checkpoint(*arguments, **more)
        drafter.layers[0].self_attn.o_proj.weight.data = drafter.layers[0].self_attn.o_proj.weight.data.flip(0)
        return drafter

    monkeypatch.setattr(build_module, "read_checkpoint", transposed)
    with pytest.raises(
        GateError, match=r"export union: \d+ of 8 blocks differ from torch \(block \d+, position \d: token"
    ):
        run(trained, blocks_of(8), tmp_path)
    assert not (tmp_path / "parity.json").exists()


def test_a_drafter_that_training_never_moved_is_not_exported(trained: Any, blocks_of: Any, tmp_path: Path):
    still = replace(trained, drafter=copy.deepcopy(trained.drafter))
    still.drafter.norm.weight.fill_(1.0)
    with pytest.raises(StageError, match=r"norm\.weight"):
        run(still, blocks_of(4), tmp_path)
    run(still, blocks_of(4), tmp_path, untrained=True)


def test_a_comparison_that_could_not_tell_is_refused(trained: Any, blocks_of: Any, tmp_path: Path):
    """A drafter that ignores its context drafts the same with shifted taps: the gate must not vouch for it."""
    deaf = replace(trained, drafter=copy.deepcopy(trained.drafter))
    for layer in deaf.drafter.layers:
        layer.self_attn.o_proj.weight.fill_(0.0)
    with pytest.raises(GateError, match="'taps shifted by one' passes the comparison"):
        run(deaf, blocks_of(4), tmp_path, untrained=True)


def test_each_fault_is_noticed_on_a_drafter_of_initial_size(make: Any, blocks_of: Any):
    """Fresh weights (0.02) move drafts least: the confidences then have to show the fault."""
    made = make()
    fresh = DSparkDrafter(
        made.drafter.config, made.embedding.float(), made.head.float(), made.drafter.draft_token_ids, seed=5
    ).eval()
    blocks = blocks_of(16)
    for name, result in negative_controls(fresh, blocks, draft(fresh, blocks)).items():
        assert result.verdict == "different", name


def drafts(tokens: list[list[int]], confidence: float = 0.0, logits: list[list[list[float]]] | None = None) -> Drafts:
    return Drafts(
        np.array(tokens),
        np.full((len(tokens), len(tokens[0])), confidence, np.float32),
        tuple(np.array(rows, np.float32) for rows in logits or []),
    )


TWO_BLOCKS = [[[5.0, 1.0, 0.0], [0.0, 4.0, 1.0]], [[0.0, 0.0, 3.0], [2.0, 1.99999, 0.0]]]


@pytest.mark.parametrize(
    ("tokens", "differing", "ties"),
    [
        ([[0, 1], [2, 0]], 0, 0),  # equal
        ([[1, 1], [2, 0]], 1, 0),  # token 1 trails by 4
        ([[0, 1], [2, 1]], 0, 1),  # token 1 trails by 1e-5: the order of summation may decide
        ([[0, 1], [2, 2]], 1, 0),  # at the same place, but token 2 trails by 2
        ([[0, 0], [0, 0]], 2, 0),
    ],
)
def test_a_near_tie_is_counted_and_forgiven_only_for_the_tied_token(tokens: list[list[int]], differing: int, ties: int):
    reference = drafts([[0, 1], [2, 0]], logits=TWO_BLOCKS)
    result = compare(reference, drafts(tokens), "by hand")
    assert (result.differing_blocks, result.near_ties) == (differing, ties)
    assert result.verdict == ("equal" if differing == 0 else "different")


@pytest.mark.parametrize(
    ("confidence", "verdict"), [(9e-5, "equal"), (1.1e-4, "different"), (float("nan"), "different")]
)
def test_equal_tokens_with_other_confidences_are_another_drafter(confidence: float, verdict: str):
    reference = drafts([[0, 1], [2, 0]], logits=TWO_BLOCKS)
    assert compare(reference, drafts([[0, 1], [2, 0]], confidence), "by hand").verdict == verdict


@pytest.mark.parametrize(("confidence", "verdict"), [([0.0, 7.0], "equal"), ([7.0, 0.0], "different")])
def test_confidences_are_compared_up_to_a_near_tie_and_not_after_it(confidence: list[float], verdict: str):
    """That of the tied token rests on the tokens before it; those after it rest on another token."""
    reference = drafts([[0, 1]], logits=[[[1.0, 0.99999], [0.0, 1.0]]])
    result = compare(reference, Drafts(np.array([[1, 0]]), np.array([confidence], np.float32)), "by hand")
    assert (result.verdict, result.near_ties) == (verdict, 1)


def test_a_report_in_which_a_control_passes_is_no_evidence(trained: Any, blocks_of: Any):
    blocks = blocks_of(4)
    reference = draft(trained.drafter, blocks)
    equal = compare(reference, reference, "itself")
    probes = {"blocks": 4, "shortest_context": 1, "longest_context": 40}
    judge(ParityReport(probes=probes, dialects={"union": equal}, negative_controls={}))
    with pytest.raises(GateError, match="passes the comparison"):
        judge(ParityReport(probes=probes, dialects={"union": equal}, negative_controls={"some fault": equal}))


def test_rounding_leaves_the_targets_tensors_and_the_drafter_alone(make: Any):
    made = make()
    before = made.drafter.fc.weight.clone()
    coarse = rounded(made.drafter, torch.bfloat16)
    assert torch.equal(made.drafter.fc.weight, before) and coarse.fc.weight.dtype == torch.float32
    assert torch.equal(coarse.fc.weight, before.bfloat16().float()) and not torch.equal(coarse.fc.weight, before)
    assert torch.equal(coarse.embedding, made.embedding.float())
    made.drafter.head = made.drafter.head.float() + 1e-4
    fine = made.drafter.head
    assert torch.equal(rounded(made.drafter, torch.bfloat16).head, fine)
    stored = rounded(made.drafter, torch.float16, head=True)
    assert torch.equal(stored.head, fine.half().float()) and torch.equal(made.drafter.head, fine)


@pytest.mark.parametrize("draft_vocab_size", [23, None])
def test_the_gguf_file_holds_the_drafter_in_half_precision(
    make: Any, blocks_of: Any, tmp_path: Path, draft_vocab_size: int | None
):
    trained = make(draft_vocab_size=draft_vocab_size)
    report = run(trained, blocks_of(24), tmp_path, target_file=lambda: as_gguf(trained))
    assert set(report.dialects) == {"union", "gguf"} and report.absent == {}
    assert (report.dialects["gguf"].verdict, report.dialects["gguf"].blocks) == ("equal", 24)
    assert [path.name for path in (tmp_path / "llamacpp").iterdir()] == ["drafter.gguf"]
    assert run(trained, blocks_of(8), tmp_path / "off", NO_ONNX.model_copy(update={"gguf": False})).absent == {}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_heads_that_only_some_dialects_carry_are_written_there_and_absent_elsewhere(
    make: Any, blocks_of: Any, tmp_path: Path, kind: str
):
    made = make(markov_type=kind, draft_vocab_size=None)
    settings = ExportSettings(deepspec=True, tensorrt=False)
    report = run(made, blocks_of(24), tmp_path, settings, target_file=lambda: as_gguf(made))
    assert set(report.dialects) == {"union", "deepspec", "onnx", "onnx_cached"}
    assert all(result.verdict == "equal" for result in report.dialects.values())
    said = f"llamacpp cannot serve this drafter: llama.cpp reads only vanilla Markov heads, this one is '{kind}'"
    assert report.absent == {"gguf": said} and not (tmp_path / "llamacpp").exists()


@pytest.mark.parametrize("faulty", ["ids", "head"])
def test_a_gguf_file_with_another_reduced_vocabulary_is_refused(
    trained: Any, blocks_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faulty: str
):
    real = build_module.write_drafter_gguf

    def worse(path: Path, drafter: DSparkDrafter, target: GGUFFile, **more: Any) -> None:
        wrong = copy.deepcopy(drafter)
        if faulty == "ids":
            wrong.draft_token_ids = (wrong.draft_token_ids + 1) % 61
        else:
            wrong.head = wrong.head.roll(1, 0)
        real(path, wrong, target, **more)

    monkeypatch.setattr(build_module, "write_drafter_gguf", worse)
    with pytest.raises(GateError, match="export gguf: "):
        run(trained, blocks_of(24), tmp_path, target_file=lambda: as_gguf(trained))


def test_a_target_that_cannot_be_written_leaves_the_gguf_file_out_with_the_reason(
    trained: Any, blocks_of: Any, tmp_path: Path
):
    def refused() -> GGUFFile:
        raise SettingsError("target tiny: no known rule cuts its text")

    report = run(trained, blocks_of(8), tmp_path, target_file=refused)
    assert report.absent == {"gguf": "target tiny: no known rule cuts its text"}
    assert set(report.dialects) == {"union"} and not (tmp_path / "llamacpp").exists()


def test_a_gguf_file_that_drafts_otherwise_is_refused(
    trained: Any, blocks_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real = build_module.load_drafter_gguf

    def worse(*arguments: Any) -> DSparkDrafter:
        drafter = real(*arguments)
        drafter.fc.weight.neg_()
        return drafter

    monkeypatch.setattr(build_module, "load_drafter_gguf", worse)
    with pytest.raises(GateError, match="export gguf: "):
        run(trained, blocks_of(24), tmp_path, target_file=lambda: as_gguf(trained))


@pytest.mark.parametrize("gamma", [1, 3])
def test_a_drafter_without_heads_is_exported_and_compared_by_its_tokens(
    make: Any, blocks_of: Any, tmp_path: Path, gamma: int
):
    """A block of one has no mask token in it, so a wrong one is no fault that could show."""
    made = make(markov_type="none", markov_rank=0, confidence=False, draft_vocab_size=None, gamma=gamma)
    report = run(made, blocks_of(12), tmp_path, target_file=lambda: as_gguf(made))
    assert set(report.dialects) == {"union", "gguf"}
    for result in report.dialects.values():
        assert (result.verdict, result.compared) == ("equal", ("draft_ids", "draft_logits"))
    assert set(report.negative_controls) == {"taps shifted by one", "RoPE theta / 10"} | (
        {"mask token 4"} if gamma > 1 else set()
    )


def test_confidences_on_one_side_alone_are_a_difference(make: Any, blocks_of: Any):
    made, blocks = make(draft_vocab_size=None), blocks_of(4)
    reference = draft(made.drafter.float(), blocks)
    result = compare(reference, replace(reference, confidence=None), "itself")
    assert result.verdict == "different" and result.differing_blocks == 0


def test_the_graphs_of_a_drafter_without_a_confidence_head_have_an_output_less(make: Any):
    from dspark.export.graphs import StatelessBlock
    from dspark.export.onnx import _cached_spec, _stateless_example, _stateless_spec

    made = make(markov_type="none", markov_rank=0, confidence=False)
    config = made.drafter.config
    outputs = StatelessBlock(made.drafter.float())(*_stateless_example(config))
    assert [item.name for item in _stateless_spec(config).outputs] == ["draft_ids"] and len(outputs) == 1
    assert [item.name for item in _cached_spec(config).outputs] == [
        "draft_ids",
        "draft_logits",
        "new_keys",
        "new_values",
    ]
