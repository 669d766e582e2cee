"""Real DVC over stages that cost nothing: what runs, what does not, and in one word why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dspark.config.resolve import resolve
from dspark.config.stages import STAGES
from dspark.profiling import fingerprint
from dspark.workspace.graph import instances
from dspark.workspace.listener import Silent
from dspark.workspace.run import Request, run

if TYPE_CHECKING:
    from conftest import FakeSandbox, Sandbox

CHECKOUT = Path(__file__).resolve().parents[2]
EVERYTHING = sorted(stage.name for stage in STAGES)
MEASURING = ["certify", "evaluate", "package", "profile"]


def age(path: Path) -> None:
    """As if the file had been written when the clock stood a year before."""
    stamp = path.stat().st_mtime_ns - 365 * 86_400 * 10**9
    os.utime(path, ns=(stamp, stamp))


def downstream(*stages: str) -> list[str]:
    """Stages that read, directly or not, what `stages` write, themselves included; by the table of the architecture."""
    reads = {
        "prompts": (),
        "responses": ("prompts",),
        "features": ("responses",),
        "train": ("features",),
        "calibrate": ("train", "prompts"),
        "profile": (),
        "evaluate": ("train", "calibrate", "profile", "prompts", "export"),
        "export": ("train", "features"),
        "certify": ("export", "calibrate", "profile", "prompts", "evaluate"),
        "package": (
            "prompts",
            "responses",
            "features",
            "train",
            "calibrate",
            "evaluate",
            "export",
            "certify",
            "profile",
        ),
    }
    reached = set(stages)
    while True:
        more = {stage for stage, read in reads.items() if reached & set(read)} - reached
        if not more:
            return sorted(reached)
        reached |= more


def test_a_run_makes_everything_once_and_a_second_run_nothing(fake: FakeSandbox) -> None:
    """Nor where the workspace was moved and all files became older: contents decide, neither places nor times."""
    first = fake.run()
    assert first.code == 0, first.err
    assert sorted(name.partition("@")[0] for name in fake.calls()) == EVERYTHING
    assert first.json["result"]["package"] == "builds/fake/package"
    assert first.json["result"]["measured"]["tau at temperature 0, mean"]["value"] == 1.5
    fake = type(fake)(fake.root.rename(fake.root.with_name("moved to 別の場所")))
    for path in fake.root.rglob("*"):
        if path.is_file() and ".dspark/store" not in path.as_posix():
            age(path)
    second = fake.run()
    assert [stage["status"] for stage in second.json["stages"]] == ["up to date"] * len(EVERYTHING)
    assert fake.calls() == []
    assert second.json["result"] == first.json["result"]


def test_another_fingerprint_reruns_profile_evaluate_certify_and_package(
    made: FakeSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = fingerprint.fingerprint
    elsewhere = {"hardware": {"cpu": "another machine"}}
    monkeypatch.setattr(fingerprint, "fingerprint", lambda profile: here(profile) | elsewhere)
    report = run(made.workspace, Request(target="fake", publish=False), Silent())
    by_status: dict[str, list[str]] = {}
    for outcome in report.stages:
        by_status.setdefault(outcome.status, []).append(outcome.name.partition("@")[0])
    assert sorted(by_status["ran"]) == MEASURING
    assert sorted(by_status["up to date"]) == sorted(set(EVERYTHING) - set(MEASURING))
    made.calls()
    monkeypatch.undo()

    # Back on the first machine its own timings are restored from DVC's run cache, not taken again.
    back = made.run()
    restored = [stage["name"].partition("@")[0] for stage in back.json["stages"] if stage["status"] == "restored"]
    assert (sorted(restored), made.calls()) == (MEASURING, [])


@pytest.mark.long
def test_a_changed_setting_reruns_exactly_what_reads_it(made: FakeSandbox) -> None:
    """One workspace, one change after another."""
    made.edit("params.yaml", lambda text: text.replace("steps: 100", "steps: 101"))
    assert made.ran() == downstream("train")

    made.edit("params.yaml", lambda text: text + "calibration:\n  bins: 10\n")
    assert made.ran() == downstream("calibrate")

    assert made.ran("--set", "responses.max_new_tokens=9") == downstream("responses")

    made.edit("params.yaml", lambda text: text + "responses:\n  max_new_tokens: 9\n")
    assert made.ran() == []  # the flag's value has become the workspace's: nothing is different

    made.edit("serving_profiles/cpu.yaml", lambda text: text + "repeats: 6\n")
    assert made.ran() == MEASURING


@pytest.mark.long
def test_changed_code_or_data_reruns_exactly_what_depends_on_it(made: FakeSandbox) -> None:
    for stage in ("export", "profile"):
        made.write_script(stage, "changed")
        age(next((made.root / "stages").glob(f"{stage}_*.py")))
        assert made.ran() == downstream(stage), stage

    made.edit("pipeline/domains/rows.jsonl", lambda text: text + text.replace("hello", "more"))
    age(made.root / "pipeline/domains/rows.jsonl")
    assert made.ran() == downstream("prompts")


@pytest.mark.long
def test_a_second_build_on_one_corpus_shares_its_stages(made: FakeSandbox) -> None:
    (made.root / "pipeline/builds/wide.yaml").write_text("target: fake\ncorpus: fake\ndrafter: {layers: 2}\n")
    done = made.dspark("run", "--build", "wide", "--no-publish", "--json")
    assert done.code == 0, done.err
    assert sorted(name.partition("@")[0] for name in made.calls()) == sorted(
        {*downstream("train"), "profile"} - {"prompts", "responses", "features"}
    )


@pytest.mark.long
def test_every_serving_profile_is_profiled_and_certified_and_the_first_is_evaluated(fake: FakeSandbox) -> None:
    (fake.root / "serving_profiles/gpu.yaml").write_text("engine: reference\naccess: none\nreason: no GPU here\n")
    fake.edit("params.yaml", lambda text: text.replace("[cpu]", "[cpu, gpu]"))
    assert fake.ran() == sorted([*EVERYTHING, "certify", "profile"])
    assert sorted(path.name for path in (fake.root / "builds/fake/certify").iterdir()) == ["cpu.json", "gpu.json"]
    fake.edit("serving_profiles/gpu.yaml", lambda text: text.replace("no GPU here", "still none"))
    assert fake.ran() == ["certify", "package", "profile"]


def test_a_failing_stage_is_named_with_its_reason_hint_and_log(made: FakeSandbox) -> None:
    change = ("--set", "training.steps=101")
    done = made.run(*change, FAKE_FAIL="calibrate")
    assert done.code == 4  # the stage's own category, data
    lines = done.err.splitlines()
    start = lines.index("Error: stage calibrate@fake: rows.jsonl:3: no messages")
    assert lines[start + 1] == "  mend the line"
    log = made.root / lines[start + 2].removeprefix("  log: ")
    assert "no messages" in log.read_text()
    assert done.json["exit_code"] == 4
    assert "Traceback" not in done.err
    status = made.dspark("status", "--json").json
    assert status["run"]["state"] == "failed"
    stages = {stage["name"]: stage["status"] for stage in status["stages"]}
    assert (stages["train@fake"], stages["calibrate@fake"]) == ("ran", "failed")
    assert stages["package@fake"] == "not reached"
    made.calls()
    assert "train" not in made.ran(*change)


def test_missing_feature_shards_are_made_again_before_they_are_read_and_not_sooner(made: FakeSandbox) -> None:
    """A workspace that pulled a build has none: nothing is extracted there for a package that is made."""
    store = made.root / ".dspark/store/features"
    for shard in store.iterdir():
        shard.unlink()
    done = made.run()
    assert done.code == 0, done.err
    assert made.calls() == [] and "nothing that reads them is to be made" in done.err
    assert [stage["status"] for stage in done.json["stages"]] == ["up to date"] * len(EVERYTHING)
    made.edit("params.yaml", lambda text: text.replace("steps: 100", "steps: 101"))
    done = made.run()
    assert done.code == 0, done.err
    assert made.calls()[:2] == ["features@fake", "train@fake"]
    assert "1 feature shards are missing or damaged: making them again" in done.err
    assert len(list(store.iterdir())) == 1


@pytest.mark.long
def test_a_shard_whose_bytes_changed_is_made_again_when_it_is_read(made: FakeSandbox) -> None:
    """Only the digest tells: the train stage notices, the shard is made again, the stage runs once more."""
    shard = next((made.root / ".dspark/store/features").iterdir())
    shard.write_text("FEATURES")
    made.edit("params.yaml", lambda text: text.replace("steps: 100", "steps: 101"))
    done = made.run()
    assert done.code == 0, done.err
    assert made.calls()[:3] == ["train@fake", "features@fake", "train@fake"]
    assert shard.read_text() == "features"


def test_a_run_with_nothing_to_do_loads_nothing_heavy(made: FakeSandbox) -> None:
    publish_receipt(made)
    code = (
        "import sys\n"
        "from dspark.cli.boundary import run_command\n"
        "code = run_command(['run', '--target', 'fake', '--quiet'])\n"
        "print(code, sorted({'mlflow', 'torch', 'transformers', 'dvc', 'onnxruntime'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=made.root, env=made.environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr
    assert "model    dspark-fake version 1" in done.stdout
    assert made.calls() == []


def publish_receipt(fake: FakeSandbox) -> None:
    """As if the package had been registered."""
    from dspark.package.verify import read_manifest
    from dspark.registry.receipts import Receipt, default_uri, sqlite_file, write_receipt

    digests = read_manifest(fake.root / "builds/fake/package").digests
    uri = default_uri(fake.root)
    database = sqlite_file(uri)
    assert database is not None
    database.parent.mkdir()
    database.touch()
    receipt = Receipt(
        build="fake",
        package_digest=digests.package_digest,
        evidence_digest=digests.evidence_digest,
        tracking_uri=uri,
        run_id="1",
        model_name="dspark-fake",
        version="1",
    )
    write_receipt(fake.root / ".dspark/receipts", receipt)


@pytest.mark.long
def test_plain_dvc_works_in_the_workspace_after_a_plan(fake: FakeSandbox) -> None:
    done = fake.dspark("plan", "--target", "fake", "--json")
    assert done.code == 0, done.err
    assert {step["name"].partition("@")[0] for step in done.json["steps"] if step["action"] == "will run"} == {
        *EVERYTHING
    }
    assert {step["reason"] for step in done.json["steps"] if "target@" not in step["name"]} == {"it has not run yet"}
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    subprocess.run(
        [sys.executable, "-m", "dvc", "repro", "package@fake"],
        cwd=fake.root,
        env=fake.environment(PATH=path, DVC_NO_ANALYTICS="1"),
        check=True,
        capture_output=True,
    )
    assert sorted(name.partition("@")[0] for name in fake.calls()) == EVERYTHING
    assert fake.ran() == []


def test_a_plan_says_what_would_run_and_why(made: FakeSandbox) -> None:
    made.edit("params.yaml", lambda text: text.replace("steps: 100", "steps: 101"))
    steps = {
        step["name"].partition("@")[0]: step for step in made.dspark("plan", "--target", "fake", "--json").json["steps"]
    }
    assert (steps["train"]["action"], steps["train"]["reason"]) == ("will run", "its settings or code changed")
    assert steps["calibrate"]["action"] == "may run"
    assert steps["calibrate"]["reason"] == "if train@fake comes out different"
    assert steps["evaluate"]["reason"] == "if train@fake, calibrate@fake, export@fake come out different"
    assert steps["features"]["action"] == steps["profile"]["action"] == "up to date"
    assert steps["target"]["action"] == "up to date"
    assert steps["train"]["last_seconds"] is not None
    text = made.dspark("plan", "--target", "fake").out
    assert "train@fake" in text and "will run" in text
    assert made.calls() == []


def test_dvc_yaml_says_what_the_table_of_stages_says(sandbox: Sandbox) -> None:
    """The two descriptions of the DAG, compared for every build of the checkout by DVC's own resolver."""
    from dspark.workspace.graph import write_dag

    names = [path.stem for path in (sandbox.root / "pipeline/builds").glob("*.yaml")]
    for name in names:
        write_dag(sandbox.workspace, resolve(sandbox.root, build=name))
        code = "import json; from dvc.repo import Repo; r = Repo('.'); r_ = {}\n" + (
            "for s in r.index.stages:\n"
            "    r_[s.addressing] = [s.cmd, sorted(map(str, s.deps)), sorted(map(str, s.outs))]\n"
            "print(json.dumps(r_))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=sandbox.root,
            env=sandbox.environment(DVC_NO_ANALYTICS="1", DVC_SITE_CACHE_DIR=str(sandbox.root / ".dspark/dvc")),
            check=True,
            capture_output=True,
            text=True,
        )
        resolved = json.loads(done.stdout)
        planned = instances(resolve(sandbox.root, build=name).chosen)
        assert len(planned) >= len(STAGES)
        for instance in planned:
            command, dependencies, outputs = resolved[instance.name]
            assert command == f"python -P stages/{instance.stage.script}.py '{instance.key}'"
            assert dependencies == sorted(instance.stage.dependencies(instance.key, instance.entry)), instance.name
            assert outputs == [instance.stage.output(instance.key, instance.entry)]


def test_the_workspace_of_the_checkout_has_every_script_and_no_other(sandbox: Sandbox) -> None:
    scripts = {path.stem for path in (CHECKOUT / "stages").glob("*.py")}
    assert scripts == {stage.script for stage in STAGES}


def test_an_unrelated_build_that_is_broken_does_not_stop_a_run(made: FakeSandbox) -> None:
    (made.root / "pipeline/builds/broken.yaml").write_text("target: nowhere\n")
    doctor = made.dspark("doctor", "--json")
    assert doctor.code == 3
    assert any(check["name"] == "build broken" and check["status"] == "error" for check in doctor.json["checks"])


def test_dvc_keeps_its_databases_inside_the_workspace_and_private(made: FakeSandbox) -> None:
    cache = made.root / ".dspark/dvc"
    assert (cache.stat().st_mode & 0o077, (cache / "repo").stat().st_mode & 0o077) == (0, 0)
    assert any(cache.rglob("cache.db"))
