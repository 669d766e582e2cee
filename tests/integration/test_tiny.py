"""The real ten stages on a tiny random target: from prompts to a verified package in the registry."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "engines"))  # protocol_servers.py

from protocol_servers import Engine, PlainSGLangDouble, SGLangDouble, SGLangProfilingDouble, VLLMDouble, serving

from dspark.io.digest import digest_tree

if TYPE_CHECKING:
    from conftest import Finished, Sandbox

pytestmark = pytest.mark.slow
PACKAGE = "builds/tiny/package"


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


def test_a_second_run_does_nothing(tiny: tuple[Sandbox, Finished]) -> None:
    sandbox, done = tiny
    second = sandbox.dspark("run", "--target", "tiny", "--json")
    assert second.code == 0, second.err
    assert [stage["status"] for stage in second.json["stages"]] == ["up to date"] * 10
    assert second.json["result"] == done.json["result"]
    assert "publish" not in second.err


# Stages in which the run is killed: a file that says that something was saved, on which the blow falls, and how much
# that is at least. `features` and `package` last a fifth of a second: there it falls as they begin, and may find them
# done.
KILLS: dict[str, tuple[str | None, int]] = {
    "responses": (".dspark/store/responses/*/*.jsonl", 1),
    "features": (None, 0),
    "train": (".dspark/work/train/*/**/step-000010/state.json", 10),
    "package": (None, 0),
}


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


def served_engine(root: Path) -> Engine:
    """The build's target and the drafter that it exported, as a server would load them."""
    from dspark.drafters.checkpoint import read_checkpoint
    from dspark.targets.loading import load_target
    from dspark.targets.record import read_record

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
    ):
        (sandbox.root / "serving_profiles/far.yaml").write_text(
            f"engine: sglang\naccess: url\nurl: {url}\nplain_url: {plain_url}\nprofile_url: {profile_url}\n"
            "dtype: float32\nrequests: [1, 2]\ncontexts: [8, 20]\nrepeats: 6\ncertify_concurrency: [1, 2]\n"
            "hardware: {accelerator: NVIDIA H100}\n"
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
    gone = sandbox.dspark("run", "--target", "tiny", "--no-publish")
    assert gone.code in (3, 8) and "did not answer /server_info" in gone.err, gone.err
