from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from dspark.calibration import CalibrationReport, Records, fit_temperatures
from dspark.config.models import CalibrationSettings, EvaluationSettings
from dspark.corpus.prompts import PreparedPrompt
from dspark.decoding.drafting import TorchProposer
from dspark.decoding.records import calibration_records, read_records
from dspark.drafters.dspark import DSparkDrafter
from dspark.errors import DataError, SettingsError
from dspark.evaluation import drafter as module
from dspark.evaluation.decoding import decode_prompts, first_prompts, spread_prompts
from dspark.evaluation.drafter import evaluate_drafter, temperatures_of
from dspark.evaluation.paired import PairedReport, relative_difference, tau_of
from dspark.evaluation.results import EvaluationMetrics, LosslessReport, Pareto, SampledLossless
from dspark.evaluation.rivals import RivalDrafter
from dspark.evaluation.tiny import tiny_drafter, tiny_target
from dspark.io.jsonfile import read_model
from dspark.processor import arithmetic
from dspark.scheduling.cost import CostCurve
from dspark.targets.loading import Target

SETTINGS = EvaluationSettings(
    prompts_per_domain=3, max_new_tokens=10, batch_size=4, temperatures=(1.0,), throughput_dtype="bfloat16",
    throughput_prompts=3, throughput_new_tokens=6, throughput_rounds=2,
)  # fmt: skip


def prompt(name: str, domain: str, *ids: int) -> PreparedPrompt:
    return PreparedPrompt(id=name, domain=domain, messages=[{"role": "user", "content": "x"}], token_ids=list(ids))


PROMPTS = [
    prompt(f"{domain}{number}", domain, *range(2 + start, 6 + start + number))
    for start, domain in enumerate(("math", "chat", "humaneval"))
    for number in range(4)
]


def load(dtype: str) -> tuple[Target, DSparkDrafter]:
    import torch

    target = tiny_target(40, spread=0.3, dtype=getattr(torch, dtype))
    return target, tiny_drafter(target, 3)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The enumeration has tests of its own."""
    done = SampledLossless(result="pass", temperature=1, tolerance=1e-10, largest_difference=0, cases=())
    monkeypatch.setattr(module, "check_sampled", lambda progress: done)


@pytest.mark.usefixtures("quick")
def test_without_bfloat16_products_everything_is_measured_on_the_float32_pair(tmp_path: Path, processor_flags):
    processor_flags("avx2")
    asked: list[str] = []

    def counted(dtype: str) -> tuple[Target, DSparkDrafter]:
        asked.append(dtype)
        return load(arithmetic(dtype))

    report = evaluate_drafter(
        counted, PROMPTS, SETTINGS, tmp_path, training_domains=["math", "chat"], no_cost="serving profile x: flat"
    )
    # Nothing to schedule by: the arm is not there, and the metrics say why.
    assert report.throughput is not None and "torch scheduled" not in report.throughput.arms
    assert report.absent == {"torch scheduled": "serving profile x: flat"}
    assert asked == ["float32"]
    assert {one.dtype for one in report.temperatures.values()} == {report.throughput.dtype} == {"float32"}


@pytest.mark.usefixtures("quick")
def test_only_what_is_sampled_goes_to_a_faster_device(tmp_path: Path, processor_flags):
    processor_flags("avx512_bf16")
    asked: list[tuple[str, str]] = []

    def at(place: str):
        def counted(dtype: str) -> tuple[Target, DSparkDrafter]:
            asked.append((place, dtype))
            return load(dtype)

        return counted

    settings = SETTINGS.model_copy(update={"temperatures": (0.7, 1.0), "sampled_dtype": "float32"})
    evaluate_drafter(
        at("measured"), PROMPTS, settings, tmp_path / "a", training_domains=["math"], sampled=at("fast")
    )  # fmt: skip
    # Losslessness, sampling at both temperatures, throughput: the same dtype on the other device is another target.
    assert asked == [("measured", "float32"), ("fast", "float32"), ("measured", "bfloat16")]
    asked.clear()
    evaluate_drafter(at("measured"), PROMPTS, settings, tmp_path / "b", training_domains=["math"])
    assert asked == [("measured", "float32"), ("measured", "bfloat16")]


@pytest.mark.usefixtures("quick")
def test_everything_is_measured_into_one_folder(tmp_path: Path, processor_flags):
    processor_flags("avx512_bf16")
    curve = CostCurve(sample_batch_tokens=(1, 4), sample_steps_per_second=(10.0, 9.0), max_batch_tokens=16)
    asked: list[str] = []

    def counted(dtype: str) -> tuple[Target, DSparkDrafter]:
        asked.append(dtype)
        return load(dtype)

    report = evaluate_drafter(
        counted, PROMPTS, SETTINGS, tmp_path, training_domains=["math", "chat"], cost=curve,
        backends=lambda target: {"other": TorchProposer(tiny_drafter(target, 3, seed=4))},
    )  # fmt: skip
    assert asked == ["float32", "bfloat16"]
    tables = {"per_position.csv", "threshold_sweep.csv"}
    assert {path.name for path in tmp_path.iterdir()} == tables | {
        "metrics.json", "pareto.json", "lossless.json", "records"}  # fmt: skip
    assert read_model(tmp_path / "metrics.json", EvaluationMetrics) == report
    assert set(report.temperatures) == {"0", "1"}, "losslessness needs temperature 0, asked for or not"
    assert {name: one.dtype for name, one in report.temperatures.items()} == {"0": "float32", "1": "bfloat16"}
    for metrics in report.temperatures.values():
        assert set(metrics.domains) == {"math", "chat", "humaneval"}
        assert metrics.mean_of_domains is not None and metrics.mean_of_domains.domains == ("math", "chat")
    written = json.loads((tmp_path / "metrics.json").read_text())
    assert written["temperatures"]["0"]["domains"]["math"]["tau"].keys() == {"value", "n", "ci95"}
    assert written["temperatures"]["1"]["mean_of_domains"]["includes_bonus"] is True
    assert report.throughput is not None and report.throughput.dtype == "bfloat16"
    assert set(report.throughput.arms) == {"none", "torch fixed", "other fixed", "torch scheduled"}
    assert report.absent == {}
    assert len(read_model(tmp_path / "pareto.json", Pareto).points) == 4
    lossless = read_model(tmp_path / "lossless.json", LosslessReport)
    assert lossless.result == "pass" and lossless.greedy.n == 9
    records = read_records(tmp_path / "records" / "temperature-1.safetensors")
    assert records.label == "sampled" and len(records.ids) == 9
    rows = list(csv.DictReader((tmp_path / "threshold_sweep.csv").open()))
    assert {(row["temperature"], row["domain"]) for row in rows} == {
        (t, d) for t in ("0.0", "1.0") for d in ("math", "chat", "humaneval")}  # fmt: skip


@pytest.mark.usefixtures("quick")
def test_one_dtype_is_loaded_once(tmp_path: Path):
    asked: list[str] = []

    def counted(dtype: str) -> tuple[Target, DSparkDrafter]:
        asked.append(dtype)
        return load(dtype)

    settings = SETTINGS.model_copy(update={"throughput_dtype": "float32", "sampled_dtype": "float32"})
    report = evaluate_drafter(counted, PROMPTS, settings, tmp_path, training_domains=[])
    assert asked == ["float32"]
    assert report.throughput is not None and set(report.throughput.arms) == {"none", "torch fixed"}


def rival(digest: str, gamma: int, seed: int = 1, said: int | None = None) -> RivalDrafter:
    return RivalDrafter(
        package_digest=digest * 64, model_digest="0" * 64, build="other", gamma=said or gamma,
        training_domains=("math",), load=lambda target: tiny_drafter(target, gamma, seed=seed).to(target.dtype),
    )  # fmt: skip


@pytest.mark.usefixtures("quick")
def test_rivals_decode_the_candidates_own_prompts_and_are_compared_prompt_by_prompt(tmp_path: Path):
    settings = SETTINGS.model_copy(update={"throughput_dtype": "float32", "sampled_dtype": "float32"})
    report = evaluate_drafter(
        load, PROMPTS, settings, tmp_path, training_domains=["math", "chat"], rivals=[rival("a", 3), rival("b", 2, 7)]
    )
    paired = read_model(tmp_path / "paired.json", PairedReport)
    same, other = paired.rivals
    assert (same.gamma, other.gamma, same.training_domains) == (3, 2, ("math",))
    for name, metrics in report.temperatures.items():
        for domain, found in metrics.domains.items():
            mine, theirs = same.temperatures[name].of_domain(domain)
            tau = tau_of(mine)
            assert tau is not None and tau.value == found.tau.value and len(mine[0]) == found.prompts
            # The very same drafter: equal draws make equal texts, also at temperature 1.
            difference = relative_difference(mine, theirs)
            assert difference is not None and (difference.value, difference.ci95) == (0, (0, 0))
        records = read_records(tmp_path / "against" / ("b" * 64) / f"temperature-{name}.safetensors")
        assert {one.cycles.gamma for one in records.decoded} == {2}
        assert records.ids == other.temperatures[name].ids
        assert other.temperatures[name].rival_cycles == tuple(len(one.cycles) for one in records.decoded)


@pytest.mark.usefixtures("quick")
def test_a_rival_whose_blocks_are_not_what_its_manifest_says_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"package a{64} has blocks of 2, not 3"):
        evaluate_drafter(load, PROMPTS, SETTINGS, tmp_path, training_domains=[], rivals=[rival("a", 2, said=3)])


def test_half_precision_is_refused_for_losslessness(tmp_path: Path):
    settings = SETTINGS.model_copy(update={"dtype": "bfloat16"})
    with pytest.raises(SettingsError, match="losslessness needs float32"):
        evaluate_drafter(load, PROMPTS, settings, tmp_path, training_domains=["math"])


def test_the_calibration_of_the_same_sampling_is_taken():
    target, drafter = load("float32")
    settings = SETTINGS.model_copy(update={"max_new_tokens": 20})
    records = decode_prompts(target, TorchProposer(drafter), PROMPTS, settings, temperature=0.0)
    arrays = calibration_records(records.decoded)
    result = fit_temperatures(Records(**vars(arrays)), CalibrationSettings(min_samples=5))
    report = CalibrationReport(gamma=3, results=(result.calibration,))
    assert temperatures_of(report, 0.0) == result.temperatures
    assert temperatures_of(report, 1.0) is None
    assert temperatures_of(None, 0.0) is None


def test_draws_of_a_prompt_do_not_depend_on_the_other_prompts():
    target, drafter = load("float32")

    def said(prompts: list[PreparedPrompt], **changes: Any) -> dict[str, list[int]]:
        settings = SETTINGS.model_copy(update=changes)
        records = decode_prompts(target, TorchProposer(drafter), prompts, settings, temperature=1.0)
        return {name: one.token_ids for name, one in zip(records.ids, records.decoded, strict=True)}

    everyone, some = said(PROMPTS), said(PROMPTS[3:5][::-1])
    assert {name: everyone[name] for name in some} == some
    assert said(PROMPTS, seed=1) != everyone


def test_the_first_prompts_of_each_domain_are_taken_and_domains_take_turns():
    assert [one.id for one in first_prompts(PROMPTS, 1)] == ["math0", "chat0", "humaneval0"]
    assert [one.id for one in spread_prompts(PROMPTS, 5)] == ["math0", "chat0", "humaneval0", "math1", "chat1"]
    assert len(spread_prompts(PROMPTS, 100)) == len(PROMPTS)
