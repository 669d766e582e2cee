"""The export gate of llama.cpp: the comparison by hand, and the real engine on tiny random targets."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark.config.models import DrafterSettings, TargetSpec
from dspark.drafters.checkpoint import union_tensors
from dspark.drafters.config import DrafterConfig
from dspark.drafters.dspark import DSparkDrafter
from dspark.engines.agreement import AgreementReport, Setting
from dspark.engines.client import Completion, DraftedBlock
from dspark.engines.counters import Counters
from dspark.engines.llamacpp_loop import expected_request
from dspark.engines.replay import ExpectedRequest
from dspark.errors import DataError, GateError
from dspark.export import agreement
from dspark.export.agreement import agree_with_llamacpp, compare_requests, judge_agreement
from dspark.io.gguffile import read_gguf
from dspark.io.jsonfile import read_model, write_model
from dspark.targets.gguf import write_target_gguf
from dspark.targets.loading import load_target
from dspark.targets.materialise import materialise

needs_engine = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None,
    reason="xllamacpp is not installed: pip install 'dspark[llamacpp]'",
)
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 280,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
}
CONTROLS = ["taps without + 1", "RoPE theta / 10", "mask token 0", "sample_from_anchor false"]
KINDS = [3, 3, *[1] * 98]  # tokens 0 and 1 are control tokens


def tiny(
    root: Path, family: str, ascii_tokens: Any, draft_ids: list[int] | None = None
) -> tuple[Any, DSparkDrafter, Path]:
    """A random target, a drafter that hears its context, and the target's GGUF file."""
    config = {"model_type": family, **SHAPE, "tie_word_embeddings": family == "llama"}
    spec = TargetSpec.model_validate(
        {"name": family, "source": {"kind": "random", "seed": 0, "config": config}, "dtype": "float32"}
    )
    record = materialise(spec, root=root)
    target = load_target(record, root)
    settings = {"gamma": 4, "layers": 2, "markov": {"rank": 8}, "draft_vocab_size": draft_ids and len(draft_ids)}
    shape = DrafterConfig.of(record, DrafterSettings.model_validate(settings))
    generator = torch.Generator().manual_seed(1)
    ids = None if draft_ids is None else torch.tensor(draft_ids)
    drafter = DSparkDrafter(shape, target.embedding, target.head, ids, seed=2).eval().requires_grad_(False)
    for parameter in drafter.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * (0.2 if parameter.dim() > 1 else 0.1))
    drafter.markov_head.reset_constant_channel()
    write_target_gguf(root / f"{family}.gguf", record, root, origin=ascii_tokens(root / "tokens.gguf", 280))
    return target, drafter, root / f"{family}.gguf"


def random_prompts(count: int) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(4, 260, int(length)).tolist() for length in generator.integers(3, 40, count)]


# The draft vocabularies are no multiple of 32 and have holes. Llama's head is tied to its embedding, Qwen3's is not.
@needs_engine
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "draft_ids"),
    [
        pytest.param("llama", None, marks=pytest.mark.long),
        pytest.param("qwen3", None, marks=pytest.mark.long),
        pytest.param("llama", [*range(3, 278, 3), 278], marks=pytest.mark.long),
        ("qwen3", [*range(4, 280, 2)]),
    ],
)
def test_the_engine_drafts_as_torch_and_every_fault_fails(
    family: str, draft_ids: list[int] | None, tmp_path: Path, ascii_tokens: Any
):
    target, drafter, file = tiny(tmp_path, family, ascii_tokens, draft_ids)
    report = agree_with_llamacpp(target, drafter, file, random_prompts(24), tmp_path / "work", max_new_tokens=16)
    result = report.agreement
    assert (result.verdict, result.differing_blocks, result.differing_replies) == ("equal", 0, 0), result
    assert result.blocks > 40 and result.tokens == 4 * result.blocks == 4 * result.counts["steps"].engine
    assert list(report.negative_controls) == CONTROLS + ["d2t shifted by one"] * (draft_ids is not None)
    for name, control in report.negative_controls.items():
        assert control.verdict == "different" and control.differing_blocks > 0, name
        assert control.differing_replies == 0, name  # whatever is drafted, the target decides
    judge_agreement(report)
    write_model(tmp_path / "agreement.json", report)
    assert read_model(tmp_path / "agreement.json", AgreementReport) == report


@needs_engine
@pytest.mark.slow
def test_a_union_checkpoint_is_compared_in_the_form_that_ships(tmp_path: Path, ascii_tokens: Any):
    """It holds a reduced vocabulary as a whole one; the engine is given the reduced one."""
    target, drafter, file = tiny(tmp_path, "llama", ascii_tokens, [*range(3, 278, 3), 278])
    config = drafter.config.model_copy(update={"draft_vocab_size": None})
    union = DSparkDrafter(config, target.embedding, target.head).eval()
    union.load_state_dict(union_tensors(drafter))
    report = agree_with_llamacpp(target, union, file, random_prompts(8), tmp_path / "work", max_new_tokens=8)
    assert report.agreement.verdict == "equal" and report.negative_controls.keys() >= {"d2t shifted by one"}
    assert read_gguf(tmp_path / "work/drafter.gguf").integers()["d2t"].tolist() == drafter.draft_token_ids.tolist()


def test_too_few_prompts_and_other_precisions_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ascii_tokens: Any
):
    monkeypatch.setattr(agreement, "engine_version", lambda: "an engine")
    target, drafter, file = tiny(tmp_path, "llama", ascii_tokens)
    with pytest.raises(DataError, match="7 prompts are too few to judge an export, 8 are needed"):
        agree_with_llamacpp(target, drafter, file, random_prompts(7), tmp_path)
    write_target_gguf(file, target.record, tmp_path, precision="F16")
    with pytest.raises(DataError, match=r"must be in float32 \(torch has torch.float32, llama.gguf has F16, F32\)"):
        agree_with_llamacpp(target, drafter, file, random_prompts(8), tmp_path)


def test_the_last_blocks_are_cut_as_the_engine_cuts_them(tmp_path: Path, ascii_tokens: Any):
    """With R tokens left R - 1 drafts are verified, none where one is left; worked out from the plain reply alone."""
    target, drafter, _ = tiny(tmp_path, "llama", ascii_tokens)
    limit, prompt = 9, [5, 9, 77, 30]
    expected = expected_request(target, drafter, prompt, limit)
    said = 1
    for position, drafted in expected.blocks.items():
        assert position == len(prompt) + said - 1
        offered = min(4, limit - said - 1)
        matches = [drafted[place] == expected.token_ids[said + place] for place in range(offered)]
        accepted = [*matches, False].index(False)
        assert (expected.offered[position], expected.accepted[position]) == (offered, accepted)
        said += accepted + 1
    assert said in (limit - 1, limit) and len(expected.token_ids) == limit
    counters = expected.counters
    assert (counters.steps, counters.accepted) == (len(expected.blocks), sum(counters.per_position))


PROMPT = [50, 51]
# Two blocks after the first token 10; one draft of three is accepted in the first, none of the two offered after it.
EXPECTED = ExpectedRequest(
    token_ids=(10, 11, 12, 13, 14),
    blocks={2: (11, 20, 21), 4: (30, 31, 32)},
    offered={2: 3, 4: 1},
    accepted={2: 1, 4: 0},
)
REPLY = Completion(
    token_ids=(10, 11, 12, 13, 14),
    ended=False,
    predicted=5,
    seconds=0.1,
    counters=Counters(2, 4, 1, (1,)),
    blocks=(DraftedBlock(0, 2, 10, (11, 20, 21), 3), DraftedBlock(0, 4, 12, (30, 31, 32), 1)),
)


def compared(reply: Completion, expected: ExpectedRequest = EXPECTED) -> Any:
    return compare_requests([PROMPT], [expected], [reply], KINDS)


def test_equal_requests_are_equal():
    result = compared(REPLY)
    assert (result.verdict, result.blocks, result.tokens, result.differing_blocks) == ("equal", 2, 6, 0)
    assert {name: count.torch for name, count in result.counts.items()} == {
        "steps": 2,
        "drafted": 4,
        "accepted": 1,
        "accepted at position 1": 1,
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        # A draft token that was never verified differs: no counter and no reply shows it.
        ({"blocks": (REPLY.blocks[0], DraftedBlock(0, 4, 12, (30, 31, 99), 1))}, "block at 4"),
        ({"blocks": (REPLY.blocks[0], DraftedBlock(0, 4, 12, (30, 31, 32), 2))}, "block at 4"),
        ({"blocks": REPLY.blocks[:1]}, "block at 4: None instead of"),
        ({"blocks": (*REPLY.blocks, DraftedBlock(0, 5, 13, (1, 2, 3), 1))}, r"block at 5: \[1\] instead of None"),
        ({"token_ids": (10, 11, 12, 13, 15)}, "its reply"),
        ({"token_ids": (10, 11, 12, 13)}, "its reply"),
        ({"counters": Counters(2, 4, 2, (1, 1))}, None),
        ({"counters": Counters(2, 4, 1, (0, 1))}, None),
        ({"counters": Counters(3, 4, 1, (1,))}, None),
    ],
)
def test_any_difference_makes_them_different(change: dict[str, Any], said: str | None):
    result = compared(replace(REPLY, **change))
    assert result.verdict == "different"
    assert said is None or re.search(said, result.first_difference)


def test_a_reply_may_end_at_a_control_token_and_at_nothing_else():
    """Torch goes on past the end, and its blocks from there on are not asked for."""
    ended = replace(REPLY, token_ids=(10, 11), ended=True, blocks=REPLY.blocks[:1], counters=Counters(1, 3, 1, (1,)))
    at_control = replace(EXPECTED, token_ids=(10, 11, 1, 13, 14))
    assert compared(ended, at_control).verdict == "equal"
    assert compared(ended).verdict == "different"


def report(**changes: Any) -> AgreementReport:
    equal, different = compared(REPLY), compared(replace(REPLY, blocks=REPLY.blocks[:1]))
    fields = {
        "engine": "an engine",
        "setting": Setting(prompts=8, max_new_tokens=5, n_max=3),
        "agreement": equal,
        "negative_controls": dict.fromkeys(CONTROLS, different),
    }
    return AgreementReport.model_validate(fields | changes)


def test_the_gate_refuses_a_difference_and_a_comparison_that_cannot_tell():
    judge_agreement(report())
    with pytest.raises(
        GateError, match=r"1 of 2 draft blocks and 0 of 8 replies differ from torch \(prompt 0, block at"
    ):
        judge_agreement(report(agreement=compared(replace(REPLY, blocks=REPLY.blocks[:1]))))
    with pytest.raises(GateError, match=r"\(accepted 2 instead of 1, accepted at position 2 1 instead of 0\)"):
        judge_agreement(report(agreement=compared(replace(REPLY, counters=Counters(2, 4, 2, (1, 1))))))
    with pytest.raises(GateError, match="the fault 'mask token 0' passes the comparison on 2 blocks"):
        judge_agreement(report(negative_controls={"mask token 0": compared(REPLY)}))
