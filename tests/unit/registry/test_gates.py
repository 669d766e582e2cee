"""Each gate is proved by packages whose JSON passes it, fails it, or lacks what it asks about."""

from __future__ import annotations

import contextlib
import datetime
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_build
import pytest
from fake_build import BASELINE, CHAMPION, CPU
from resealing import reseal

from dspark.config.gates import GatePolicy, read_gates
from dspark.errors import DsparkError, IntegrityError
from dspark.io.jsonfile import read_model
from dspark.package.assemble import assemble
from dspark.package.certificate import Certificate
from dspark.package.layout import RULES
from dspark.package.monitoring import prometheus_rules, rules_text
from dspark.package.verify import read_manifest
from dspark.registry.gate_report import GateReport, GateRow
from dspark.registry.gates import judge

METRICS, PAIRED, LOSSLESS = (f"evidence/evaluate/{name}.json" for name in ("metrics", "paired", "lossless"))
CERTIFICATE, ENTRY = "certificate.json", f"evidence/certify/{CPU}.json"
TODAY = datetime.date(2026, 12, 1)  # the fake entry holds from two days before until half a year later
PROFILE = fake_build.profiles()[0]

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="session")
def policy() -> GatePolicy:
    return read_gates(Path(__file__).resolve().parents[3])


@pytest.fixture
def package(compared: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return Path(shutil.copytree(compared, tmp_path / "package"))


def change(package: Path, path: str, edit: Edit) -> None:
    """Edit a JSON file and make every digest right again."""
    value = json.loads((package / path).read_text())
    edit(value)
    (package / path).write_text(json.dumps(value))
    reseal(package)


def change_entry(package: Path, edit: Edit) -> None:
    """Edit the certificate's entry for the profile, which stands in two files."""
    for path in (CERTIFICATE, ENTRY):
        value = json.loads((package / path).read_text())
        edit(next(one for one in value.get("entries", [value]) if one["profile"] == CPU))
        (package / path).write_text(json.dumps(value))
    with contextlib.suppress(DsparkError):  # of a certificate that is none no rules follow
        certificate = read_model(package / CERTIFICATE, Certificate)
        rules = prometheus_rules(read_manifest(package).description(), certificate)
        (package / RULES).write_text(rules_text(rules))
    reseal(package)


def drop(package: Path, path: str) -> None:
    """Take a file out of the package and out of its manifest."""
    (package / path).unlink()
    manifest = json.loads((package / "manifest.json").read_bytes())
    manifest["files"] = [entry for entry in manifest["files"] if entry["path"] != path]
    (package / "manifest.json").write_text(json.dumps(manifest))
    reseal(package)


def judged(package: Path, policy: GatePolicy, **changes: Any) -> GateReport:
    asked = {"champion": CHAMPION, "profiles": [PROFILE], "today": TODAY}
    return judge(package, policy, **(asked | changes))


def row(report: GateReport, gate: str) -> GateRow:
    return next(found for found in report.rows if found.gate == gate)


def refused(report: GateReport) -> dict[str, str]:
    return {found.gate: found.verdict for found in report.refusals}


def test_a_package_that_loses_nothing_passes_every_gate(compared: Path, policy: GatePolicy):
    report = judged(compared, policy, baseline=BASELINE)
    assert report.passed and not report.refusals
    assert (report.build, report.champion, report.baseline, report.stage) == ("demo", CHAMPION, BASELINE, "production")
    verdicts = {found.gate: found.verdict for found in report.rows}
    taus = {f"tau {domain}, temperature {t}" for domain in ("chat", "code", "math") for t in (0, 1)}
    assert verdicts.keys() == {
        "package", "lossless", *taus, *(f"baseline {name}" for name in taus),
        "calibration, temperature 0", "calibration, temperature 1",
        *(f"{gate}, {CPU}" for gate in ("lossless", "agreement", "certificate")),
        *(f"throughput, {CPU} at {requests}" for requests in (1, 4)),
    }  # fmt: skip
    math = row(report, "baseline tau math, temperature 0")
    assert math.champion is not None and math.champion.value == pytest.approx(20 / 11)
    assert math.difference is not None and math.difference.value == pytest.approx(0.1)


def test_gates_read_json_and_load_neither_models_nor_a_tracking_server(compared: Path):
    code = (
        "import datetime, sys; from pathlib import Path; from dspark.config.gates import read_gates\n"
        "from dspark.registry.gates import judge\n"
        f"found = judge(Path({str(compared)!r}), read_gates(Path({str(Path(__file__).resolve().parents[3])!r})),"
        f" champion={CHAMPION!r}, profiles=[])\n"
        "print(len(found.rows), sorted({'torch', 'transformers', 'mlflow', 'onnxruntime', 'onnx'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split(maxsplit=1) == ["11", "[]\n"]


# ---------------------------------------------------------------- package


def test_a_package_that_does_not_verify_is_judged_no_further(package: Path, policy: GatePolicy):
    (package / METRICS).write_text((package / METRICS).read_text().replace("2.0", "3.0"))
    report = judged(package, policy)
    assert refused(report) == {"package": "fail"} and len(report.rows) == 1
    assert "metrics.json" in report.rows[0].reason and "nothing else was judged" in report.rows[0].reason
    (package / "manifest.json").write_text("{}")
    with pytest.raises(IntegrityError):
        judged(package, policy)


def test_a_comparison_that_contradicts_the_evaluation_does_not_verify(package: Path, policy: GatePolicy):
    """Otherwise a table of invented counts would open every gate."""

    def better(value: dict[str, Any]) -> None:
        prompts = value["rivals"][0]["temperatures"]["0"]
        prompts["committed"] = [min(tokens + 2, 4 * cycles) for tokens, cycles in
                                zip(prompts["committed"], prompts["cycles"], strict=True)]  # fmt: skip

    change(package, PAIRED, better)
    assert "counted other prompts or cycles" in row(judged(package, policy), "package").reason


def test_a_certificate_that_compares_with_an_unknown_package_does_not_verify(package: Path, policy: GatePolicy):
    change_entry(package, lambda entry: entry["against_champion"].update(package_digest="0" * 64))
    assert "on whose prompts nothing is known" in row(judged(package, policy), "package").reason


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda champion: champion["ratios"].pop(), "not compared at every load"),
        (lambda champion: champion["ratios"][0].update(policy="none"), "not what it recommends there"),
        (lambda champion: champion["ratios"][0].update(champion_policy="scheduled"), "which was not measured"),
        (lambda champion: champion["ratios"][0]["ratio"].update(value=-1.0), "not positive"),
    ],
)
def test_a_comparison_with_the_champion_that_nobody_measured_does_not_verify(
    package: Path, policy: GatePolicy, edit: Edit, said: str
):
    change_entry(package, lambda entry: edit(entry["against_champion"]))
    assert said in row(judged(package, policy), "package").reason


# ---------------------------------------------------------------- tau


def faster_champion(package: Path, domain: str, share: float, *, prompts: int | None = None) -> None:
    """Let the champion have needed that share of its cycles on so many prompts of a domain, at temperature 0."""

    def edit(value: dict[str, Any]) -> None:
        table = value["rivals"][0]["temperatures"]["0"]
        places = [place for place, name in enumerate(table["domains"]) if name == domain]
        for place in places[:prompts]:  # tens of cycles, so that shares are whole
            table["rival_cycles"][place] = round(table["rival_cycles"][place] * share)

    change(package, PAIRED, edit)


def test_a_domain_that_lost_too_much_is_worse_and_the_others_are_not(package: Path, policy: GatePolicy):
    faster_champion(package, "math", 0.9)
    report = judged(package, policy)
    assert refused(report) == {"tau math, temperature 0": "worse"}
    found = row(report, "tau math, temperature 0")
    assert found.difference is not None and found.difference.value == pytest.approx(-0.1)
    assert found.reason == "surely a relative loss above 3 %"


def test_a_loss_within_the_margin_is_non_inferior(package: Path, policy: GatePolicy):
    faster_champion(package, "math", 0.9)
    wide = policy.model_copy(update={"tau": policy.tau.model_copy(update={"number": 0.11})})
    assert judged(package, wide).passed


def test_a_loss_on_some_prompts_is_undecided_and_says_how_many_would_decide(package: Path, policy: GatePolicy):
    faster_champion(package, "math", 0.8, prompts=2)
    found = row(judged(package, policy), "tau math, temperature 0")
    assert found.verdict == "undecided" and found.prompts_needed is not None and found.prompts_needed > 12
    assert f"about {found.prompts_needed} would decide" in found.reason and "12 prompts" in found.reason


def test_promotion_is_refused_if_production_is_another_package_than_was_measured_against(
    compared: Path, policy: GatePolicy
):
    other = "d" * 64
    report = judged(compared, policy, champion=other)
    assert refused(report) == {
        "tau": "fail", f"throughput, {CPU} at 1": "fail", f"throughput, {CPU} at 4": "fail"}  # fmt: skip
    assert row(report, "tau").reason == (
        f"the champion is {other[:12]}, the package was measured against {CHAMPION[:12]}, {BASELINE[:12]}: "
        f"dspark run --build demo --set against={other}"
    )


def test_a_package_without_a_comparison_cannot_follow_a_champion(pristine: Path, policy: GatePolicy):
    report = judged(pristine, policy)
    assert refused(report).keys() >= {"tau", f"throughput, {CPU} at 1"}
    assert "measured against nothing" in row(report, "tau").reason


def test_too_few_prompts_decide_nothing_whatever_their_interval(compared: Path, policy: GatePolicy):
    """One prompt has an interval of no width."""
    strict = policy.model_copy(update={"prompts": policy.prompts.model_copy(update={"number": 13})})
    report = judged(compared, strict)
    assert {found.verdict for found in report.rows if found.gate.startswith("tau")} == {"undecided"}
    found = row(report, "tau math, temperature 1")
    assert found.prompts_needed == 13 and found.reason == "measured on 12 prompts, at least 13 are asked for"


def test_a_domain_that_the_champion_knew_and_the_candidate_forgot_is_a_shut_gate(package: Path, policy: GatePolicy):
    change(package, PAIRED, lambda value: value["rivals"][0]["training_domains"].append("law"))
    report = judged(package, policy)
    assert refused(report) == {f"tau law, temperature {t}": "fail" for t in (0, 1)}
    assert row(report, "tau law, temperature 0").reason == "no prompt of it was decoded"


def new_domain(package: Path) -> None:
    """As if the champion had not been trained on chat."""
    change(package, PAIRED, lambda value: value["rivals"][0].update(training_domains=["math"]))


def test_a_new_domain_must_be_better_not_only_no_worse(package: Path, policy: GatePolicy):
    new_domain(package)
    report = judged(package, policy)
    assert refused(report) == {f"tau chat (new), temperature {t}": "fail" for t in (0, 1)}
    assert row(report, "tau chat (new), temperature 0").reason == "surely below the relative gain of 2 % asked for"


def test_a_new_domain_that_gained_is_better(package: Path, policy: GatePolicy):
    new_domain(package)
    faster_champion(package, "chat", 1.1)
    report = judged(package, policy)
    assert row(report, "tau chat (new), temperature 0").verdict == "better"
    assert refused(report) == {"tau chat (new), temperature 1": "fail"}


def test_small_losses_do_not_add_up_past_the_pinned_baseline(package: Path, policy: GatePolicy):
    """Within the champion's margin of 3 %, and 10 % behind what was pinned."""

    def faster(value: dict[str, Any]) -> None:
        prompts = value["rivals"][1]["temperatures"]["0"]
        prompts["rival_cycles"] = [count * 9 // 11 for count in prompts["rival_cycles"]]

    change(package, PAIRED, faster)
    report = judged(package, policy, baseline=BASELINE)
    assert refused(report) == {f"baseline tau {domain}, temperature 0": "worse" for domain in ("chat", "code", "math")}
    assert judged(package, policy, baseline=None).passed

    def within(gate: str) -> bool:
        wide = getattr(policy, gate).model_copy(update={"number": 0.11})
        return judged(package, policy.model_copy(update={gate: wide}), baseline=BASELINE).passed

    assert within("baseline") and not within("tau"), "a baseline has a margin of its own"


def test_a_pin_of_the_policy_counts_even_if_the_caller_forgets_it(compared: Path, policy: GatePolicy):
    pinned = policy.model_copy(update={"baselines": {"demo": "e" * 64}})
    report = judged(compared, pinned)
    assert report.baseline == "e" * 64 and refused(report) == {"baseline tau": "fail"}
    assert "the pinned baseline is eeeeeeeeeeee" in row(report, "baseline tau").reason


def test_the_first_promotion_is_against_no_speculation(package: Path, policy: GatePolicy):
    drop(package, PAIRED)
    change_entry(package, lambda entry: entry.pop("against_champion"))
    report = judged(package, policy, champion=None)
    assert report.passed and report.champion is None
    found = row(report, "tau chat (new), temperature 0")
    assert (found.champion, found.verdict) == (1.0, "better")
    assert found.difference is not None and found.difference.value == 0.5
    assert row(report, f"throughput, {CPU} at 1").reason.startswith("fixed against no speculation: ")
    at_four = row(report, f"throughput, {CPU} at 4")
    assert at_four.verdict == "non-inferior" and "recommends no speculation there" in at_four.reason


def test_a_first_drafter_that_accepts_hardly_anything_is_no_gain(package: Path, policy: GatePolicy):
    drop(package, PAIRED)
    change_entry(package, lambda entry: entry.pop("against_champion"))
    low = {"value": 1.01, "n": 12, "ci95": [1.0, 1.02]}
    for path in (METRICS, "speculation_profile.json"):
        name = "tau" if path == METRICS else "accept_length"
        change(
            package, path, lambda value, name=name: value["temperatures"]["0"]["domains"]["chat"].update({name: low})
        )
    assert refused(judged(package, policy, champion=None)) == {"tau chat (new), temperature 0": "undecided"}


# ---------------------------------------------------------------- calibration


def test_calibration_must_be_good_enough_at_every_temperature(package: Path, policy: GatePolicy):
    worse = {"value": 0.11, "n": 12, "ci95": [0.05, 0.2]}
    change(package, METRICS, lambda value: value["temperatures"]["1"]["confidence"].update(mean_ece_after=worse))
    report = judged(package, policy)
    assert refused(report) == {"calibration, temperature 1": "fail"}
    assert row(report, "calibration, temperature 1").reason == "the expected calibration error is above 0.1"


def test_calibration_that_was_not_measured_is_a_shut_gate_with_the_evaluations_own_reason(
    package: Path, policy: GatePolicy
):
    def lacking(value: dict[str, Any]) -> None:
        del value["temperatures"]["0"]["confidence"]
        value["temperatures"]["0"]["absent"] = {"confidence": "no calibration for this temperature"}
        del value["temperatures"]["1"]["confidence"]["mean_ece_after"]

    change(package, METRICS, lacking)
    report = judged(package, policy)
    assert refused(report) == {f"calibration, temperature {t}": "fail" for t in (0, 1)}
    assert row(report, "calibration, temperature 0").reason.endswith("no calibration for this temperature")


# ---------------------------------------------------------------- losslessness


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda value: value.update(result="inconclusive"), "the check's result is inconclusive"),
        (lambda value: value.update(result="fail"), "the check's result is fail"),
        (lambda value: value["greedy"].update(drafts=49), "saw 49 draft tokens, at least 50 are asked for"),
    ],
)
def test_losslessness_must_be_shown_on_enough_drafts(package: Path, policy: GatePolicy, edit: Edit, said: str):
    change(package, LOSSLESS, edit)
    report = judged(package, policy)
    assert refused(report) == {"lossless": "fail"} and said in row(report, "lossless").reason


def test_a_package_without_a_check_of_losslessness_is_refused(package: Path, policy: GatePolicy):
    drop(package, LOSSLESS)
    assert refused(judged(package, policy)) == {"lossless": "fail"}


def test_losslessness_in_the_engine_counts_too(package: Path, policy: GatePolicy):
    change_entry(package, lambda entry: entry["lossless"].update(result="fail"))
    assert refused(judged(package, policy)) == {f"lossless, {CPU}": "fail"}


# ---------------------------------------------------------------- the certificate


def test_evaluation_and_engine_must_lie_within_the_policy_whatever_the_engine_tolerates(
    package: Path, policy: GatePolicy
):
    apart = {"value": -0.06, "n": 12, "ci95": [-0.08, -0.04]}
    change_entry(package, lambda entry: entry["offline_vs_engine"].update(relative_difference=apart, tolerance=0.1))
    report = judged(package, policy)
    assert refused(report) == {f"agreement, {CPU}": "fail"}
    assert row(report, f"agreement, {CPU}").reason == "evaluation and engine lie more than 5 % apart"


def test_no_gate_of_a_profile_passes_on_an_entry_that_disagrees(package: Path, policy: GatePolicy):
    def disagrees(entry: dict[str, Any]) -> None:
        entry.update(status="disagrees", reason="tau is 1 in the engine and 2 in the evaluation")
        apart = {"value": -0.5, "n": 12, "ci95": [-0.6, -0.4]}
        entry["offline_vs_engine"].update(result="disagrees", relative_difference=apart)

    change_entry(package, disagrees)
    report = judged(package, policy)
    assert refused(report) == {
        f"{gate}, {CPU}": "fail" for gate in ("lossless", "agreement", "certificate", "throughput")
    }
    assert "disagrees in the certificate: tau is 1" in row(report, f"throughput, {CPU}").reason


def test_a_profile_without_a_measurement_is_refused(compared: Path, policy: GatePolicy):
    absent = fake_build.profiles()[1]
    other = PROFILE.model_copy(update={"name": "nobody-measured-this"})
    report = judged(compared, policy, profiles=[PROFILE, absent, other])
    assert len(report.refusals) == 8
    assert "no GPU" in row(report, f"certificate, {absent.name}").reason
    assert row(report, "throughput, nobody-measured-this").reason == "the certificate has no entry for it"
    nowhere = judged(compared, policy, profiles=[])
    assert refused(nowhere) == {"serving profiles": "fail"}


@pytest.mark.parametrize(
    ("today", "verdict"),
    [("2027-05-21", "pass"), ("2027-05-22", "fail"), ("2027-05-28", "fail"), ("2027-05-29", "fail")],
)
def test_a_certificate_must_hold_for_a_while(compared: Path, policy: GatePolicy, today: str, verdict: str):
    """It ends on 2027-05-28, and seven days are asked for."""
    found = row(judged(compared, policy, today=datetime.date.fromisoformat(today)), f"certificate, {CPU}")
    assert found.verdict == verdict and "2027-05-28" in found.reason


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ({"engine_versions": ">=0.2"}, "it is for reference >=0.2, here is 0.1.0"),
        ({"hardware": {"accelerator": "H100"}}, "it is for 1 x H100, this machine has no GPU"),
        ({"thinking_mode": "on"}, "thinking mode of the corpus: certified none, here on"),
        ({"sampling": {"temperature": 0.3}}, "sampling of the corpus: certified temperature 1"),
        ({"engine": "llamacpp", "dtype": "float32"}, "engine: certified reference, the profile's is llamacpp"),
    ],
)
def test_a_certificate_about_something_else_than_the_profile_serves_is_stale(
    compared: Path, policy: GatePolicy, profile: dict[str, Any], said: str
):
    other = type(PROFILE).model_validate(PROFILE.model_dump() | profile)
    report = judged(compared, policy, profiles=[other])
    assert refused(report) == {f"certificate, {CPU}": "fail"}
    assert said in row(report, f"certificate, {CPU}").reason


def test_a_certificate_of_another_machine_than_serves_is_stale(compared: Path, policy: GatePolicy):
    here = fake_build.fingerprint()
    assert judged(compared, policy, fingerprints={CPU: here}).passed
    report = judged(compared, policy, fingerprints={CPU: here | {"threads": 64}})
    assert refused(report) == {f"certificate, {CPU}": "fail"}
    assert "threads: certified 1, here 64" in row(report, f"certificate, {CPU}").reason


# ---------------------------------------------------------------- throughput


def test_throughput_may_not_be_lost_at_any_load(package: Path, policy: GatePolicy):
    slow = {"value": 0.9, "n": 10, "ci95": [0.88, 0.92]}
    change_entry(package, lambda entry: entry["against_champion"]["ratios"][0].update(ratio=slow))
    report = judged(package, policy)
    assert refused(report) == {f"throughput, {CPU} at 1": "worse"}
    found = row(report, f"throughput, {CPU} at 1")
    assert found.difference is not None and found.difference.value == pytest.approx(-0.1)
    assert found.reason == "fixed against the champion's fixed: surely a relative loss above 5 %"


def test_undecided_throughput_says_how_many_timed_requests_would_decide(package: Path, policy: GatePolicy):
    """At 4 requests 10 rounds timed 40; the bound lies 8 % below and must come within 5 %: 2.56 times as many."""
    wide = {"value": 1.0, "n": 10, "ci95": [0.92, 1.08]}
    change_entry(package, lambda entry: entry["against_champion"]["ratios"][1].update(ratio=wide))
    found = row(judged(package, policy), f"throughput, {CPU} at 4")
    assert (found.verdict, found.prompts_needed) == ("undecided", 4 * 26)
    assert "40 timed requests" in found.reason


def test_the_points_are_those_of_the_service_level_agreement(compared: Path, policy: GatePolicy):
    def at(*requests: int) -> GateReport:
        levels = [{"requests": number, "tokens_per_second_per_user": 1.0} for number in requests]
        profile = type(PROFILE).model_validate(PROFILE.model_dump() | {"service_levels": levels})
        return judged(compared, policy, profiles=[profile])

    assert {found.gate for found in at(4).rows if found.gate.startswith("throughput")} == {f"throughput, {CPU} at 4"}
    report = at(1, 8)
    assert refused(report) == {f"throughput, {CPU} at 8": "fail"}
    assert "name it in certify_concurrency" in row(report, f"throughput, {CPU} at 8").reason


def test_an_engine_in_which_no_champion_was_measured_is_a_shut_gate(package: Path, policy: GatePolicy):
    change_entry(package, lambda entry: entry.pop("against_champion"))
    report = judged(package, policy)
    assert refused(report) == {f"throughput, {CPU} at {requests}": "fail" for requests in (1, 4)}
    assert "measured against nothing" in row(report, f"throughput, {CPU} at 1").reason


def test_confidences_that_are_not_stated_cannot_be_wrong(policy: GatePolicy, tmp_path: Path):
    """A drafter without a confidence head is verified in whole blocks: there is nothing that calibration decides."""
    sources = fake_build.without_heads(fake_build.make(tmp_path / "build", rivals=True))
    assemble(sources, tmp_path / "package", card=fake_build.card)
    found = [one for one in judged(tmp_path / "package", policy).rows if one.gate.startswith("calibration")]
    assert [(one.gate, one.verdict) for one in found] == [("calibration", "pass")]
