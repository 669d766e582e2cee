"""Equal inputs give equal packages, and what does not fit together becomes none."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import fake_build
import pytest
from fake_build import card

from dspark.errors import DataError, DsparkError, IntegrityError, StageError
from dspark.io.digest import digest_tree
from dspark.io.jsonfile import write_json
from dspark.package.assemble import assemble
from dspark.package.sources import describe
from dspark.package.verify import verify
from dspark.report import render_card
from dspark.scheduling.config import read_scheduler


def test_two_builds_of_equal_files_are_byte_for_byte_the_same(tmp_path):
    trees = []
    for name in ("one", "two"):
        out = tmp_path / name / "package"
        manifest = assemble(fake_build.make(tmp_path / name), out, card=card)
        verify(out, digest=manifest.digests.self_digest)
        trees.append((digest_tree(out), manifest))
    assert trees[0] == trees[1]


def test_measurements_change_the_package_but_not_the_model(sources, tmp_path):
    before = assemble(sources, tmp_path / "a", card=card).digests
    path = sources.costs[fake_build.CPU]
    path.write_text(path.read_text().replace("60.0", "61.0"))
    after = assemble(sources, tmp_path / "b", card=card).digests
    assert after.model_digest == before.model_digest
    assert after.package_digest != before.package_digest


def test_evidence_alone_changes_neither(sources, tmp_path):
    before = assemble(sources, tmp_path / "a", card=card).digests
    dirty = sources.lineage.model_copy(update={"git_commit": "another"})
    after = assemble(replace(sources, lineage=dirty), tmp_path / "b", card=card).digests
    assert (after.model_digest, after.package_digest) == (before.model_digest, before.package_digest)
    assert after.evidence_digest != before.evidence_digest


def test_weights_change_everything(sources, tmp_path):
    before = assemble(sources, tmp_path / "a", card=card).digests
    data = sources.export / "onnxruntime" / "draft_block.onnx"
    data.write_bytes(data.read_bytes() + b"x")
    after = assemble(sources, tmp_path / "b", card=card).digests
    assert after.model_digest != before.model_digest and after.package_digest != before.package_digest


def test_no_local_path_of_the_maker_is_in_the_package(pristine):
    """The target was a local folder in somebody's home."""
    for path in pristine.rglob("*"):
        if path.is_file():
            assert b"secret" not in path.read_bytes() and b"/home/" not in path.read_bytes()


def test_the_manifest_says_what_the_package_was_made_from(pristine):
    manifest = json.loads((pristine / "manifest.json").read_bytes())
    corpus = manifest["inputs"]["corpus"]
    assert corpus["tokens"] == {"train": 80, "dev": 40} and corpus["prompts"]["eval"] == 3
    assert manifest["inputs"]["recipe"]["training"]["steps"] == 5
    assert manifest["inputs"]["target"]["public_id"] == "org/tiny-llama"
    # fc 8x16, two norms of 8, up_proj 16x8, W1 and W2 32x4 each, confidence 12 + 1
    assert manifest["drafter"]["parameters"] == 128 + 16 + 128 + 256 + 13


def test_the_manifest_of_an_imported_drafter_says_where_it_came_from_and_not_how_to_train(sources, pristine):
    training = sources.build.training.model_copy(update={"imported": "d" * 64})
    source = {"kind": "hub", "repo": "org/drafter", "revision": "abc"}
    write_json(
        sources.train / "metrics.json", {"imported": "d" * 64, "layout": "deepspec", "source": source, "parameters": 1}
    )
    imported = replace(sources, build=sources.build.model_copy(update={"training": training}))
    recipe = describe(imported, pristine, []).inputs.recipe
    assert recipe["training"] == {"imported": "d" * 64, "layout": "deepspec", "source": source}
    assert recipe["calibration"] == describe(sources, pristine, []).inputs.recipe["calibration"]


def test_a_new_package_replaces_the_old_one_and_leaves_nothing_beside_it(sources, tmp_path):
    out = tmp_path / "out" / "package"
    first = assemble(sources, out, card=card)
    (out / "stale.txt").write_text("x")
    assert assemble(sources, out, card=card) == first
    verify(out)
    assert [path.name for path in out.parent.iterdir()] == ["package"]


def test_an_interrupted_assembly_leaves_the_old_package_and_is_done_again(sources, tmp_path):
    out = tmp_path / "out" / "package"
    assemble(sources, out, card=card)
    before = digest_tree(out)

    def stopped(folder, description):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        assemble(sources, out, card=stopped)
    assert digest_tree(out) == before
    assemble(sources, out, card=card)
    assert digest_tree(out) == before
    assert [path.name for path in out.parent.iterdir()] == ["package"]


def test_unfinished_work_can_stand_elsewhere(sources, tmp_path):
    out = tmp_path / "out" / "package"
    assemble(sources, out, card=card, work=tmp_path / "work")
    verify(out)
    assert not (tmp_path / "work" / "package").exists()


@pytest.mark.parametrize(
    "path",
    [
        "export/drafter/config.json",
        "export/drafter/model.safetensors",
        "export/parity.json",
        "calibrate/calibration.json",
        "calibrate/reliability.csv",
        "train/curves.csv",
        "evaluate/metrics.json",
        "cost.json",
        "certify/cpu-reference.json",
        "corpora/demo/prompts/summary.json",
        "corpora/demo/responses/summary.json",
        "corpora/demo/features/manifest.json",
    ],
)
def test_a_missing_output_of_a_stage_is_named(sources, tmp_path, path):
    (tmp_path / "build" / path).unlink()
    with pytest.raises(DataError) as caught:
        assemble(sources, tmp_path / "package", card=card)
    assert path in caught.value.message and "dspark run" in caught.value.hint
    assert not (tmp_path / "package").exists()


def test_outputs_that_contradict_each_other_become_no_package(sources, tmp_path):
    path = sources.calibrate / "calibration.json"
    text = path.read_text()
    wrong = sources.export / "onnxruntime" / "draft_block.onnx.data"
    wrong.write_bytes(bytes(64))
    with pytest.raises(StageError, match=r"io\.json draft_block\.onnx\.data: "):
        assemble(sources, tmp_path / "package", card=card)
    assert not (tmp_path / "package").exists()
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("name", "keys", "value", "said"),
    [
        ("certify/cpu-reference.json", ("lossless", "drafts"), 0, "saw no draft"),
        ("calibrate/calibration.json", ("gamma",), 2, "gamma"),
        ("export/drafter/config.json", ("sample_from_anchor",), False, "sample_from_anchor"),
        ("export/drafter/config.json", ("block_size",), 4, "gamma"),
    ],
)
def test_a_stage_that_contradicts_itself_or_another_is_an_error_that_says_so(
    sources, tmp_path, name, keys, value, said
):
    path = tmp_path / "build" / name
    whole = part = json.loads(path.read_text())
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    path.write_text(json.dumps(whole))
    with pytest.raises(DsparkError, match=said) as caught:
        assemble(sources, tmp_path / "package", card=card)
    assert caught.value.exit_code in (4, 5) and caught.value.hint
    assert not (tmp_path / "package").exists()


def test_a_file_of_unknown_kind_is_refused_by_name(sources, tmp_path):
    (sources.evaluate / "records" / "cache.pkl").write_bytes(b"x")
    with pytest.raises(StageError, match=r"cache\.pkl"):
        assemble(sources, tmp_path / "package", card=card)


def test_engines_without_files_say_why(sources, tmp_path):
    """No ONNX export, and no profile that was measured: every engine verifies whole blocks."""
    shutil.rmtree(sources.export / "onnxruntime")
    out = tmp_path / "package"
    assemble(replace(sources, costs={}), out, card=card)
    verify(out)
    engines = {item["engine"]: item for item in json.loads((out / "certificate.json").read_text())["engines"]}
    assert "export.onnx" in engines["onnxruntime"]["reason"]
    assert engines["sglang"] == {"engine": "sglang", "status": "written"}
    assert engines["vllm"] == {"engine": "vllm", "status": "written"}
    assert engines["llamacpp"]["status"] == "absent"
    assert sorted(path.name for path in (out / "engines").iterdir()) == ["sglang", "tensorrt_llm", "vllm"]
    assert not (out / "engines" / "tensorrt_llm" / "cost_table.json").exists()
    for engine in ("sglang", "tensorrt_llm"):
        script = (out / "engines" / engine / "launch.sh").read_text().replace("\n# ", " ")
        assert f"serving profile {fake_build.CPU} has no cost curve: it was not profiled" in script
        assert f"serving profile {fake_build.ELSEWHERE} has no cost curve: no GPU | at hand" in script


def test_a_profile_that_could_not_be_curved_keeps_its_raw_times(sources, tmp_path):
    path = sources.costs[fake_build.CPU]
    value = json.loads(path.read_text())
    del value["curve"]
    path.write_text(json.dumps(value | {"absent": {"curve": "cost curve: flat, 60 steps per second"}}))
    out = tmp_path / "package"
    assemble(sources, out, card=render_card)
    verify(out)
    assert sorted(one.name for one in (out / "engines/sglang").iterdir()) == ["env", "launch.sh", "sts.json"]
    reason = "serving profile cpu-reference: cost curve: flat, 60 steps per second"
    assert reason in (out / "engines/sglang/launch.sh").read_text().replace("\n# ", " ")
    assert reason in (out / "README.md").read_text()
    assert (out / "scheduler" / "cost" / "cpu-reference.json").is_file()
    assert json.loads((out / "scheduler" / "scheduler.json").read_text())["curves"] == {}


def test_the_table_that_predicted_better_is_the_one_that_sglang_is_started_with(sources, tmp_path):
    """The made-up report says 3 % for requests and tokens, 4 % for tokens alone; then the other way round."""
    path = sources.costs[fake_build.CPU]
    for error, table, models in ((0.03, "sps-2d.json", {fake_build.CPU: "additive"}), (0.05, "sps.json", {})):
        value = json.loads(path.read_text())
        value["model_errors"]["additive_relative_error"] = error
        path.write_text(json.dumps(value))
        assemble(sources, tmp_path / table, card=card)
        script = (tmp_path / table / "engines" / "sglang" / "launch.sh").read_text()
        assert f"\n  --speculative-dspark-sps-table-path {table} " in script
        scheduler = read_scheduler(tmp_path / table / "scheduler" / "scheduler.json")
        assert scheduler.cost_models == models, "our own scheduler goes by the same"
        kind = type(scheduler.scheduler(fake_build.CPU, 0.0).cost)
        assert kind.__name__ == ("AdditiveCost" if models else "CostCurve")


def test_a_report_from_before_additive_costs_makes_a_package_without_them(sources, tmp_path):
    path = sources.costs[fake_build.CPU]
    value = json.loads(path.read_text())
    del value["additive"], value["model_errors"]
    path.write_text(json.dumps(value))
    out = tmp_path / "package"
    assemble(sources, out, card=card)
    assert json.loads((out / "scheduler" / "scheduler.json").read_text())["additive"] == {}
    assert not (out / "engines" / "sglang" / "sps-2d.json").exists()


def test_a_card_that_does_not_name_its_package_is_refused(sources, tmp_path):
    with pytest.raises(DsparkError, match=r"README\.md"):
        assemble(sources, tmp_path / "package", card=lambda folder, description: "# nothing\n")


def test_a_drafter_without_heads_is_packaged_with_what_verifies_whole_blocks(sources, tmp_path):
    manifest = assemble(fake_build.without_heads(sources), tmp_path / "package", card=card)
    verify(tmp_path / "package")
    drafter = manifest.drafter
    assert (drafter.family, drafter.markov.type, drafter.markov.rank) == ("dflash", "none", 0)
    assert not drafter.confidence.enabled and not drafter.confidence.bias
    scheduler = read_scheduler(tmp_path / "package/scheduler/scheduler.json")
    assert (scheduler.calibrations, scheduler.policy) == ((), "fixed(3)")
    certificate = json.loads((tmp_path / "package/certificate.json").read_text())
    absent = {engine["engine"]: engine["reason"] for engine in certificate["engines"] if engine["status"] == "absent"}
    assert "without a confidence head" in absent["tensorrt_llm"]
    assert sorted(path.name for path in (tmp_path / "package/engines/sglang").iterdir()) == ["env", "launch.sh"]


def test_a_manifest_that_names_other_heads_than_were_trained_is_found(sources, tmp_path, reseal):
    out = tmp_path / "package"
    assemble(fake_build.without_heads(sources), out, card=card)
    manifest = json.loads((out / "manifest.json").read_bytes())
    manifest["drafter"]["markov"] = {"type": "vanilla", "rank": 4}  # as the checkpoint stores it
    (out / "manifest.json").write_text(json.dumps(manifest))
    reseal(out)
    with pytest.raises(IntegrityError, match="markov_type"):
        verify(out)
