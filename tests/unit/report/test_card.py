"""The model card says what the JSON says, the bad numbers too, and is text whatever a name or reason contains."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dspark.errors import IntegrityError
from dspark.package.verify import read_manifest, verify
from dspark.report import render_card


@pytest.fixture
def package(pristine, tmp_path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "package"))


def render(package: Path) -> str:
    return render_card(package, read_manifest(package).description())


def edit(package: Path, name: str, change) -> None:
    path = package / name
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_the_card_in_a_package_can_be_made_again_from_the_package_alone(pristine):
    verify(pristine)
    assert render(pristine) == (pristine / "README.md").read_text(encoding="utf-8")


def test_it_says_for_whom_it_pays_and_where_to_switch_it_off(pristine):
    card = render(pristine)
    assert "- 1 to 3 concurrent requests: use policy `fixed`" in card
    assert "- 4 concurrent requests: **switch speculation off**" in card
    assert "### gpu-elsewhere: not measured" in card and r"no GPU \| at hand" in card


def test_ratios_below_one_are_printed(pristine):
    """0.87 in the evaluation and 0.80 at four requests in the engine, as the fixture has them."""
    card = render(pristine)
    assert r"0.87 \[0.86, 0.88\]" in card
    assert r"| 4 | fixed | 160.0 \[159.9, 160.1\] | 0.80 \[0.75, 0.85\] |" in card


def test_what_was_not_measured_stands_there_with_its_reason(pristine):
    card = render(pristine)
    assert "not measured: onnxruntime arm (not asked for)" in card
    assert "not measured: temperature 1, confidence (too few)" in card
    assert "position 3: T stays 1" in card


def test_a_package_with_costs_says_nothing_of_missing_ones(pristine):
    assert "There is no cost table" not in render(pristine)


def test_a_failed_check_is_not_hidden(package):
    def fail(value):
        value["result"] = value["greedy"]["result"] = "fail"
        value["greedy"]["violations"] = [{"prompt": "p", "position": 1, "token": 2, "best": 3, "gap": 0.5}]

    edit(package, "evidence/evaluate/lossless.json", fail)
    card = render(package)
    assert "Overall: **fail**" in card and "1 beyond epsilon" in card


def test_disagreement_and_missing_recommendations_are_warnings(package):
    def disagree(value):
        entry = value["entries"][0]
        entry["offline_vs_engine"]["result"] = "disagrees"
        entry |= {"status": "disagrees", "reason": "tau is 1.2 in the engine", "recommended": []}

    edit(package, "certificate.json", disagree)
    card = render(package)
    assert "do not rely on it" in card and "tau is 1.2 in the engine" in card
    assert "Leave speculation off" in card


def test_absent_numbers_are_dashes_and_an_open_end_is_no_promise(package):
    def thin(value):
        del value["throughput"], value["temperatures"]["0"]["mean_of_domains"]
        value["temperatures"]["0"]["domains"]["math"]["conditional"] = []

    edit(package, "evidence/evaluate/metrics.json", thin)
    card = render(package)
    assert "**mean**" not in card and "In the evaluation (" not in card
    assert r"| math | yes | 12 | 2.000 \[1.900, 2.100\] | – |" in card


def test_launch_commands_and_reasons_per_engine(pristine):
    card = render(pristine)
    assert "bash engines/sglang/launch.sh" in card and "bash engines/vllm/launch.sh" in card
    assert "### llamacpp\n\nNo files: " in card
    assert "the certificate has no measurement in it" in card  # nobody ran SGLang
    assert "engines/onnxruntime" in card


def test_a_measured_engine_carries_no_such_warning(package):
    def measured(value):
        for item in value["engines"]:
            if item["status"] == "absent":
                item["reason"] = "x"
        value["entries"][0]["fingerprint"]["engine"] = "sglang"

    edit(package, "certificate.json", measured)
    assert render(package).count("the certificate has no measurement in it") == 2  # TensorRT-LLM's and vLLM's


def test_it_says_how_to_verify_and_the_python_line_works(package):
    card = render(package)
    digest = read_manifest(package).digests.package_digest
    assert f"dspark package verify . --digest {digest}" in card
    (line,) = [line for line in card.splitlines() if line.startswith("python3 -c ")]
    code = line.removeprefix('python3 -c "').removesuffix('"')

    def output() -> str:
        done = subprocess.run([sys.executable, "-c", code], cwd=package, capture_output=True, text=True, check=True)
        return done.stdout

    assert output() == ""
    (package / "scheduler" / "scheduler.json").write_text("{}")
    assert output() == "CHANGED scheduler/scheduler.json\n"


def test_no_commit_and_a_reduced_vocabulary_are_said(package):
    def forget(value):
        del value["git_commit"], value["git_dirty"]
        value["git_absent"] = "git is not installed"

    edit(package, "evidence/lineage.json", forget)
    description = read_manifest(package).description()
    reduced = description.model_copy(update={"drafter": description.drafter.model_copy(update={"draft_vocab": 16})})
    card = render_card(package, reduced)
    assert "commit unknown (git is not installed)" in card
    assert "proposes 16 of the target's 32 tokens" in card


def test_a_drafter_that_was_trained_on_names_where_it_began(package):
    description = read_manifest(package).description()
    assert "trained on from" not in render_card(package, description)
    training = {"initial": {"package": "ab" * 32}, "mixture": {"new": ["sql"], "replay": 0.25}}
    recipe = {**description.inputs.recipe, "training": training}
    inputs = description.inputs.model_copy(update={"recipe": recipe})
    card = render_card(package, description.model_copy(update={"inputs": inputs}))
    said = f"- trained on from: package `{'ab' * 32}`; 25% of the training replayed the other domains beside sql\n"
    assert said in card


def test_hostile_names_and_reasons_stay_text(package):
    hostile = "<script>alert(1)</script> | `x` [a](http://evil.example) ![i](j)\n# heading **bold** www.evil.example"

    def poison(value):
        value["entries"][1]["reason"] = hostile

    edit(package, "certificate.json", poison)
    description = read_manifest(package).description()
    target = description.inputs.target.model_copy(update={"public_id": "a`b|c<d>", "revision": "x`y|z"})
    inputs = description.inputs.model_copy(update={"target": target})
    card = render_card(package, description.model_copy(update={"inputs": inputs}))
    assert "<script>" not in card and "\\<script\\>" in card
    assert "\n# heading" not in card and "[a]" not in card and "[i]" not in card and "http://" not in card
    assert " www.evil" not in card
    assert r"a\`b\|c\<d\>" in card and "`x y z`" in card


def test_every_table_has_as_many_cells_in_each_row(package):
    edit(package, "certificate.json", lambda value: value["entries"][1].update(reason="a | b"))
    width = None
    for line in render(package).splitlines():
        if not line.startswith("|"):
            width = None
            continue
        cells = line.replace(r"\|", "").count("|")
        width = width or cells
        assert cells == width, line


def test_a_card_of_a_package_without_its_evidence_is_refused(package):
    (package / "evidence" / "parity.json").unlink()
    with pytest.raises(IntegrityError, match=r"parity\.json"):
        render(package)


def test_a_champion_that_took_turns_is_named_with_every_ratio(package):
    import fake_build

    assert "in the same rounds" not in render(package)
    against = fake_build.against_champion().model_dump(mode="json")
    edit(package, "certificate.json", lambda value: value["entries"][0].update(against_champion=against))
    card = render(package)
    assert f"against package `{fake_build.CHAMPION}`, in the same rounds, by concurrent requests: " in card
    assert r"1.040 \[1.020, 1.060\] times at 1 (fixed against its fixed); 1.000" in card


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ({"kind": "hub", "repo": "org/drafter", "revision": "abc"}, "org/drafter at `abc`"),
        ({"kind": "folder"}, "a local folder"),
    ],
)
def test_an_imported_drafter_is_not_said_to_be_trained_by_a_recipe(pristine, source, name):
    description = read_manifest(pristine).description()
    recipe = {**description.inputs.recipe, "training": {"imported": "d" * 64, "layout": "deepspec", "source": source}}
    inputs = description.inputs.model_copy(update={"recipe": recipe})
    card = render_card(pristine, description.model_copy(update={"inputs": inputs}))
    assert f"- not trained here: imported from {name}, files `{'d' * 64}`" in card
    assert "recipe `dspark`" not in card and "recipe `dspark`" in render(pristine)
