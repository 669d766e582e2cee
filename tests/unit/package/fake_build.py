"""The outputs of a tiny build, made up but written with the stages' own models, for tests of packages."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from dspark.calibration.assessment import Assessment, PositionAssessment
from dspark.calibration.results import Calibration, CalibrationReport, PositionFit, write_absence
from dspark.config.models import Build, SplitShares
from dspark.config.models import ServingProfile as Profile
from dspark.corpus.responses import ResponsesSummary, SplitCounts
from dspark.corpus.summary import PromptsSummary, SplitCount
from dspark.drafters.config import DrafterConfig
from dspark.drafters.description import describe
from dspark.engines.onnx_io import EndsSpec, GraphSpec, OnnxIO, TensorSpec, WeightsSpec
from dspark.evaluation import results
from dspark.evaluation.entry import (
    AgainstChampion,
    AgainstNone,
    Agreement,
    CertificateEntry,
    ChampionRatio,
    HoldsUntil,
    LosslessSummary,
    Recommendation,
    Workload,
)
from dspark.evaluation.paired import PairedPrompts, PairedReport, Rival
from dspark.export.report import Comparison, ParityReport, Probes
from dspark.features.store import FeatureManifest, ShardEntry
from dspark.io.digest import digest_file
from dspark.io.jsonfile import read_json, read_model, write_json, write_model
from dspark.io.jsonlines import write_jsonlines
from dspark.measured import Measured
from dspark.package.lineage import Lineage
from dspark.package.sources import Sources
from dspark.profiling.cost import CostReport, CostRow
from dspark.scheduling.additive import AdditiveCost, ModelErrors
from dspark.scheduling.config import CalibrationKey
from dspark.scheduling.cost import CostCurve
from dspark.targets.record import TargetRecord

GAMMA, VOCABULARY, HIDDEN, RANK, TAPS = 3, 32, 8, 4, (0, 2)
CPU, ELSEWHERE = "cpu-reference", "gpu-elsewhere"


def hexes(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


CHAMPION, BASELINE = hexes("champion"), hexes("baseline")


def number(value: float, n: int = 12, spread: float = 0.1) -> Measured:
    return Measured(value=value, n=n, ci95=(value - spread, value + spread))


def card(folder, description) -> str:
    """A stand-in for the model card, which is made on a higher floor."""
    return f"# {description.name}\n\n{description.package_digest}\n"


def build() -> Build:
    return Build.model_validate(
        {
            "name": "demo",
            "target": {"name": "tiny", "source": {"kind": "folder", "path": "/home/somebody/secret"}},
            "recipe": "dspark",
            "corpus": {"name": "demo", "target": "tiny", "domains": ["math", "chat"], "evaluation_domains": ["code"]},
            "drafter": {"gamma": GAMMA, "layers": 1, "markov": {"rank": RANK}},
            "training": {"steps": 5},
            "serving_profiles": [CPU, ELSEWHERE],
        }
    )


def record() -> TargetRecord:
    return TargetRecord(
        name="tiny",
        source={"kind": "folder"},
        revision="r1",
        public_id="org/tiny-llama",
        digest=hexes("target"),
        weights_digest=hexes("weights"),
        embedding_digest=hexes("embedding"),
        head_digest=hexes("head"),
        tokenizer_digest=hexes("tokenizer"),
        chat_template_digest=hexes("template"),
        dtype="float32",
        model_type="llama",
        architecture="LlamaForCausalLM",
        text_config={
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 16,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
        },
        hidden_size=HIDDEN,
        num_layers=5,
        vocab_logical=VOCABULARY - 2,
        vocab_physical=VOCABULARY,
        max_position=64,
        taps=TAPS,
        mask_token_id=VOCABULARY - 1,
        eos_token_ids=(1,),
    )


def profiles() -> tuple[Profile, ...]:
    here = Profile(name=CPU, engine="reference", access="local", threads=1)
    return here, Profile(name=ELSEWHERE, engine="reference", access="none", reason="no GPU | at hand")


def make(root: Path, *, rivals: bool = False) -> Sources:
    """Write every file that a package is made from below `root`.

    Args:
        rivals: as if the build had named a champion and a pinned baseline to measure against.
    """
    target, settings = record(), build()
    _corpus(root / "corpora" / "demo", target)
    _train(root / "train")
    _calibrate(root / "calibrate")
    _evaluate(root / "evaluate")
    here = measured_entry()
    if rivals:
        write_model(root / "evaluate" / "metrics.json", calibrated(metrics()))
        write_model(root / "evaluate" / "paired.json", paired())
        here = here.model_copy(update={"against_champion": against_champion()})
    _export(root / "export", target, DrafterConfig.of(target, settings.drafter))
    write_model(root / "cost.json", cost())
    for entry in (here, CertificateEntry(profile=ELSEWHERE, status="absent", reason="no GPU | at hand")):
        write_model(root / "certify" / f"{entry.profile}.json", entry)
    return Sources(
        build=settings,
        record=target,
        profiles=profiles(),
        corpus=root / "corpora" / "demo",
        train=root / "train",
        calibrate=root / "calibrate",
        evaluate=root / "evaluate",
        export=root / "export",
        costs={CPU: root / "cost.json"},
        certificates={name: root / "certify" / f"{name}.json" for name in (CPU, ELSEWHERE)},
        lineage=lineage(),
    )


def reduce(sources: Sources, ids: tuple[int, ...]) -> Sources:
    """The same build with a drafter that proposes these tokens alone."""
    described = sources.export / "drafter/config.json"
    value = read_json(described)
    value["dspark"]["proposed_vocab_size"] = len(ids)
    write_json(described, value)
    onnx = read_model(sources.export / "onnxruntime/io.json", OnnxIO)
    changes = {"draft_vocab_size": len(ids), "draft_token_ids": ids}
    write_model(sources.export / "onnxruntime/io.json", onnx.model_copy(update=changes))
    return sources


def lineage() -> Lineage:
    return Lineage(
        dspark_version="0.1.0",
        python_version="3.11.0",
        platform="Linux-x86_64",
        versions={"numpy": "2.1.0"},
        git_commit="0123456789abcdef",
        git_dirty=True,
        dvc_lock_absent="the workspace has no dvc.lock",
    )


def _corpus(folder: Path, target: TargetRecord) -> None:
    count = SplitCount(prompts=3, templates=0, units=3, tokens=30)
    summary = PromptsSummary(
        corpus="demo",
        digest=hexes("prompts"),
        files={},
        seed=0,
        shares=SplitShares(),
        max_prompt_tokens=64,
        input=12,
        kept=12,
        rejected=0,
        blank_lines=0,
        domains={},
        splits=dict.fromkeys(("train", "dev", "calibration", "eval"), count),
        warnings=[],
    )
    write_model(folder / "prompts" / "summary.json", summary)
    write_jsonlines(
        folder / "prompts" / "eval.jsonl",
        [
            {
                "id": f"{domain}/{number}",
                "domain": domain,
                "template": None,
                "messages": [{"role": "user", "content": f"say {number}\u2028again"}],
                "token_ids": [1, 2 + number],
            }
            for domain in ("math", "chat", "code")
            for number in range(9)
        ],
    )
    said = SplitCounts(responses=3, stopped=2, prompt_tokens=30, response_tokens=40)
    responses = ResponsesSummary(
        target_digest=target.digest,
        sampling=target.sampling,
        max_new_tokens=16,
        splits={"train": {"math": said, "chat": said}, "dev": {"math": said}},
    )
    write_model(folder / "responses" / "summary.json", responses)
    shard = ShardEntry(key=hexes("shard"), bytes=10, sha256=hexes("shard bytes"), sequences=3, tokens=70)
    features = FeatureManifest(
        target_digest=target.digest,
        taps=TAPS,
        dtype="float32",
        hidden_size=HIDDEN,
        splits={"train": (shard,), "dev": (shard,)},
    )
    write_model(folder / "features" / "manifest.json", features)


def _train(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "curves.csv").write_text("step,loss,dev_anchor_tau\n1,3.5,\n2,3.25,1.5\n")


def calibration() -> CalibrationReport:
    found = []
    for temperature, label in ((0.0, "greedy_match"), (1.0, "sampled")):
        scales = (1.5, 1.25, 1.0)
        assessed = Assessment(
            temperatures=scales,
            bins=15,
            rows=40,
            conversations=12,
            positions=tuple(
                PositionAssessment(position=k, samples=40, accepted=20, ece_before=number(0.08), ece_after=number(0.02))
                for k in (1, 2, 3)
            ),
            mean_ece_before=number(0.08),
            mean_ece_after=number(0.02),
        )
        found.append(
            Calibration(
                key=CalibrationKey(temperature=temperature, label=label),
                temperatures=scales,
                positions=tuple(
                    PositionFit(position=k, temperature=scale, reached_fit=20, reached_held_out=20)
                    for k, scale in enumerate(scales, start=1)
                ),
                held_out=assessed,
                rows_fit=40,
                conversations_fit=12,
                min_samples=1,
                seed=0,
                warnings=("position 3: T stays 1 <b>",),
            )
        )
    return CalibrationReport(gamma=GAMMA, results=tuple(found))


def _calibrate(folder: Path) -> None:
    write_model(folder / "calibration.json", calibration())
    (folder / "reliability.csv").write_text("position,when\n1,before\n1,after\n")


def curve() -> CostCurve:
    return CostCurve(sample_batch_tokens=(1, 4, 8), sample_steps_per_second=(100.0, 95.0, 60.0), max_batch_tokens=8)


def additive() -> AdditiveCost:
    theta = (0.0, 0.0, 0.006)
    return AdditiveCost(
        bias_seconds=0.01, requests=(1, 2), alpha_seconds=(0.0, 0.001), tokens=(1, 4, 8), theta_seconds=theta
    )


def cost() -> CostReport:
    row = CostRow(
        requests=1,
        verify_tokens=4,
        context=64,
        draft_seconds=0.002,
        verify_seconds=0.008,
        step_seconds=0.01,
        n=10,
        ci95=(0.009, 0.011),
    )
    return CostReport(
        profile=CPU,
        target="tiny",
        target_digest=hexes("target"),
        geometry="dspark-g3-l1-r4-v32",
        gamma=GAMMA,
        dtype="float32",
        threads=1,
        draft_backend="torch",
        warmup=2,
        repeats=10,
        fingerprint=fingerprint(),
        rows=(row,),
        plain=(row.model_copy(update={"verify_tokens": 1}),),
        drafting=(),
        curve=curve(),
        additive=additive(),
        model_errors=ModelErrors(cells=4, curve_relative_error=0.04, additive_relative_error=0.03),
    )


def fingerprint() -> dict[str, Any]:
    return {"engine": "reference", "engine_version": "0.1.0", "hardware": {"cpu": "some CPU"}, "threads": 1}


def domain(role: str, tau: float) -> results.DomainMetrics:
    rates = tuple(number(value) for value in (0.6, 0.5, 0.4))
    return results.DomainMetrics(
        role=role,
        prompts=12,
        stopped=3,
        cycles=80,
        tokens=150,
        tau=number(tau),
        conditional=rates,
        marginal=tuple(number(value) for value in (0.6, 0.3, 0.12)),
    )


def load_point(arm: str, speed: float, concurrency: int = 1) -> results.LoadPoint:
    latency = results.Percentiles(p50=0.01, p95=0.02, p99=0.03)
    return results.LoadPoint(
        concurrency=concurrency,
        arm=arm,
        policy=arm,
        tokens_per_second=number(speed, 10),
        tokens_per_second_per_user=number(speed, 10),
        verified_tokens_per_request=0.0 if arm == "none" else 3.0,
        ttft_seconds=latency,
        itl_seconds=latency,
    )


def cycle() -> results.CycleCost:
    return results.CycleCost(
        draft_seconds=number(0.002, spread=0.0001),
        verify_seconds=number(0.01, spread=0.0001),
        tau=2.0,
        latency_per_token_predicted_seconds=0.006,
        latency_per_token_measured_seconds=0.0065,
    )


def metrics() -> results.EvaluationMetrics:
    domains = {"math": domain("training", 2.0), "chat": domain("training", 1.5), "code": domain("evaluation_only", 1.4)}
    mean = results.MeanOfDomains(domains=("math", "chat"), tau=number(1.75))
    arms = {
        "none": results.ArmThroughput(load=load_point("none", 100), cycle=cycle()),
        "torch fixed": results.ArmThroughput(
            load=load_point("fixed", 87), cycle=cycle(), against_none=number(0.87, 10, 0.01)
        ),
    }
    return results.EvaluationMetrics(
        gamma=GAMMA,
        policy="fixed",
        max_new_tokens=16,
        seed=0,
        temperatures={
            "0": results.TemperatureMetrics(
                label="greedy_match", dtype="float32", domains=domains, mean_of_domains=mean
            ),
            "1": results.TemperatureMetrics(
                label="sampled", dtype="bfloat16", domains=domains, absent={"confidence": "too few"}
            ),
        },
        throughput=results.ThroughputReport(
            temperature=0.0, dtype="float32", threads=1, rounds=10, prompts=2, max_new_tokens=8, arms=arms
        ),
        absent={"onnxruntime arm": "not asked for"},
    )


def _evaluate(folder: Path) -> None:
    write_model(folder / "metrics.json", metrics())
    greedy = results.GreedyLossless(
        result="pass",
        n=12,
        tokens=150,
        drafts=240,
        drafts_accepted=70,
        dtype="float32",
        noise=1e-5,
        epsilon=4e-5,
        largest_gap=0.0,
        near_ties=(),
        near_tie_prompts=0,
        violations=(),
    )
    sampled = results.SampledLossless(
        result="pass", temperature=1.0, tolerance=1e-9, largest_difference=1e-15, cases=()
    )
    write_model(folder / "lossless.json", results.LosslessReport.of(greedy, sampled))
    pareto = results.Pareto(
        dtype="float32",
        threads=1,
        points=(results.ParetoPoint(**load_point("none", 100).model_dump(), on_frontier=True),),
    )
    write_model(folder / "pareto.json", pareto)
    (folder / "per_position.csv").write_text("position,rate\n1,0.6\n")
    (folder / "threshold_sweep.csv").write_text("threshold,rate\n0.0,0.6\n")
    (folder / "records").mkdir()
    save_file({"accepted": np.zeros(3, np.int32)}, folder / "records" / "temperature-0.safetensors", {"schema": "x"})


def _export(folder: Path, target: TargetRecord, config: DrafterConfig) -> None:
    (folder / "drafter").mkdir(parents=True)
    generator = np.random.default_rng(0)
    shapes = {
        "fc.weight": (HIDDEN, len(TAPS) * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
        "layers.0.mlp.up_proj.weight": (16, HIDDEN),
        "markov_head.markov_w1.weight": (VOCABULARY, RANK),
        "markov_head.markov_w2.weight": (VOCABULARY, RANK),
        "confidence_head.proj.weight": (1, HIDDEN + RANK),
        "confidence_head.proj.bias": (1,),
    }
    weights = folder / "drafter" / "model.safetensors"
    save_file({name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}, weights)
    description = describe(config, target, dialect="union", dtype="float32", weights_sha256=digest_file(weights))
    write_json(folder / "drafter" / "config.json", description)
    onnx = folder / "onnxruntime"
    onnx.mkdir()
    for name in ("draft_block.onnx", "draft_block_cached.onnx"):
        (onnx / name).write_bytes(b"\x08\x0a" + name.encode())
    data = onnx / "draft_block.onnx.data"
    data.write_bytes(generator.bytes(64))
    ends = onnx / "target_ends.onnx.data"
    ends.write_bytes(generator.bytes(32))
    spec = TensorSpec(name="x", dtype="float32", shape=("batch", 2), meaning="x")
    write_model(
        onnx / "io.json",
        OnnxIO(
            opset=20,
            gamma=GAMMA,
            stateless=GraphSpec(file="draft_block.onnx", inputs=(spec,), outputs=(spec,)),
            cached=GraphSpec(file="draft_block_cached.onnx", inputs=(spec,), outputs=(spec,)),
            weights=WeightsSpec(file=data.name, bytes=64, sha256=digest_file(data)),
            ends=EndsSpec(file=ends.name, bytes=32, sha256=digest_file(ends)),
            taps=TAPS,
            hidden_size=HIDDEN,
            mask_token_id=VOCABULARY - 1,
            vocab_size=VOCABULARY,
            draft_vocab_size=VOCABULARY,
            layers=1,
            num_key_value_heads=1,
            head_dim=4,
            max_position=64,
            embedding_digest=target.embedding_digest,
            head_digest=target.head_digest,
        ),
    )
    same = {"compared": ("draft_ids",), "reference": "torch", "blocks": 8, "tokens": 24, "near_ties": 0}
    equal = Comparison(**same, differing_blocks=0, max_confidence_difference=1e-6, verdict="equal")
    different = Comparison(**same, differing_blocks=8, max_confidence_difference=1.0, verdict="different")
    parity = ParityReport(
        probes=Probes(blocks=8, shortest_context=4, longest_context=32),
        dialects={"union": equal, "onnx": equal},
        negative_controls={"taps shifted by one": different},
    )
    write_model(folder / "parity.json", parity)


def measured_entry() -> CertificateEntry:
    fast, slow = number(1.3, 10, 0.05), number(0.8, 10, 0.05)
    return CertificateEntry(
        profile=CPU,
        status="measured",
        fingerprint=fingerprint(),
        measured_at="2026-11-29T12:00:00+00:00",
        workload=Workload(
            domains=("chat", "math"),
            sampling=record().sampling,
            thinking_mode="none",
            policy="fixed",
            prompts=12,
            max_new_tokens=16,
        ),
        acceptance={"math": domain_acceptance(2.0), "chat": domain_acceptance(1.5)},
        offline_vs_engine=Agreement(
            result="agrees",
            tolerance=0.05,
            prompts=12,
            offline_tau=number(1.75),
            engine_tau=number(1.76),
            relative_difference=number(0.006, 12, 0.01),
        ),
        lossless=LosslessSummary(method="greedy_rescoring+enumeration", result="pass", n=12, drafts=240),
        load=(
            load_point("none", 100),
            load_point("fixed", 130),
            load_point("none", 200, 4),
            load_point("fixed", 160, 4),
        ),
        against_none=(
            AgainstNone(concurrency=1, arm="fixed", policy="fixed", ratio=fast),
            AgainstNone(concurrency=4, arm="fixed", policy="fixed", ratio=slow),
        ),
        cycle=cycle(),
        recommended=(
            Recommendation(from_concurrency=1, to_concurrency=3, policy="fixed", gamma=GAMMA, reason="1.3 times"),
            Recommendation(from_concurrency=4, to_concurrency=4, policy="none", gamma=GAMMA, reason="0.8 times"),
        ),
        holds_until=HoldsUntil(engine_version="0.1.0", date="2027-05-28"),
    )


def calibrated(found: results.EvaluationMetrics) -> results.EvaluationMetrics:
    """With the confidences assessed at every temperature."""
    temperatures = {
        name: one.model_copy(update={"confidence": calibration().results[0].held_out, "absent": {}})
        for name, one in found.temperatures.items()
    }
    return found.model_copy(update={"temperatures": temperatures})


CYCLES = (6,) * 8 + (8,) * 4  # of each prompt; 80 together, as `domain` says
COMMITTED = {
    "math": tuple(2 * cycles for cycles in CYCLES),
    "chat": tuple(3 * cycles // 2 for cycles in CYCLES),
    "code": (8,) * 8 + (12,) * 4,  # 112, 1.4 times 80
}


def paired() -> PairedReport:
    """A champion that drafts just as well, and a baseline that needed a tenth more cycles on every prompt."""
    names = [(domain, number) for domain in COMMITTED for number in range(len(CYCLES))]

    def against(slower: int) -> PairedPrompts:
        committed = tuple(10 * COMMITTED[domain][number] for domain, number in names)
        cycles = tuple(CYCLES[number] for _, number in names)
        return PairedPrompts(
            ids=tuple(f"{domain}{number}" for domain, number in names),
            domains=tuple(domain for domain, _ in names),
            committed=tuple(count // 10 for count in committed),
            cycles=cycles,
            rival_committed=committed,
            rival_cycles=tuple((10 + slower) * count for count in cycles),
        )

    def rival(digest: str, build: str, slower: int) -> Rival:
        return Rival(
            package_digest=digest,
            model_digest=hexes(f"{build} model"),
            build=build,
            gamma=GAMMA,
            training_domains=("math", "chat"),
            temperatures=dict.fromkeys(("0", "1"), against(slower)),
        )

    return PairedReport(gamma=GAMMA, rivals=(rival(CHAMPION, "demo", 0), rival(BASELINE, "first", 1)))


def against_champion() -> AgainstChampion:
    return AgainstChampion(
        package_digest=CHAMPION,
        load=(load_point("fixed", 125), load_point("fixed", 150, 4)),
        ratios=(
            ChampionRatio(concurrency=1, policy="fixed", champion_policy="fixed", ratio=number(1.04, 10, 0.02)),
            ChampionRatio(concurrency=4, policy="none", champion_policy="none", ratio=number(1.0, 10, 0.0)),
        ),
    )


def domain_acceptance(tau: float) -> results.Acceptance:
    whole = domain("training", tau)
    return results.Acceptance(tau=whole.tau, conditional=whole.conditional, marginal=whole.marginal)


def without_heads(sources: Sources) -> Sources:
    """The same build with a drafter that was trained without heads, stored with a neutral sequential one."""
    config = DrafterConfig.of(sources.record, sources.build.drafter).model_copy(update={"confidence": False})
    trained = config.model_copy(update={"markov_type": "none", "markov_rank": 0})
    weights = sources.export / "drafter/model.safetensors"
    tensors = {name: value for name, value in load_file(weights).items() if "confidence" not in name}
    tensors["markov_head.markov_w2.weight"] = np.zeros((VOCABULARY, RANK), np.float32)
    save_file(tensors, weights)
    digest = digest_file(weights)
    described = describe(
        config, sources.record, dialect="union", dtype="float32", weights_sha256=digest, trained=trained
    )
    write_json(sources.export / "drafter/config.json", described)
    write_absence(sources.calibrate, GAMMA, "the drafter has no confidence head")
    return sources
