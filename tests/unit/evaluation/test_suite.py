"""A drafter on a suite: figures per set that are those of its records, and a run that goes on where it was stopped."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.calibration import CalibrationReport, Records, fit_temperatures
from dspark.config.models import CalibrationSettings, EvaluationSettings
from dspark.config.suites import BenchmarkSet, SuiteSpec
from dspark.corpus.benchmarks import SetReading
from dspark.corpus.prompts import PreparedPrompt, Prompt
from dspark.corpus.shapes import Message
from dspark.decoding.proposers import torch_proposer
from dspark.decoding.records import calibration_records, read_records
from dspark.errors import DataError, Interrupted, SettingsError
from dspark.evaluation.acceptance import measure_acceptance, read_sweep_csv
from dspark.evaluation.decoding import decode_prompts
from dspark.evaluation.results import Pareto
from dspark.evaluation.suite import PreparedSet, SetOrigin, SuiteInputs, SuiteReport, evaluate_suite, prepare_set
from dspark.evaluation.tiny import tiny_drafter, tiny_target
from dspark.io.jsonfile import model_json, read_model
from dspark.io.progress import Progress
from dspark.scheduling.cost import CostCurve

SETTINGS = EvaluationSettings(
    max_new_tokens=12, batch_size=4, temperatures=(0.0, 1.0), sampled_dtype="float32", throughput_dtype="float32",
    throughput_prompts=2, throughput_new_tokens=6, throughput_rounds=2,
)  # fmt: skip
DIGEST = "0" * 64


def load(dtype: str) -> Any:
    import torch

    target = tiny_target(40, spread=0.3, dtype=getattr(torch, dtype))
    return target, tiny_drafter(target, 3)


def spec(name: str, group: str = "math", **changes: Any) -> BenchmarkSet:
    fields = {"name": name, "group": group, "title": name, "licence": "ours", "origin": "here", "rows": 4, "limit": 4}
    return BenchmarkSet.model_validate({**fields, "files": [f"{name}.jsonl"], "prompts": ["{q}"], **changes})


def made(name: str, group: str, count: int, first: int) -> PreparedSet:
    prompts = tuple(
        PreparedPrompt(
            id=f"{name}/{number}", domain=name, messages=[{"role": "user", "content": "x"}],
            token_ids=list(range(first, first + 3 + number)),
        )
        for number in range(count)
    )  # fmt: skip
    counts = {"released": count, "rows": count, "outside": 0, "asked": count, "beyond": 0}
    origin = SetOrigin(
        title=name, group=group, licence="ours", origin="here", files={}, rejected={}, turns_left_out=0,
        **counts,
    )  # fmt: skip
    return PreparedSet(spec(name, group), origin, prompts)


SETS = [made("sums", "math", 4, 2), made("proofs", "math", 3, 9), made("talk", "chat", 3, 17)]


def inputs_of(sets: list[PreparedSet], settings: EvaluationSettings = SETTINGS) -> SuiteInputs:
    return SuiteInputs(
        suite="mini", build="tiny", target="tiny", target_digest=DIGEST, drafter_weights_sha256=DIGEST,
        prompts={one.spec.name: one.digest for one in sets}, settings=settings,
    )  # fmt: skip


def evaluate(
    out: Path, sets: list[PreparedSet] = SETS, loader: Callable[[str], Any] = load, **other: Any
) -> SuiteReport:
    return evaluate_suite(loader, "cpu", sets, inputs_of(sets), out, **other)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SuiteReport]:
    out = tmp_path_factory.mktemp("suite") / "out"
    return out, evaluate(out)


def test_every_set_has_the_figures_of_its_own_prompts(finished: tuple[Path, SuiteReport]):
    """The same prompts decoded alone: batches and other sets change nothing."""
    _, report = finished
    assert read_model(finished[0] / "suite.json", SuiteReport) == report
    assert set(report.temperatures) == {"0", "1"} and report.gamma == 3
    target, drafter = load("float32")
    for temperature, found in report.temperatures.items():
        assert list(found.sets) == ["sums", "proofs", "talk"]
        for one in SETS:
            alone = decode_prompts(
                target, torch_proposer(drafter), one.prompts, SETTINGS, temperature=float(temperature)
            )
            expected = measure_acceptance(alone.decoded)
            assert found.sets[one.spec.name].tau == expected.tau
            assert found.sets[one.spec.name].conditional == expected.conditional
            assert found.sets[one.spec.name].role == "evaluation_only"


def test_means_are_of_sets_not_of_prompts(finished: tuple[Path, SuiteReport]):
    for found in finished[1].temperatures.values():
        tau = {name: one.tau.value for name, one in found.sets.items()}
        assert found.mean is not None and found.mean.domains == ("sums", "proofs", "talk")
        assert found.mean.tau.value == pytest.approx(np.mean(list(tau.values())))
        assert found.mean.tau.n == 10 and found.mean.tau.ci95[0] <= found.mean.tau.value <= found.mean.tau.ci95[1]
        assert found.groups["math"].tau.value == pytest.approx((tau["sums"] + tau["proofs"]) / 2)
        assert found.groups["chat"].tau.value == pytest.approx(tau["talk"])


def test_tables_stand_beside_the_report(finished: tuple[Path, SuiteReport]):
    out, report = finished
    rows = list(csv.DictReader((out / "per_position.csv").open()))
    assert {(row["temperature"], row["domain"]) for row in rows} == {
        (t, n) for t in ("0", "1") for n in ("sums", "proofs", "talk")
    }
    first = next(row for row in rows if (row["temperature"], row["domain"], row["position"]) == ("1", "talk", "1"))
    assert float(first["conditional"]) == report.temperatures["1"].sets["talk"].conditional[0].value
    assert {row.domain for row in read_sweep_csv(out / "threshold_sweep.csv")} == {"sums", "proofs", "talk"}


def test_the_build_s_calibration_is_applied_where_it_fits(tmp_path: Path):
    target, drafter = load("float32")
    prompts = [prompt for one in SETS for prompt in one.prompts]
    records = decode_prompts(target, torch_proposer(drafter), prompts, SETTINGS, temperature=0.0)
    result = fit_temperatures(Records(**vars(calibration_records(records.decoded))), CalibrationSettings(min_samples=5))
    calibration = CalibrationReport(gamma=3, results=(result.calibration,))
    report = evaluate(tmp_path / "out", calibration=calibration)
    assert report.temperatures["0"].confidence is not None
    assert report.temperatures["0"].confidence.temperatures == result.temperatures
    assert report.temperatures["0"].confidence.conversations == 10
    assert report.temperatures["1"].absent == {"confidence": "no calibration for this temperature"}
    kinds = {(row.temperature, row.confidence) for row in read_sweep_csv(tmp_path / "out/threshold_sweep.csv")}
    assert kinds == {(0.0, "raw"), (0.0, "calibrated"), (1.0, "raw")}


def untimed(report: SuiteReport) -> Any:
    """The report without what the clock gave."""
    told = model_json(report)
    for found in told["temperatures"].values():
        for figures in found["sets"].values():
            assert figures.pop("tokens_per_second")["value"] > 0
    return told


class StopAfter(Progress):
    """Asks for a stop when so many prompts were decoded."""

    def __init__(self, prompts: int) -> None:
        self.left = prompts

    def advance(self, count: int = 1, **fields: Any) -> None:
        self.left -= count
        if self.left < 0:
            raise Interrupted("stopped at a safe point")


def test_what_was_stopped_goes_on_with_the_sets_that_are_missing(tmp_path: Path, finished: tuple[Path, SuiteReport]):
    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        evaluate(out, progress=StopAfter(5))
    there = sorted(path.relative_to(out).as_posix() for path in out.rglob("*.safetensors"))
    assert there == ["records/sums/temperature-0.safetensors"] and not (out / "suite.json").exists()
    before = (out / there[0]).read_bytes()
    assert untimed(evaluate(out)) == untimed(finished[1])
    assert (out / there[0]).read_bytes() == before
    for one in SETS:
        for temperature in ("0", "1"):
            path = f"records/{one.spec.name}/temperature-{temperature}.safetensors"
            texts = [[d.token_ids for d in read_records(folder / path).decoded] for folder in (out, finished[0])]
            assert texts[0] == texts[1]


def test_finished_results_are_reported_again_without_a_model(finished: tuple[Path, SuiteReport]):
    def none(dtype: str) -> Any:
        raise AssertionError("a model was loaded")

    assert evaluate(finished[0], loader=none) == finished[1]


@pytest.mark.parametrize("change", [{"drafter_weights_sha256": "1" * 64}, {"target_digest": "1" * 64},
                                    {"settings": SETTINGS.model_copy(update={"seed": 1})},
                                    {"prompts": {"sums": DIGEST}}])  # fmt: skip
def test_results_of_other_inputs_are_never_mixed(finished: tuple[Path, SuiteReport], change: dict[str, Any]):
    out, before = finished[0], (finished[0] / "suite.json").read_bytes()
    other = inputs_of(SETS).model_copy(update=change)
    with pytest.raises(SettingsError, match=f"holds results of other inputs: {next(iter(change))} differ"):
        evaluate_suite(load, "cpu", SETS, other, out)
    assert (out / "suite.json").read_bytes() == before


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(SettingsError, match="holds something else"):
        evaluate(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_speed_is_measured_when_asked_for(tmp_path: Path):
    curve = CostCurve(sample_batch_tokens=(1, 4), sample_steps_per_second=(10.0, 9.0), max_batch_tokens=16)
    report = evaluate(tmp_path / "out", SETS[:1], cost=curve, timed=load)
    assert report.throughput is not None
    assert set(report.throughput.arms) == {"none", "torch fixed", "torch scheduled"}
    assert len(read_model(tmp_path / "out" / "pareto.json", Pareto).points) == 3


# ---------------------------------------------------------------- preparing a set


class Letters:
    """One token a character."""

    control_tokens = frozenset({"<end>"})

    def encode_chat(self, messages: Any) -> list[int]:
        return [ord(character) for message in messages for character in message["content"]]

    def round_trips(self, text: str) -> bool:
        return True


def reading(*texts: str) -> SetReading:
    prompts = [
        Prompt(f"s/{number}", "s", None, (Message("user", text),), "s.jsonl", number + 1)
        for number, text in enumerate(texts)
    ]
    return SetReading(prompts, [], outside=5, turns_left_out=2)


def prepare(found: SetReading, *, limit: int | None = None, own: int = 4, **suite: Any) -> PreparedSet:
    one = spec("s", limit=own)
    chosen = SuiteSpec.model_validate({"name": "mini", "sets": [one], "max_new_tokens": 10, **suite})
    return prepare_set(one, found, {"s.jsonl": DIGEST}, Letters(), chosen, limit=limit, max_position=40)


def test_every_row_is_accounted_for():
    found = prepare(reading("one", "two", "one ", "a <end> b", "x" * 20, "y" * 35), own=9)
    origin = found.origin
    assert (origin.rows, origin.outside, origin.turns_left_out, origin.released) == (6, 5, 2, 4)
    assert origin.rejected == {"control-token": 1, "duplicate": 1, "too-long": 1}, "35 and a reply of 10: more than 40"
    assert (origin.asked, origin.beyond) == (3, 0)
    assert origin.asked + sum(origin.rejected.values()) + origin.beyond == origin.rows
    assert {prompt.id for prompt in found.prompts} == {"s/0", "s/1", "s/4"}
    assert next(prompt for prompt in found.prompts if prompt.id == "s/1").token_ids == [ord(c) for c in "two"]


def test_the_first_prompts_in_hash_order_are_asked():
    """The same ones whatever else the file holds before or after them, and never more than the set's own limit."""
    texts = [f"text {number}" for number in range(30)]
    everyone = [prompt.id for prompt in prepare(reading(*texts), own=30).prompts]
    assert everyone != sorted(everyone) and len(everyone) == 30
    assert [prompt.id for prompt in prepare(reading(*texts), own=30, limit=7).prompts] == everyone[:7]
    few = prepare(reading(*texts), own=5, limit=7)
    assert [prompt.id for prompt in few.prompts] == everyone[:5] and (few.origin.asked, few.origin.beyond) == (5, 25)


def test_a_set_of_which_nothing_can_be_asked_is_refused():
    with pytest.raises(
        DataError, match=r"set 's': none of 2 rows can be asked \(s\.jsonl:\d: messages\[0\]\.content: spells"
    ):
        prepare(reading("<end> a", "<end> b"))
    with pytest.raises(DataError, match="a reply of 40 tokens leaves no room for a prompt in 40 positions"):
        prepare(reading("y"), max_new_tokens=40)
