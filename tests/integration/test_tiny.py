"""The real ten stages on a tiny random target: from prompts to a verified package in the registry."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "engines"))  # protocol_servers.py

from protocol_servers import (
    Engine,
    PlainSGLangDouble,
    SGLangDouble,
    SGLangProfilingDouble,
    SGLangRecordingDouble,
    VLLMDouble,
    serving,
)

from dspark.config.gates import read_gates
from dspark.config.resolve import resolve
from dspark.corpus.prompts import read_prompts
from dspark.decoding.drafting import TorchProposer
from dspark.decoding.loop import decode
from dspark.drafters.checkpoint import read_checkpoint
from dspark.io.digest import digest_tree
from dspark.registry.gates import judge
from dspark.targets.loading import load_target
from dspark.targets.record import read_record
from dspark.workspace.rivals import champion, rival_drafter, rival_mistake

if TYPE_CHECKING:
    from sandbox import Finished, Sandbox

pytestmark = pytest.mark.long
PACKAGE = "builds/tiny/package"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples/onnxruntime/decode.py"
EXAMPLE_PROMPTS = EXAMPLE.parents[1] / "retrain/sql.jsonl"
SUITES = Path(__file__).resolve().parents[1] / "data/suites"


@pytest.fixture(scope="module")
def tiny(new_sandbox: Sandbox) -> tuple[Sandbox, Finished]:
    """A workspace in which `dspark run --target tiny` was called once, and how that ended."""
    done = new_sandbox.dspark("run", "--target", "tiny", "--json", timeout=600)
    assert done.code == 0, done.err
    return new_sandbox, done


def test_every_stage_runs_and_the_package_is_registered(tiny: tuple[Sandbox, Finished]) -> None:
    sandbox, done = tiny
    report = done.json
    assert [stage["status"] for stage in report["stages"]] == ["ran"] * 10
    result = report["result"]
    assert (result["model_name"], result["version"], result["package"]) == ("dspark-tiny", "1", PACKAGE)
    receipt = json.loads((sandbox.root / ".dspark/receipts/tiny.json").read_text())
    assert receipt["package_digest"] == result["package_digest"]
    assert result["measured"]["lossless"].startswith("pass")
    assert 1 <= result["measured"]["tau at temperature 0, mean"]["value"] <= 5  # gamma 4 and the bonus token


def test_the_package_is_verified_from_outside_the_workspace(tiny: tuple[Sandbox, Finished], tmp_path: Path) -> None:
    sandbox, done = tiny
    copy = tmp_path / "package"
    shutil.copytree(sandbox.root / PACKAGE, copy)
    digest = done.json["result"]["package_digest"]
    verified = sandbox.dspark("package", "verify", str(copy), "--digest", digest, "--json", cwd=tmp_path)
    assert verified.code == 0, verified.err
    assert verified.json["package_digest"] == digest
    fresh = sandbox.dspark("package", "verify", str(copy), "--against", "reference-smoke")
    assert fresh.code == 0 and "certified for reference-smoke on this machine until 20" in fresh.out, fresh.err
    other = sandbox.root / "serving_profiles/reference-smoke.yaml"
    moved = tmp_path / "reference-smoke.yaml"
    moved.write_text(other.read_text().replace("dtype: float32", "dtype: float16"))
    stale = sandbox.dspark("package", "verify", str(copy), "--against", str(moved), cwd=tmp_path)
    assert stale.code == 6 and "dtype: certified float32, here float16" in stale.err
    weights = copy / "drafter/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert sandbox.dspark("package", "verify", str(copy), cwd=tmp_path).code == 7


def test_a_finished_build_is_evaluated_on_a_suite_and_stays_as_it_is(tiny: tuple[Sandbox, Finished]) -> None:
    """All nine sets from small files in their released formats; a second call decodes nothing."""
    sandbox, _ = tiny
    build = sandbox.root / "builds/tiny"
    before = {path.name: digest_tree(path) for path in build.iterdir()}
    lock = (sandbox.root / "dvc.lock").read_bytes()
    asked = ["evaluate", "--build", "tiny", "--suite", "paper", "--data", str(SUITES), "--prompts", "2"]
    asked += ["--new-tokens", "12", "--temperature", "0", "--temperature", "1"]
    done = sandbox.dspark(*asked, "--json", timeout=300)
    assert done.code == 0, done.err
    report = done.json
    names = ["gsm8k", "math500", "aime25", "mbpp", "humaneval", "livecodebench", "mt-bench", "alpaca", "arena-hard"]
    assert sorted(report["origins"]) == sorted(names)
    assert report["origins"]["gsm8k"]["rejected"] == {"duplicate": 1} and report["origins"]["mbpp"]["outside"] == 2
    assert report["origins"]["mt-bench"]["turns_left_out"] == 2 and report["origins"]["humaneval"]["rows"] == 164
    for found in report["temperatures"].values():
        assert sorted(found["sets"]) == sorted(names) and sorted(found["groups"]) == ["chat", "code", "math"]
        assert 1 <= found["mean"]["tau"]["value"] <= 5 and found["mean"]["tau"]["n"] == 18
    out = build / "suites/paper"
    assert {path.name for path in out.iterdir()} == {
        "inputs.json", "suite.json", "per_position.csv", "threshold_sweep.csv", "records", "plots"}  # fmt: skip
    assert (out / "plots/acceptance.svg").is_file()
    text = sandbox.dspark(*asked, timeout=300)
    assert text.code == 0 and "suite paper, temperature 1, gamma 4" in text.out, text.err
    assert "mean of all" in text.out and "results  builds/tiny/suites/paper" in text.out
    assert "mt-bench: 2 later turns of its conversations are not asked" in text.out
    assert "at temperature" not in text.err, "nothing was decoded again"
    shutil.rmtree(out.parent)
    assert {path.name: digest_tree(path) for path in build.iterdir()} == before
    assert (sandbox.root / "dvc.lock").read_bytes() == lock
    assert sandbox.dspark("plots", "tiny", "--json").json["figures"].keys() >= {"acceptance", "pareto", "budget"}


def test_a_second_run_does_nothing(tiny: tuple[Sandbox, Finished]) -> None:
    sandbox, done = tiny
    second = sandbox.dspark("run", "--target", "tiny", "--json")
    assert second.code == 0, second.err
    assert [stage["status"] for stage in second.json["stages"]] == ["up to date"] * 10
    assert second.json["result"] == done.json["result"]
    assert "publish" not in second.err


def test_a_finished_package_is_judged_and_can_be_measured_against(tiny: tuple[Sandbox, Finished]) -> None:
    """The tiny build shows that everything works, not that it pays: form is open, the rest is judged."""
    sandbox, done = tiny
    workspace, digest = sandbox.workspace, done.json["result"]["package_digest"]
    profile = resolve(sandbox.root, build="tiny").chosen.profiles[0]
    report = judge(sandbox.root / PACKAGE, read_gates(sandbox.root), champion=None, profiles=[profile])
    rows = {row.gate: row for row in report.rows}
    assert (report.package_digest, rows["package"].verdict, rows["lossless"].verdict) == (digest, "pass", "pass")
    assert rows["tau math (new), temperature 0"].champion == 1.0
    assert rows["calibration, temperature 1"].candidate is not None
    assert {"certificate, reference-smoke", "agreement, reference-smoke"} <= rows.keys()

    shutil.copytree(sandbox.root / PACKAGE, workspace.package(digest))
    record = read_record(sandbox.root / "targets/tiny.json")
    assert rival_mistake(workspace, digest, record) is None
    target = load_target(record, sandbox.root, dtype="float32")
    rival = rival_drafter(workspace, digest, record)
    exported = read_checkpoint(
        sandbox.root / "builds/tiny/export/drafter", target.embedding, target.head, record=record
    )
    mine, theirs = rival.load(target).state_dict(), exported.float().state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert (rival.build, rival.training_domains, rival.gamma) == ("tiny", ("math", "code", "chat"), 4)
    turns = champion(workspace, digest, record, profile)
    assert turns.load(target).gamma == 4 and turns.scheduler is not None and turns.scheduler.gamma == 4


def test_a_trained_build_is_asked_a_live_load(tiny: tuple[Sandbox, Finished], tmp_path: Path) -> None:
    """The build is its own rival. Nothing is said of times: what is said and verified follows from the load."""
    sandbox, _ = tiny
    load = tmp_path / "load.yaml"
    load.write_text("requests: 8\npeak: 3\nnew_tokens: 6\nrounds: 2\nrequests_per_second: [20, 60]\nintervals: 4\n")
    words = ["live", "--target", "tiny", "--load", str(load), "--out", str(tmp_path / "out")]
    own = sandbox.dspark(*words, "--rival", "tiny", "--json")
    assert own.code == 0, own.err
    report = own.json
    arms = report["arms"]
    policies = ["threshold(0.5)", "scheduled", "scheduled-delayed"]
    assert arms.keys() == {"none", report["best_fixed"], "tiny", *policies}
    assert {arms[name]["same_text"] for name in arms if name != "none"} == {1.0}
    verified = {name: arm["verified_tokens_per_second"]["value"] for name, arm in arms.items()}
    assert verified["none"] == 0 < verified["tiny"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"live.json", "timeline.csv", "summary.csv"}
    missing = sandbox.dspark(*words, "--rival", "nobody")
    assert missing.code == 3 and "build 'nobody' has no trained drafter" in missing.err
    load.write_text("policies: [schedule]\n")
    unknown = sandbox.dspark(*words)
    assert unknown.code == 2 and "policy 'schedule' does not exist" in unknown.err


# Runs a script where what it must not need cannot be imported.
WITHOUT = """
import importlib.abc, runpy, sys

BARRED = ("torch", "transformers", "dspark")

class Bar(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BARRED:
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Bar())
for name in BARRED:
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    sys.exit(f"{name} can be imported")
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("loaded", sorted(name for name in sys.modules if name.partition(".")[0] in BARRED))
"""


def test_the_package_decodes_without_torch(tiny: tuple[Sandbox, Finished], tmp_path: Path) -> None:
    """The example's tokens, steps and tau are those of the reference loop with the trained drafter in torch."""
    sandbox, _ = tiny
    made = sandbox.dspark("targets", "export", "tiny", "--out", str(tmp_path / "target"), "--json")
    assert made.code == 0, made.err
    assert made.json["compared"]["verdict"] == "equal" and made.json["compared"]["prompts"] == 9

    record = read_record(sandbox.root / "targets/tiny.json")
    target = load_target(record, sandbox.root, dtype="float32")
    folder = sandbox.root / "builds/tiny/train/drafter"
    drafter = read_checkpoint(folder, target.embedding, target.head, record=record).float()
    prompts = read_prompts(sandbox.root / "corpora/tiny/prompts/eval.jsonl")
    chosen = [row for row in prompts if len(row.messages) == 1][:4]
    expected = decode(target, TorchProposer(drafter), [row.token_ids for row in chosen], max_new_tokens=40)

    def example(*arguments: str) -> str:
        command = [sys.executable, "-c", WITHOUT, str(EXAMPLE)]
        drafter_folder = sandbox.root / PACKAGE / "engines/onnxruntime"
        folders = ["--drafter", str(drafter_folder), "--target", str(tmp_path / "target")]
        options = ["--new-tokens", "40", "--threads", "1", "--plain", *arguments]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            [*command, *folders, *options], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "both texts are equal" in done.stdout and done.stdout.endswith("loaded []\n")
        return done.stdout

    accepted = 0
    for row, one in zip(chosen, expected, strict=True):
        out = example("--ids", ",".join(map(str, row.token_ids)))
        steps, tokens = len(one.cycles), one.token_ids
        assert f"tokens {' '.join(map(str, tokens))}\n" in out
        tau = one.cycles.committed.sum() / steps
        assert f"with drafts: {len(tokens)} tokens, {steps} steps, tau {tau:.3f}, " in out
        assert f"plain: {len(tokens)} tokens, {len(tokens) - 1} steps, tau 1.000, " in out
        accepted += int(one.cycles.accepted.sum())
    assert accepted > 0  # or the comparison would have seen no draft survive
    text = example("--prompt", chosen[0].messages[0]["content"])
    assert f"tokens {' '.join(map(str, expected[0].token_ids))}\n" in text


def test_a_new_domain_is_learnt_from_the_champion_and_nothing_old_is_made_again(
    tiny: tuple[Sandbox, Finished], tmp_path: Path
) -> None:
    """In a copy of the workspace. The exports are left out: they cost most and know nothing of where weights began."""
    before, done = tiny
    shutil.copytree(before.root, tmp_path / "workspace", symlinks=True)
    sandbox = type(before)(tmp_path / "workspace")
    champion = shutil.copytree(sandbox.root / PACKAGE, tmp_path / "champion")
    manifest = json.loads((sandbox.root / "corpora/tiny/features/manifest.json").read_text())
    old = {split: [entry["key"] for entry in entries] for split, entries in manifest["splits"].items()}
    stored = {
        path: (path.stat().st_mtime_ns, path.read_bytes())
        for room in ("responses", "features")
        for path in (sandbox.root / ".dspark/store" / room).rglob("*")
        if path.is_file()
    }
    declared = digest_tree(sandbox.root / "pipeline/builds")
    few = tmp_path / "few.jsonl"
    few.write_text("".join(EXAMPLE_PROMPTS.read_text().splitlines(keepends=True)[:48]))

    # The same evaluation as the champion's, so that only the weights differ.
    flags = [f"export.{name}=false" for name in ("onnx", "gguf", "tensorrt")]
    settings = [word for flag in (*flags, "training.steps=12") for word in ("--set", flag)]
    asked = ["retrain", "--target", "tiny", "--domain", "sql", "--prompts", str(few), "--from", str(champion)]
    made = sandbox.dspark(*asked, "--no-publish", "--json", *settings, timeout=300)
    assert made.code == 0, made.err

    digest = done.json["result"]["package_digest"]
    statuses = {stage["name"].partition("@")[0]: stage["status"] for stage in made.json["stages"]}
    assert statuses.pop("profile") == "up to date" and set(statuses.values()) == {"ran"}
    # Nothing of the store was written again; what is new there is the new domain's.
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in stored} == stored
    added = [path for path in (sandbox.root / ".dspark/store/responses").rglob("*.jsonl") if path not in stored]
    rows = [json.loads(line) for path in added for line in path.read_text().splitlines()]
    assert rows and {row["domain"] for row in rows} == {"sql"}
    manifest = json.loads((sandbox.root / "corpora/tiny/features/manifest.json").read_text())
    for split, entries in manifest["splits"].items():
        keys = [entry["key"] for entry in entries]
        assert [key for key in keys if key in old[split]] == old[split] and len(keys) > len(old[split])

    package = json.loads((sandbox.root / PACKAGE / "manifest.json").read_text())
    assert package["inputs"]["corpus"]["domains"] == ["math", "code", "chat", "sql"]
    assert package["inputs"]["recipe"]["training"]["initial"] == {"package": digest}
    metrics = json.loads((sandbox.root / "builds/tiny/train/metrics.json").read_text())
    assert metrics["drawn_sequences"]["sql"] == 12 * 8 / 2 == sum(metrics["drawn_sequences"].values()) / 2
    assert metrics["initial"]["step"] == 0
    assert digest_tree(sandbox.root / "pipeline/builds") == declared

    # Every domain, old and new, stands against the champion.
    assert made.json["champion"] == made.json["gates"]["champion"] == digest
    gates = {row["gate"]: row for row in made.json["gates"]["rows"]}
    for domain in ("math", "code", "chat", "sql (new)"):
        row = gates[f"tau {domain}, temperature 0"]
        assert {"candidate", "champion", "difference"} <= row.keys()
    again = sandbox.dspark(*asked, "--no-publish", "--json", *settings)
    assert again.code == 0 and {stage["status"] for stage in again.json["stages"]} == {"up to date"}, again.err


def test_a_drafter_without_heads_goes_through_every_stage(tiny: tuple[Sandbox, Finished], tmp_path: Path) -> None:
    """Recipe dflash in a copy of the workspace: no confidences anywhere, and whole blocks wherever something serves."""
    before, _ = tiny
    shutil.copytree(before.root, tmp_path / "workspace", symlinks=True)
    sandbox = type(before)(tmp_path / "workspace")
    sandbox.edit("pipeline/builds/tiny.yaml", lambda text: text + "recipe: dflash\n")
    done = sandbox.dspark("run", "--target", "tiny", "--no-publish", "--json", timeout=600)
    assert done.code == 0, done.err
    statuses = {stage["name"].partition("@")[0]: stage["status"] for stage in done.json["stages"]}
    corpus = [statuses.pop(stage) for stage in ("prompts", "responses", "features")]
    assert set(corpus) == {"up to date"} and set(statuses.values()) == {"ran"}  # recipes share corpora and features

    package = sandbox.root / PACKAGE
    drafter = json.loads((package / "manifest.json").read_text())["drafter"]
    assert drafter["markov"] == {"type": "none", "rank": 0} and drafter["confidence"]["enabled"] is False
    calibration = json.loads((package / "scheduler/calibration.json").read_text())
    assert (calibration["results"], calibration["absent"]) == ([], "the drafter has no confidence head")
    assert json.loads((package / "scheduler/scheduler.json").read_text())["policy"] == "fixed(4)"
    metrics = json.loads((package / "evidence/evaluate/metrics.json").read_text())
    assert set(metrics["throughput"]["arms"]) == {"none", "torch fixed", "onnxruntime fixed"}
    assert metrics["temperatures"]["0"]["absent"]["confidence"] == "the drafter has no confidence head"
    lossless = json.loads((package / "evidence/evaluate/lossless.json").read_text())
    assert lossless["result"] == "pass" and lossless["greedy"]["drafts"] > 0
    parity = json.loads((package / "evidence/parity.json").read_text())
    assert {name: one["verdict"] for name, one in parity["dialects"].items()} == dict.fromkeys(
        ("union", "onnx", "onnx_cached", *(["gguf"] if "gguf" in parity["dialects"] else [])), "equal"
    )
    certificate = json.loads((package / "certificate.json").read_text())
    assert {point["policy"] for entry in certificate["entries"] for point in entry["load"]} == {"none", "fixed"}
    written = {engine["engine"] for engine in certificate["engines"] if engine["status"] == "written"}
    assert {"sglang", "vllm", "onnxruntime"} <= written and "tensorrt_llm" not in written
    assert "A DFlash drafter" in (package / "README.md").read_text()


def test_a_chain_goes_through_every_stage(tiny: tuple[Sandbox, Finished], tmp_path: Path) -> None:
    """Recipe eagle3 in a copy of the workspace: another network, the same corpus, loop, evaluation and package."""
    before, _ = tiny
    shutil.copytree(before.root, tmp_path / "workspace", symlinks=True)
    sandbox = type(before)(tmp_path / "workspace")
    sandbox.edit("pipeline/builds/tiny.yaml", lambda text: text + "recipe: eagle3\n")
    done = sandbox.dspark("run", "--target", "tiny", "--no-publish", "--json", timeout=600)
    assert done.code == 0, done.err
    statuses = {stage["name"].partition("@")[0]: stage["status"] for stage in done.json["stages"]}
    corpus = [statuses.pop(stage) for stage in ("prompts", "responses", "features")]
    assert set(corpus) == {"up to date"} and set(statuses.values()) == {"ran"}

    package = sandbox.root / PACKAGE
    drafter = json.loads((package / "manifest.json").read_text())["drafter"]
    assert (drafter["kind"], drafter["confidence"]["enabled"]) == ("eagle3", False)
    metrics = json.loads((package / "evidence/evaluate/metrics.json").read_text())
    assert set(metrics["throughput"]["arms"]) == {"none", "torch fixed"}
    lossless = json.loads((package / "evidence/evaluate/lossless.json").read_text())
    assert lossless["result"] == "pass" and lossless["greedy"]["drafts"] > 0
    parity = json.loads((package / "evidence/parity.json").read_text())
    assert {name: one["verdict"] for name, one in parity["dialects"].items()} == {"union": "equal"}
    certificate = json.loads((package / "certificate.json").read_text())
    written = {engine["engine"] for engine in certificate["engines"] if engine["status"] == "written"}
    assert written == {"vllm"} and all(
        engine["reason"] for engine in certificate["engines"] if engine["engine"] != "vllm"
    )
    assert "An EAGLE-3 drafter" in (package / "README.md").read_text()


# Stages in which the run is killed: a file that says that something was saved, on which the blow falls, and how much
# that is at least. `features` and `package` last a fifth of a second: there it falls as they begin, and may find them
# done.
KILLS: dict[str, tuple[str | None, int]] = {
    "responses": (".dspark/store/responses/*/*.jsonl", 1),
    "features": (None, 0),
    "train": (".dspark/work/train/*/**/step-000010/state.json", 10),
    "package": (None, 0),
}


@pytest.mark.faults
def test_killed_in_four_stages_it_is_made_again_from_nothing_and_the_same(tiny: tuple[Sandbox, Finished]) -> None:
    """kill -9 to every process of the run; the next run goes on inside the stage, and no finished stage runs again.

    Same inputs, seed and machine: the exported files, so the model digest, are those of the run that nobody killed.
    """
    sandbox, _ = tiny
    before = {name: digest_tree(sandbox.root / "builds/tiny/export" / name) for name in ("drafter", "onnxruntime")}
    for path in (".dvc/cache", ".dvc/tmp", "builds", "corpora", ".dspark/store/responses", ".dspark/store/features"):
        shutil.rmtree(sandbox.root / path)
    (sandbox.root / "dvc.lock").unlink()

    def events(number: int) -> list[dict[str, Any]]:
        path = sandbox.root / f"events-{number}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def has_come(number: int, stage: str, saved: str | None) -> bool:
        if saved is not None:
            return any(sandbox.root.glob(saved))
        return any(e.get("stage") == f"{stage}@tiny" for e in events(number))

    def stages(number: int, event: str) -> set[str]:
        found = [e for e in events(number) if e.get("event") == event and e.get("status", "ran") == "ran"]
        return {e["stage"] for e in found}

    for number, (stage, (saved, _)) in enumerate(KILLS.items()):
        child = sandbox.start("run", "--target", "tiny", "--no-publish", "--events", f"events-{number}.jsonl")
        sandbox.wait_for(lambda n=number, s=stage, f=saved: has_come(n, s, f), child, 120)  # type: ignore[misc]
        sandbox.kill()
        child.communicate()
    last = len(KILLS)
    final = sandbox.dspark("run", "--target", "tiny", "--json", "--events", f"events-{last}.jsonl", timeout=300)
    assert final.code == 0, final.err
    for number, (stage, (_, amount)) in enumerate(KILLS.items()):
        ran = stages(number, "stage_ended")
        assert not ran & set().union(*(stages(later, "stage_started") for later in range(number + 1, last + 1)))
        starts = [e for e in events(number + 1) if e.get("stage") == f"{stage}@tiny" and e.get("event") == "start"]
        assert all(start["done"] >= amount for start in starts[:1])
        assert starts or stage in ("features", "package")
    assert {name: digest_tree(sandbox.root / "builds/tiny/export" / name) for name in before} == before


def calibrated_by_a_server(sandbox: Sandbox) -> None:
    """The stage alone: its greedy records are the server's, which drafts what the build's drafter does."""
    records = ("--set", "calibration.records.kind=server", "--set", "calibration.records.profile=far")
    planned = sandbox.dspark("plan", "--target", "tiny", "--json", *records)
    assert planned.code == 0, planned.err
    changed = {step["name"]: step["action"] for step in planned.json["steps"]}
    assert changed["calibrate@tiny"] == "will run" and changed["export@tiny"] == "up to date"
    calibration = sandbox.root / "builds/tiny/calibrate/calibration.json"
    before = json.loads(calibration.read_text())["results"]
    stage = [sys.executable, "-P", "stages/calibrate_confidence.py", "tiny"]
    subprocess.run(stage, cwd=sandbox.root, env=sandbox.environment(), check=True, timeout=120)
    after = json.loads(calibration.read_text())["results"]
    assert [result["source"] for result in after] == ["SGLang 0.5.23, mode cap-accept", "the decoding loop of dspark"]
    assert after[0]["key"] == before[0]["key"] == {**after[1]["key"], "temperature": 0.0, "label": "greedy_match"}
    assert after[1] == before[1]


def served_engine(root: Path) -> Engine:
    """The build's target and the drafter that it exported, as a server would load them."""
    record = read_record(root / "targets/tiny.json")
    target = load_target(record, root)
    drafter = read_checkpoint(root / "builds/tiny/export/drafter", target.embedding, target.head, record=record)
    return Engine(target, drafter.float(), target.eos_token_ids)


def test_a_build_is_measured_through_servers_that_run_elsewhere(tiny: tuple[Sandbox, Finished]) -> None:
    """SGLang's protocol from profiling to the certificate; then the package and the drafter against such servers."""
    sandbox, _ = tiny
    engine = served_engine(sandbox.root)
    milliseconds = lambda requests, tokens: 10.0 + 0.5 * requests + tokens  # noqa: E731
    with (
        serving(SGLangDouble(engine)) as url,
        serving(PlainSGLangDouble(engine)) as plain_url,
        serving(SGLangProfilingDouble(engine, milliseconds)) as profile_url,
        serving(VLLMDouble(engine)) as vllm_url,
        serving(SGLangRecordingDouble(engine)) as records_url,
    ):
        (sandbox.root / "serving_profiles/far.yaml").write_text(
            f"engine: sglang\naccess: url\nurl: {url}\nplain_url: {plain_url}\nprofile_url: {profile_url}\n"
            f"records_url: {records_url}\nhardware: {{accelerator: NVIDIA H100}}\ndtype: float32\nrequests: [1, 2]\n"
            "contexts: [8, 20]\nrepeats: 6\ncertify_concurrency: [1, 2]\n"
        )
        build = sandbox.root / "pipeline/builds/tiny.yaml"
        build.write_text(build.read_text().replace("[reference-smoke]", "[reference-smoke, far]"))
        done = sandbox.dspark("run", "--target", "tiny", "--no-publish", "--json", timeout=300)
        assert done.code == 0, done.err
        ran = {stage["name"] for stage in done.json["stages"] if stage["status"] == "ran"}
        assert {name.partition("@")[0] for name in ran} == {"profile", "certify", "package"}
        certificate = json.loads((sandbox.root / PACKAGE / "certificate.json").read_text())
        entry = next(one for one in certificate["entries"] if one["profile"] == "far")
        assert (entry["status"], entry["offline_vs_engine"]["result"]) == ("measured", "agrees")
        assert entry["offline_vs_engine"]["equal_counters"] == entry["workload"]["prompts"]
        table = json.loads((sandbox.root / PACKAGE / "engines/sglang/sps.json").read_text())
        assert table["sample_batch_tokens"] == [1, 2, 3, 5, 6, 10]
        fresh = sandbox.dspark("package", "verify", PACKAGE, "--against", url)
        assert fresh.code == 0 and f"certified for far on {url} until 20" in fresh.out, fresh.err
        stale = sandbox.dspark("package", "verify", PACKAGE, "--against", vllm_url)
        assert stale.code == 6 and "no measurement in vllm" in stale.err
        for address in (url, vllm_url):
            asked = ["--drafter", "builds/tiny/export/drafter", "--url", address, "--target", "tiny"]
            few = ["--domain", "math", "--prompts", "2", "--new-tokens", "24"]
            certified = sandbox.dspark("certify", *asked, *few, "--json")
            assert certified.code == 0, certified.err
            assert certified.json["verdict"] == "agrees"
        calibrated_by_a_server(sandbox)
    gone = sandbox.dspark("run", "--target", "tiny", "--no-publish")
    assert gone.code == 8 and "did not answer /server_info" in gone.err, gone.err
    planned = sandbox.dspark("plan", "--target", "tiny")
    assert (planned.code, planned.err) == (gone.code, gone.err)
