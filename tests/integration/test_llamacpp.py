"""Profile and certificate of the real llama.cpp server, on a random target and a random drafter."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark.config.models import DrafterSettings, EvaluationSettings, ServingProfile, TargetSpec
from dspark.corpus.prompts import PreparedPrompt
from dspark.drafters.config import DrafterConfig
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.kinds import build_drafter
from dspark.engines.agreement import AgreementReport
from dspark.evaluation.entry import CertificateEntry
from dspark.evaluation.llamacpp import certify_llamacpp
from dspark.export.agreement import agree_with_llamacpp, faults
from dspark.export.gguf import write_drafter_gguf, write_with_fault
from dspark.io.gguffile import GGUFFile, read_gguf
from dspark.io.jsonfile import read_model, write_model
from dspark.package.certificate import Certificate
from dspark.profiling.fingerprint import fingerprint
from dspark.profiling.llamacpp import profile_llamacpp
from dspark.targets.gguf import write_target_gguf
from dspark.targets.loading import Target, load_target
from dspark.targets.materialise import materialise

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("xllamacpp") is None,
        reason="xllamacpp is not installed: pip install 'dspark[llamacpp]'",
    ),
]
GAMMA = 3
PROFILE = ServingProfile(
    name="here",
    engine="llamacpp",
    access="local",
    dtype="float32",
    threads=1,
    requests=(1, 2),
    contexts=(16, 48),
    warmup=1,
    repeats=6,
    certify_concurrency=(1, 2),
    policies=("fixed", "fixed(1)", "threshold(0.5)"),
)
SETTINGS = EvaluationSettings(
    max_new_tokens=24, throughput_new_tokens=12, throughput_rounds=4, throughput_prompts=4, prompts_per_domain=4
)


@dataclass(frozen=True)
class Made:
    """A target, a drafter that guesses well, and their files."""

    target: Target
    drafter: DSparkDrafter
    file: Path
    stored: GGUFFile
    prompts: list[PreparedPrompt]

    def certify(self, drafter_file: Path, work: Path, export: AgreementReport | None = None) -> CertificateEntry:
        return certify_llamacpp(
            PROFILE,
            fingerprint(PROFILE),
            self.target,
            self.drafter,
            self.prompts,
            SETTINGS,
            prompts_per_domain=4,
            target_file=self.file,
            drafter_file=drafter_file,
            export=export or self.export(work / "export"),
            work=work,
        )

    def export(self, work: Path) -> AgreementReport:
        prompts = [prompt.token_ids for prompt in self.prompts]
        return agree_with_llamacpp(self.target, self.drafter, self.file, prompts, work, max_new_tokens=12)


@pytest.fixture(
    scope="module", params=[pytest.param(None, id="whole", marks=pytest.mark.long), pytest.param(200, id="reduced")]
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, ascii_tokens: Any) -> Made:
    """With the whole vocabulary of 280, and with its last 200."""
    draft_vocab: int | None = request.param
    root = tmp_path_factory.mktemp("llamacpp")
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 280,
        "max_position_embeddings": 256,
        "initializer_range": 0.25,
        "tie_word_embeddings": True,
    }
    spec = {"name": "llama", "source": {"kind": "random", "seed": 0, "config": config}, "dtype": "float32"}
    record = materialise(TargetSpec.model_validate(spec), root=root)
    target = load_target(record, root)
    settings = {"gamma": GAMMA, "layers": 1, "markov": {"rank": 64}, "draft_vocab_size": draft_vocab}
    shape = DrafterConfig.of(record, DrafterSettings.model_validate(settings))
    ids = None if draft_vocab is None else torch.arange(280 - draft_vocab, 280)
    drafter = DSparkDrafter(shape, target.embedding, target.head, ids, seed=2).eval()
    with torch.no_grad():  # it proposes what stands before: a random target says some tokens over and over
        rows = torch.randn(280, 64, generator=torch.Generator().manual_seed(1))
        drafter.markov_head.markov_w1.weight.copy_(rows)
        drafter.markov_head.reset_constant_channel()
        drafter.markov_head.markov_w2.weight.copy_(rows if ids is None else rows[ids])
    drafter.requires_grad_(False)
    write_target_gguf(root / "target.gguf", record, root, origin=ascii_tokens(root / "tokens.gguf", 280))
    generator = np.random.default_rng(0)
    prompts = [
        PreparedPrompt(
            id=f"{domain}-{number}",
            domain=domain,
            messages=[{"role": "user", "content": "?"}],
            token_ids=generator.integers(4, 260, 5 + number).tolist(),
        )
        for domain in ("math", "code")
        for number in range(4)
    ]
    return Made(target, drafter, root / "target.gguf", read_gguf(root / "target.gguf"), prompts)


def test_an_engine_that_drafts_as_torch_is_certified(made: Made, tmp_path: Path):
    write_drafter_gguf(tmp_path / "drafter.gguf", made.drafter, made.stored)
    entry = made.certify(tmp_path / "drafter.gguf", tmp_path / "work")
    assert (entry.status, entry.reason) == ("measured", None)
    assert entry.export.agreement.verdict == "equal" and entry.export.agreement.blocks > 20
    agreement = entry.offline_vs_engine
    assert (agreement.result, agreement.prompts, agreement.equal_counters) == ("agrees", 8, 8)
    assert agreement.relative_difference.value == 0 and agreement.engine_tau.value > 1
    assert (entry.lossless.result, entry.lossless.differences, entry.lossless.n) == ("pass", (), 8)
    assert set(entry.acceptance) == {"code", "math"} and entry.workload.prompts == 8
    arms = ["none", "fixed", "fixed(1)", "threshold(0.5)"]
    assert [(point.concurrency, point.arm) for point in entry.load] == [(n, arm) for n in (1, 2) for arm in arms]
    assert all(point.tokens_per_second.value > 0 for point in entry.load)
    assert {point.arm: point.verified_tokens_per_request > 0 for point in entry.load} == {
        arm: arm != "none" for arm in arms
    } | {"threshold(0.5)": entry.load[3].verified_tokens_per_request > 0}
    assert entry.cycle.draft_seconds.value > 0 and entry.cycle.tau >= 1
    assert [one.from_concurrency for one in entry.recommended] == [1, 2]
    assert all(0 <= one.behind_best < 1 for one in entry.recommended)
    assert entry.fingerprint["engine_version"].startswith("xllamacpp 20") and entry.holds_until is not None
    Certificate(subject="0" * 64, gamma=GAMMA, entries=(entry,), engines=())
    write_model(tmp_path / "here.json", entry)
    assert read_model(tmp_path / "here.json", CertificateEntry) == entry


def test_an_engine_that_drafts_otherwise_disagrees(made: Made, tmp_path: Path):
    """The file is wrong in one key: the engine loads it, answers rightly, and accepts something else."""
    good = made.export(tmp_path / "export")
    fault = faults(made.drafter)["sample_from_anchor false"]
    write_with_fault(tmp_path / "wrong.gguf", made.drafter, made.stored, fault)
    entry = made.certify(tmp_path / "wrong.gguf", tmp_path / "work", good)
    assert entry.status == "disagrees" and re.search("the engine drafts something else|apart", entry.reason)
    assert entry.offline_vs_engine.equal_counters < 8
    assert entry.lossless.result == "pass", "whatever is drafted, the target decides"
    Certificate(subject="0" * 64, gamma=GAMMA, entries=(entry,), engines=())


@pytest.mark.parametrize("gamma", [GAMMA, 1])
def test_a_drafter_without_heads_drafts_in_the_engine_as_in_torch(made: Made, gamma: int, tmp_path: Path):
    """Recipes dflash and mtp1, as DSpark with a neutral head: every block, and every faulty file is told apart."""
    changes = {"markov_type": "none", "markov_rank": 0, "confidence": False, "gamma": gamma}
    config = made.drafter.config.model_copy(update=changes)
    ids = made.drafter.draft_token_ids if config.draft_vocab_size is not None else None
    drafter = build_drafter(config, made.target.embedding, made.target.head, ids, seed=3).eval().requires_grad_(False)
    for parameter in drafter.parameters():
        if parameter.dim() > 1:
            parameter.mul_(8)  # or every block would be the anchor over again, whatever is wrong
    prompts = [prompt.token_ids for prompt in made.prompts]
    report = agree_with_llamacpp(made.target, drafter, made.file, prompts, tmp_path, max_new_tokens=12)
    assert report.agreement.verdict == "equal" and report.agreement.blocks > 20
    assert {name: control.verdict for name, control in report.negative_controls.items()} == dict.fromkeys(
        faults(drafter), "different"
    )


def test_step_times_are_measured_over_requests_tokens_and_contexts(made: Made, tmp_path: Path):
    config = made.drafter.config
    write_drafter_gguf(tmp_path / "drafter.gguf", made.drafter, made.stored)
    report = profile_llamacpp(
        made.target.record,
        config,
        PROFILE,
        fingerprint(PROFILE),
        target_file=made.file,
        drafter_file=tmp_path / "drafter.gguf",
        work=tmp_path,
    )
    shapes = [(row.requests, row.verify_tokens, row.context) for row in report.rows]
    assert shapes == [(n, n * (1 + k), context) for n in (1, 2) for context in (16, 48) for k in (1, GAMMA)]
    assert [(row.requests, row.verify_tokens) for row in report.plain] == [(1, 1), (1, 1), (2, 2), (2, 2)]
    for row in (*report.rows, *report.plain):
        # Steps are timed as replies arrive: a client that got no core sees several at once, too short to draft in.
        assert 0 <= row.draft_seconds <= row.step_seconds > 0 and row.n >= PROFILE.repeats * row.requests / 2
        assert row.step_seconds == pytest.approx(row.draft_seconds + row.verify_seconds)
    assert all(row.draft_seconds > 0 for row in report.rows) and all(row.draft_seconds == 0 for row in report.plain)
    assert (report.curve is None) == ("curve" in report.absent)
    assert [(row.requests, row.context) for row in report.drafting] == [(1, 16), (1, 48), (2, 16), (2, 48)]
