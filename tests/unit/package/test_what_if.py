from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # fake_build.py, watched.py

import fake_build
import watched

from dspark.cli.boundary import run_command
from dspark.decoding.policies import Policy, Scheduled, ScheduledDelayed
from dspark.decoding.records import RecordSet, write_records
from dspark.errors import DataError, SettingsError
from dspark.evaluation.prediction import Prediction, Recorded, predict
from dspark.io.jsonfile import write_model
from dspark.package.assemble import assemble
from dspark.package.change import Change, parse_change
from dspark.package.what_if import WhatIf, what_if
from dspark.profiling.cost import CostReport
from dspark.profiling.times import MeasuredSteps
from dspark.scheduling.config import read_scheduler
from dspark.scheduling.delayed import DelayedPrefixScheduler
from dspark.scheduling.prefix import PrefixScheduler

FASTER = "gpu-elsewhere"


def cost(profile: str, seconds: float, requests: tuple[int, ...]) -> CostReport:
    """A cycle that drafts takes as long whatever it verifies, a plain one half of it."""
    made = fake_build.cost()
    (row,) = made.rows

    def at(count: int, tokens: int, took: float) -> Any:
        changed = {"requests": count, "verify_tokens": tokens, "step_seconds": took, "ci95": (took, took)}
        return row.model_copy(update=changed)

    rows = tuple(at(count, count * (1 + drafts), seconds) for count in requests for drafts in (0, 1, 3))
    plain = tuple(at(count, count, seconds / 2) for count in requests)
    return made.model_copy(update={"profile": profile, "rows": rows, "plain": plain})


def records() -> RecordSet:
    """With confidences that differ: the scheduler has something to choose."""
    generator = np.random.default_rng(3)
    made = watched.records()
    decoded = []
    for one in made.decoded:
        logits = generator.normal(1.0, 2.0, one.cycles.confidence_logits.shape).astype(np.float32)
        decoded.append(replace(one, cycles=replace(one.cycles, confidence_logits=logits)))
    return replace(made, decoded=tuple(decoded))


def packaged(root: Path, *costs: CostReport) -> Path:
    """A package with the step times of these profiles."""
    sources = fake_build.make(root)
    write_records(root / "evaluate/records/temperature-0.safetensors", records())
    for one in costs:
        write_model(root / f"{one.profile}.json", one)
    sources = replace(sources, costs={one.profile: root / f"{one.profile}.json" for one in costs})
    assemble(sources, root / "mine/package", card=fake_build.card)
    return root / "mine/package"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of two measured profiles: cycles of a second, of up to 2 requests, and of half of it, of up to 4."""
    root = tmp_path_factory.mktemp("what-if")
    return packaged(root, cost(fake_build.CPU, 1.0, (1, 2)), cost(FASTER, 0.5, (1, 2, 4)))


def points(answer: WhatIf) -> dict[tuple[int, str], Any]:
    return {(one.concurrency, one.policy): one for one in answer.points}


def test_shorter_blocks_are_cut_from_the_recorded_ones(folder: Path):
    """Of 15 blocks 9 accept a draft, and 15 or 16 drafts are accepted in all: tau 1.6 instead of about 2.03. Cycles
    take a second, so one request gets tau tokens per second; plain decoding gets two."""
    answer = what_if(folder, Change(gamma=1))
    assert (answer.current.gamma, answer.changed.gamma, answer.changed.profile) == (3, 1, fake_build.CPU)
    found = points(answer)
    assert {load for load, _ in found} == {1, 2}
    fixed = found[1, "fixed"]
    assert fixed.current.tau == pytest.approx(2.03, rel=0.08) and fixed.changed.tau == pytest.approx(1.6, rel=0.08)
    assert fixed.changed.tokens_per_second == pytest.approx(fixed.changed.tau)
    assert fixed.current.verified_tokens_per_request == 3 and fixed.changed.verified_tokens_per_request == 1
    none = found[1, "none"]
    assert none.current == none.changed and none.current.tokens_per_second == pytest.approx(2)
    assert any("blocks of 1 are the first 1 of 3 drafts and cost as much to draft" in line for line in answer.rests_on)
    assert any("18 eval prompts (chat, math), greedy, whole blocks of 3" in line for line in answer.rests_on)
    assert any("prefills are left out" in line for line in answer.rests_on)


def test_another_profile_costs_what_it_was_measured_to_cost(folder: Path):
    """Twice as fast, and of more requests, of which the first profile says nothing."""
    found = points(what_if(folder, Change(profile=FASTER)))
    one = found[2, "fixed"]
    assert one.changed.tokens_per_second == pytest.approx(2 * one.current.tokens_per_second)
    assert one.changed.tau == one.current.tau
    assert found[4, "fixed"].current is None and found[4, "fixed"].changed is not None
    certified = {place: one.certified_tokens_per_second for place, one in found.items()}
    certified = {place: speed for place, speed in certified.items() if speed is not None}
    loads = fake_build.measured_entry().load
    assert certified == {
        (one.concurrency, one.policy): one.tokens_per_second for one in loads if (one.concurrency, one.policy) in found
    }


def test_a_server_that_always_drafts_is_answered_for_without_plain_decoding(tmp_path: Path):
    """As SGLang is profiled: no plain step."""
    served = cost(fake_build.CPU, 1.0, (1, 2)).model_copy(
        update={"plain": (), "absent": {"plain": "a server with a drafter does not decode plainly"}}
    )
    answer = what_if(packaged(tmp_path, served), Change(gamma=1))
    found = points(answer)
    assert {load for load, _ in found} == {1, 2} and "none" not in {policy for _, policy in found}
    fixed = found[2, "fixed"]
    assert fixed.current is not None and fixed.changed is not None
    assert fixed.current.tau == pytest.approx(2.03, rel=0.08) and fixed.changed.tau == pytest.approx(1.6, rel=0.08)
    assert any("plain decoding was not measured on cpu-reference" in line for line in answer.rests_on)


def test_fewer_requests_than_were_measured_are_refused(tmp_path: Path):
    """The steps of two requests are not those of one, neither on the profile that is asked for nor on the first."""
    package = packaged(tmp_path, cost(fake_build.CPU, 1.0, (2, 4)), cost(FASTER, 0.5, (1, 2)))
    with pytest.raises(SettingsError, match="concurrency=1: steps of cpu-reference were measured for 2 to 4 requests"):
        what_if(package, Change(concurrency=1))
    one = points(what_if(package, Change(profile=FASTER, concurrency=1)))[1, "fixed"]
    assert one.current is None and one.changed is not None


def test_what_only_one_profile_knows_stands_there_alone(tmp_path: Path):
    """The first profile always drafts; the other one decodes plainly, too, and goes further."""
    first = cost(fake_build.CPU, 1.0, (1, 2)).model_copy(update={"plain": ()})
    answer = what_if(packaged(tmp_path / "a", first, cost(FASTER, 0.5, (1, 2, 4))), Change(profile=FASTER))
    none = points(answer)[1, "none"]
    assert none.current is None and none.changed is not None
    drafts = cost(FASTER, 0.5, (1, 2)).model_copy(update={"plain": ()})
    found = points(what_if(packaged(tmp_path / "b", cost(fake_build.CPU, 1.0, (1,)), drafts), Change(profile=FASTER)))
    assert found[1, "none"].current is not None and found[1, "none"].changed is None
    assert (2, "none") not in found and found[2, "fixed"].changed is not None


def by_hand(policy: Policy, gamma: int, concurrency: int) -> Prediction:
    """From what the package was made of: the prompts that were trained on, and steps of a second."""
    made = records()
    trained = [one for one, domain in zip(made.decoded, made.domains, strict=True) if domain != "code"]
    recorded = Recorded.of(trained, max(len(one.token_ids) for one in trained)).cut(gamma)
    return predict(recorded, policy, concurrency, MeasuredSteps(cost(fake_build.CPU, 1.0, (1, 2))))


def test_the_scheduled_point_is_that_of_the_packages_own_scheduler(folder: Path):
    """Cost and temperatures are those that the build was made up with: 1.5, 1.25 and 1 greedily, the additive cost. Of
    six drafts of two requests it verifies some."""
    answer = what_if(folder, Change(gamma=1, concurrency=2))
    found = points(answer)[2, "scheduled"]
    whole = Scheduled(PrefixScheduler(fake_build.additive(), 3, (1.5, 1.25, 1.0)))
    assert found.current == by_hand(whole, 3, 2)
    assert 0 < found.current.verified_tokens_per_request < 3
    assert found.changed == by_hand(Scheduled(PrefixScheduler(fake_build.additive(), 1, (1.5,))), 1, 2)
    assert found.current != by_hand(Scheduled(PrefixScheduler(fake_build.additive(), 3)), 3, 2), "temperatures matter"
    assert any("are taken to be packed" in line for line in answer.rests_on)


def test_a_scheduler_keeps_to_its_budget_and_its_policy(folder: Path, monkeypatch: pytest.MonkeyPatch):
    own = read_scheduler(folder / "scheduler/scheduler.json")
    tight = own.model_copy(update={"min_budget": 1, "max_budget": 1, "policy": "scheduled-delayed"})
    monkeypatch.setattr("dspark.package.what_if.read_scheduler", lambda path: tight)
    found = points(what_if(folder, Change(concurrency=2)))
    assert (2, "scheduled") not in found
    delayed = DelayedPrefixScheduler(fake_build.additive(), 3, (1.5, 1.25, 1.0), min_budget=1, max_budget=1)
    assert found[2, "scheduled-delayed"].current == by_hand(ScheduledDelayed(delayed), 3, 2)
    assert found[2, "scheduled-delayed"].current.verified_tokens_per_request <= 1


def test_an_engine_without_a_scheduler_schedules_nothing(tmp_path: Path):
    """llama.cpp verifies fixed lengths, or what is above a threshold."""
    made = cost(fake_build.CPU, 1.0, (1, 2))
    served = made.model_copy(update={"fingerprint": {**made.fingerprint, "engine": "llamacpp"}})
    answer = what_if(packaged(tmp_path, served), Change(gamma=1))
    assert {policy for _, policy in points(answer)} == {"none", "fixed"}
    assert "nothing is scheduled on cpu-reference: llamacpp has no scheduler" in answer.rests_on
    assert not any("packed" in line for line in answer.rests_on)


def test_one_load_may_be_asked_for(folder: Path):
    answer = what_if(folder, Change(concurrency=2))
    assert {one.concurrency for one in answer.points} == {2} and answer.current == answer.changed


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        (Change(gamma=4), "trained for blocks of 3", "dspark evaluate --study length --build demo"),
        (Change(profile="cpu-referense"), "was not made for it", "did you mean 'cpu-reference'?"),
        (Change(concurrency=3), "measured for 1 to 2 requests", "add 3 to `requests`"),
    ],
)
def test_what_nothing_was_measured_for_is_refused(folder: Path, change: Change, message: str, hint: str):
    with pytest.raises(SettingsError) as refused:
        what_if(folder, change)
    assert message in refused.value.message and hint in refused.value.hint


def test_a_profile_without_step_times_and_a_package_without_any(tmp_path: Path):
    sources = fake_build.make(tmp_path)
    write_records(tmp_path / "evaluate/records/temperature-0.safetensors", watched.records())
    assemble(sources, tmp_path / "package", card=fake_build.card)
    with pytest.raises(SettingsError, match="holds no step times of it"):
        what_if(tmp_path / "package", Change(profile=FASTER))
    assemble(replace(sources, costs={}), tmp_path / "bare", card=fake_build.card)
    with pytest.raises(DataError, match="holds no step times: none of its serving profiles was measured"):
        what_if(tmp_path / "bare", Change(gamma=1))


def test_changes_are_read_from_a_line():
    assert parse_change("gamma=2") == Change(gamma=2)
    assert parse_change("profile=a-b, concurrency=8,gamma=1") == Change(1, "a-b", 8)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("gama=2", "'gama' cannot be changed", "did you mean 'gamma'?"),
        ("gamma", "gamma has no value", "gamma=2"),
        ("gamma=0", "gamma is a number above 0, not '0'", "gamma=2"),
        ("concurrency=many", "concurrency is a number above 0", "concurrency=8"),
        ("gamma=1,gamma=2", "gamma stands there twice", "gamma=2"),
        ("", "'' cannot be changed", "gamma"),
    ],
)
def test_mistakes_in_the_line_are_named(text: str, message: str, hint: str):
    with pytest.raises(SettingsError) as refused:
        parse_change(text)
    assert message in refused.value.message and hint in refused.value.hint


# ---------------------------------------------------------------- the command


@pytest.fixture
def planned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = SimpleNamespace(build=lambda name: folder.parent.with_name(name))
    monkeypatch.setattr("dspark.cli.plan.workspace_of", lambda context: workspace)
    monkeypatch.setattr(
        "dspark.workspace.run.resolve_request",
        lambda workspace, request: SimpleNamespace(chosen=SimpleNamespace(name=request.build)),
    )


def test_the_answer_is_a_table_with_what_it_rests_on(planned: None, capsys: pytest.CaptureFixture[str]):
    assert run_command(["plan", "--build", "mine", "--what-if", f"profile={FASTER},gamma=2"]) == 0
    out = capsys.readouterr().out
    assert "gamma 3 on cpu-reference now, gamma 2 on gpu-elsewhere instead" in out
    assert [line.split()[:2] for line in out.splitlines()[2:4]] == [["1", "none"], ["1", "fixed"]]
    assert "+100.0%" in out.splitlines()[2]
    assert "rests on  step times of gpu-elsewhere" in out
    assert run_command(["plan", "--build", "mine", "--what-if", "gamma=1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert WhatIf.model_validate(document).changed.gamma == 1


def test_the_command_refuses_in_two_lines(planned: None, capsys: pytest.CaptureFixture[str]):
    assert run_command(["plan", "--build", "mine", "--what-if", "gamma=9"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 2
    assert run_command(["plan", "--build", "other", "--what-if", "gamma=1"]) == 3
    assert "build 'other' has no package to answer from" in capsys.readouterr().err
    assert run_command(["plan", "--build", "mine", "--what-if", "gamma=1", "--estimate"]) == 2
