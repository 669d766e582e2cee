"""Workspaces in temporary folders: a copy of the checkout's own files, and one whose stages cost nothing."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # sandbox.py

from sandbox import CHECKOUT, PLACE, Finished, Sandbox, copy_workspace, make_sandbox

from dspark.config.stages import STAGES
from dspark.io.jsonfile import model_json, write_json


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    """The checkout's workspace files in an empty folder."""
    return make_sandbox(tmp_path / PLACE)


@pytest.fixture(scope="module")
def new_sandbox(tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    """The same, for all tests of a module."""
    return make_sandbox(tmp_path_factory.mktemp("sandbox") / PLACE)


# ---------------------------------------------------------------- stages that cost nothing

# What each stage leaves, as far as later stages depend on it; `{stamp}` is a digest of everything it read.
OUTPUTS: dict[str, tuple[str, ...]] = {
    "prompts": ("train.jsonl", "dev.jsonl", "calibration.jsonl", "eval.jsonl", "summary.json"),
    "responses": ("train.jsonl", "dev.jsonl", "summary.json"),
    "features": (),
    "train": ("drafter/model.safetensors", "metrics.json"),
    "calibrate": ("calibration.json",),
    "profile": ("cost.json",),
    "evaluate": ("records/rows.jsonl",),
    "export": ("drafter/model.safetensors", "parity.json"),
    "certify": (),
    "package": (),
}

SPECIAL = {
    "features": """
    from dspark.features.store import FeatureManifest, ShardEntry
    shard = paths.store / "features" / f"{stamp}.safetensors"
    shard.parent.mkdir(parents=True, exist_ok=True)
    shard.write_text("features")
    entry = ShardEntry(key=stamp, bytes=8, sha256=digest_file(shard), sequences=1, tokens=1)
    manifest = FeatureManifest(
        target_digest=stamp, taps=(0,), dtype="bfloat16", hidden_size=8, splits={"train": (entry,), "dev": ()}
    )
    write_model(paths.out / "manifest.json", manifest)
""",
    "train": """
    from dspark.errors import IntegrityError

    manifest = json.loads((paths.corpus / "features" / "manifest.json").read_text())
    for entry in manifest["splits"]["train"]:
        if digest_file(paths.store / "features" / (entry["key"] + ".safetensors")) != entry["sha256"]:
            raise IntegrityError("a shard is damaged")
""",
    "evaluate": """
    tau = {"value": 1.5, "n": 3, "ci95": [1.4, 1.6]}
    at_0 = {"label": "greedy_match", "dtype": "float32", "domains": {}, "absent": {"stamp": stamp}}
    metrics = {"gamma": 7, "policy": "fixed", "max_new_tokens": 1, "seed": 0, "temperatures": {"0": at_0}}
    at_0["mean_of_domains"] = {"domains": ["rows"], "includes_bonus": True, "tau": tau}
    write_json(paths.out / "metrics.json", {"schema": "dspark/evaluation/1", **metrics})
    counts = dict.fromkeys(("n", "tokens", "drafts", "drafts_accepted", "near_tie_prompts"), 1)
    zeros = dict.fromkeys(("noise", "epsilon", "largest_gap"), 0.0)
    greedy = {"result": "pass", "dtype": "float32", "near_ties": [], "violations": [], **counts, **zeros}
    sampled = {"result": "pass", "temperature": 1.0, "tolerance": 0.0, "largest_difference": 0.0, "cases": []}
    lossless = {"schema": "dspark/lossless/1", "result": "pass", "greedy": greedy, "sampled": sampled}
    write_json(paths.out / "lossless.json", lossless)
""",
    "certify": """
    from dspark.evaluation.entry import absent_entry

    write_model(paths.out, absent_entry(inputs.profile, f"nothing was measured of {stamp}"))
""",
    "package": """
    from dspark.package.manifest import Description, compose, manifest_bytes
    value = json.loads((paths.root / "description.json").read_text())
    value["inputs"]["recipe"] = {"stamp": stamp}
    (paths.out / "manifest.json").write_bytes(manifest_bytes(compose(Description.model_validate(value), [])))
""",
}

SCRIPT = '''"""Stands in for stage `{name}`: same inputs and outputs, no work. {comment}"""

import json
import os
import time

from dspark.io.digest import digest_file, digest_json, digest_tree
from dspark.io.jsonfile import write_json, write_model
from dspark.workspace.stage import stage


def held(file):
    """Whether to stand still: the file is there and does not name this stage."""
    try:
        return "{name}" not in file.read_text().split()
    except FileNotFoundError:
        return False


@stage("{name}")
def main(inputs, paths, progress):
    with (paths.root / "calls.log").open("a") as log:
        log.write(f"{name}@{{paths.key}}\\n")
    read = [paths.root / path for path in paths.stage.dependencies(paths.key, paths.entry)]
    stamp = digest_json([digest_tree(path) for path in read])
    steps = int(os.environ.get("FAKE_STEPS", "0")) if os.environ.get("FAKE_SLOW") in ("{name}", "any") else 0
    done = paths.work / "done"
    begin = int(done.read_text()) if done.is_file() else 0
    progress.start("{name}", steps, begin)
    for step in range(begin, steps):
        with (paths.root / "steps.log").open("a") as log:
            log.write(f"{name} {{step}}\\n")
        done.write_text(str(step + 1))
        progress.advance()
        while step >= 5 and held(paths.root / "hold"):
            time.sleep(0.02)
            progress.advance(0)
    if os.environ.get("FAKE_FAIL") == "{name}":
        from dspark.errors import DataError

        raise DataError("rows.jsonl:3: no messages", "mend the line")
    for name in {outputs!r}:
        (paths.out / name).parent.mkdir(parents=True, exist_ok=True)
        write_json(paths.out / name, {{"stamp": stamp}})
{special}

if __name__ == "__main__":
    main()
'''


class FakeSandbox(Sandbox):
    """The real `dvc.yaml` and command line over stages that cost nothing and a target that is only a record."""

    def calls(self) -> list[str]:
        """Stages that ran since the last call, in order."""
        log = self.root / "calls.log"
        found = log.read_text().splitlines() if log.is_file() else []
        log.unlink(missing_ok=True)
        return found

    def run(self, *arguments: str, **variables: str) -> Finished:
        return self.dspark("run", "--target", "fake", "--no-publish", "--json", *arguments, **variables)

    def ran(self, *arguments: str, **variables: str) -> list[str]:
        """Run, and say which stages ran, without their keys, sorted."""
        done = self.run(*arguments, **variables)
        assert done.code == 0, done.err
        reported = [stage["name"] for stage in done.json["stages"] if stage["status"] == "ran"]
        called = self.calls()
        assert sorted(reported) == sorted(called)
        return sorted(name.partition("@")[0] for name in called)

    def write_script(self, stage: str, comment: str = "") -> None:
        spec = next(found for found in STAGES if found.name == stage)
        text = SCRIPT.format(name=stage, comment=comment, outputs=OUTPUTS[stage], special=SPECIAL.get(stage, ""))
        (self.root / "stages" / f"{spec.script}.py").write_text(text)


@pytest.fixture(scope="session")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> FakeSandbox:
    """A workspace in which a whole run takes seconds and only the target was fetched; never changed, only copied."""
    made = make_fake(tmp_path_factory.mktemp("untouched") / PLACE)
    fetched = made.dspark("targets", "fetch", "fake")
    assert fetched.code == 0 and "targets/fake.json" in fetched.out, fetched.err
    return made


@pytest.fixture
def fake(untouched: FakeSandbox, tmp_path: Path) -> FakeSandbox:
    """Such a workspace."""
    return copied(untouched, tmp_path)


@pytest.fixture(scope="session")
def made_once(untouched: FakeSandbox, tmp_path_factory: pytest.TempPathFactory) -> FakeSandbox:
    """One in which everything was made; never changed, only copied."""
    made = copied(untouched, tmp_path_factory.mktemp("made"))
    done = made.run()
    assert done.code == 0, done.err
    made.calls()
    return made


@pytest.fixture
def made(made_once: FakeSandbox, tmp_path: Path) -> FakeSandbox:
    """A workspace in which everything was made."""
    return copied(made_once, tmp_path)


def copied(sandbox: FakeSandbox, folder: Path) -> FakeSandbox:
    shutil.copytree(sandbox.root, folder / PLACE, symlinks=True)
    return FakeSandbox(folder / PLACE)


def make_fake(root: Path) -> FakeSandbox:
    root.mkdir()
    copy_workspace(root)
    for folder in ("pipeline/targets", "pipeline/builds", "pipeline/domains", "serving_profiles"):
        shutil.rmtree(root / folder, ignore_errors=True)
        (root / folder).mkdir(parents=True)
    made = FakeSandbox(root)
    for stage in STAGES:
        made.write_script(stage.name)
    declared = {
        "params.yaml": "defaults: {domains: [rows], recipe: dspark, serving_profiles: [cpu]}\n"
        "training:\n  steps: 100\nexport:\n  onnx: false\n",
        "pipeline/domains/rows.yaml": "source: {kind: jsonl, path: rows.jsonl}\n",
        "pipeline/domains/rows.jsonl": '{"messages": [{"role": "user", "content": "hello"}]}\n',
        "pipeline/targets/fake.yaml": (CHECKOUT / "pipeline/targets/tiny.yaml").read_text(),
        "serving_profiles/cpu.yaml": "engine: reference\naccess: local\n",
    }
    for name, text in declared.items():
        (root / name).write_text(text)
    write_json(root / "description.json", description())
    return made


def description() -> dict[str, Any]:
    """What a package says about itself, valid and made up."""
    from dspark.package.manifest import Description

    digest = "0" * 64
    target = {
        "name": "fake",
        "public_id": "fake",
        "source": {"kind": "random"},
        "revision": "1",
        **dict.fromkeys(
            ("weights_digest", "embedding_digest", "head_digest", "tokenizer_digest", "chat_template_digest"), digest
        ),
        "dtype": "float32",
        "vocab_logical": 16,
        "vocab_physical": 16,
        "max_position": 128,
    }
    corpus = {
        "name": "fake",
        "digest": digest,
        "domains": ["rows"],
        "evaluation_domains": [],
        "prompts": {"train": 1},
        "tokens": {"train": 1},
        "thinking_mode": "none",
        "sampling": {},
    }
    drafter = {
        "kind": "dspark",
        "gamma": 7,
        "taps": [0, 1],
        "tap_convention": "output of layer k, counted from 0",
        "sample_from_anchor": True,
        "mask_token_id": 3,
        "markov": {"type": "vanilla", "rank": 4},
        "confidence": {"enabled": True, "with_markov": True, "bias": True},
        "draft_vocab": 16,
        "parameters": 1,
        "dtype": "float32",
    }
    value = {
        "name": "dspark-fake",
        "build": "fake",
        "inputs": {"target": target, "corpus": corpus, "recipe": {}},
        "drafter": drafter,
        "model_digest": digest,
        "package_digest": digest,
    }
    return model_json(Description.model_validate(value))
