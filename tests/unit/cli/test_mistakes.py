"""What newcomers get wrong: each ends in its documented exit code, within six lines, with the next command in them.

The catalogue is docs/reference/errors.md; a test holds the two against each other.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dspark.cli.boundary import run_command
from dspark.io import progress
from dspark.registry import reach
from dspark.workspace.layout import Workspace
from dspark.workspace.lock import run_lock
from dspark.workspace.scaffold import scaffold

CHECKOUT = Path(__file__).resolve().parents[3]
LIMIT = 6  # lines

Prepare = Callable[[Path, pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mistake:
    """One of them.

    Attributes:
        command: what is typed, in a new workspace.
        code: how it ends.
        says: part of the first line.
        next: part of what is to be done.
        prepare: what was done wrong before.
    """

    command: str
    code: int
    says: str
    next: str
    prepare: Prepare = lambda root, patch: None


def edited(path: str, old: str, new: str) -> Prepare:
    def edit(root: Path, patch: pytest.MonkeyPatch) -> None:
        text = (root / path).read_text()
        assert old in text
        (root / path).write_text(text.replace(old, new, 1))

    return edit


def removed(path: str) -> Prepare:
    return lambda root, patch: (root / path).unlink()


def variable(name: str, value: str) -> Prepare:
    return lambda root, patch: patch.setenv(name, value)


def elsewhere(root: Path, patch: pytest.MonkeyPatch) -> None:
    patch.chdir(root.parent)


def own_project(root: Path, patch: pytest.MonkeyPatch) -> None:
    (root.parent / "mine").mkdir()
    (root.parent / "mine/dvc.yaml").write_text("stages: {mine: {cmd: 'true'}}\n")
    patch.chdir(root.parent / "mine")


def inside(root: Path, patch: pytest.MonkeyPatch) -> None:
    patch.chdir(root / "pipeline")


def without(*modules: str) -> Prepare:
    """An installation that lacks these."""

    def prepare(root: Path, patch: pytest.MonkeyPatch) -> None:
        import importlib.util

        real = importlib.util.find_spec
        patch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in modules else real(name, *rest))

    return prepare


def little_room(root: Path, patch: pytest.MonkeyPatch) -> None:
    real = shutil.disk_usage
    patch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=1024**2))


def impatient(root: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reach.require_server, "__defaults__", (0.1, None))


def moved_folder(root: Path, patch: pytest.MonkeyPatch) -> None:
    (root / "pipeline/targets/mine.yaml").write_text("source: {kind: folder, path: /nowhere}\n")


def emptied(root: Path, patch: pytest.MonkeyPatch) -> None:
    (root / "params.yaml").write_text("")


def half_target(root: Path, patch: pytest.MonkeyPatch) -> None:
    (root / "pipeline/targets/mine.yaml").write_text("source: {kind: folder\n")


def half_model(root: Path, patch: pytest.MonkeyPatch) -> None:
    checkpoint(root, patch)
    (root / "drafter/config.json").write_text("{")


def checkpoint(root: Path, patch: pytest.MonkeyPatch) -> None:
    (root / "drafter").mkdir()
    (root / "drafter/config.json").write_text("{}")


def model_folder(layers: int, value: float = 0.0) -> Prepare:
    """A folder `model` whose config.json speaks of two layers; `value` is in all of its weights."""

    def prepare(root: Path, patch: pytest.MonkeyPatch) -> None:
        (root / "model").mkdir()
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 16}
        config = {"model_type": "llama", **sizes, "num_hidden_layers": 2, "max_position_embeddings": 64}
        (root / "model/config.json").write_text(json.dumps(config))
        (root / "model/tokenizer.json").write_text("{}")
        square, names = np.full((8, 8), value, np.float32), [f"self_attn.{one}_proj" for one in "qkvo"]
        names += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
        tensors = {f"model.layers.{n}.{name}.weight": square for n in range(layers) for name in names}
        norms = [f"model.layers.{n}.{name}.weight" for n in range(layers) for name in ("norm_in", "norm_out")]
        tensors |= dict.fromkeys([*norms, "model.norm.weight"], square[0])
        tensors |= dict.fromkeys(["model.embed_tokens.weight", "lm_head.weight"], np.tile(square, (2, 1)))
        save_file(tensors, root / "model/model.safetensors")
        if layers == 2:
            assert run_command(["targets", "add", "mine", "model"]) == 0

    return prepare


def closed_port() -> str:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listening.getsockname()[1]}"


BUILD, DAG = "pipeline/builds/tiny.yaml", "dvc.yaml"
TWICE = "target: tiny\ntarget: tiny\n"
AWAY = closed_port()
MISTAKES: dict[str, Mistake] = {
    "no workspace": Mistake("run --target tiny", 3, "is not inside a workspace", "dspark init DIR", elsewhere),
    "a project of one's own in the way": Mistake(
        "init", 3, "in the way of a workspace: dvc.yaml", "dspark init", own_project
    ),
    "a workspace within a workspace": Mistake("init more", 3, "lies inside the workspace", "dspark init DIR", inside),
    "misspelt verb": Mistake("rnu --target tiny", 2, "dspark has no verb 'rnu'", "did you mean 'run'?"),
    "a subverb without its verb": Mistake("pull", 2, "dspark has no verb 'pull'", "'dspark package pull'"),
    "one of a few words left out": Mistake("completion", 2, "Choose from: bash,", "dspark completion --help"),
    "misspelt subverb": Mistake("targets lst", 2, "dspark targets has no verb 'lst'", "did you mean 'list'?"),
    "misspelt option": Mistake("run --traget tiny", 2, "No such option", "dspark run --help"),
    "forgotten argument": Mistake("package verify", 2, "Missing argument", "dspark package verify --help"),
    "an option without its value": Mistake("run --target", 2, "requires an argument", "dspark run --help"),
    "a target without its option": Mistake("run tiny", 2, "extra argument", "did you mean dspark run --target tiny?"),
    "an option of other programs": Mistake("run --dry-run", 2, "No such option", "dspark plan --target NAME"),
    "a target without its name": Mistake("targets show", 2, "Missing argument", "dspark targets show --help"),
    "a target without its folder": Mistake("targets add mine", 2, "Missing argument", "dspark targets add --help"),
    "a plan of nothing": Mistake("plan", 2, "which build?", "add --target NAME"),
    "no name": Mistake("run", 2, "which build?", "dspark targets list"),
    "misspelt target": Mistake("run --target tinny", 2, "target 'tinny' does not exist", "did you mean 'tiny'?"),
    "misspelt build": Mistake("run --build tinny", 2, "build 'tinny' does not exist", "did you mean 'tiny'?"),
    "a build of another target": Mistake(
        "run --target tiny --build smollm2-135m", 2, "is for target 'smollm2-135m', not 'tiny'", "--build smollm2-135m"
    ),
    "misspelt setting": Mistake(
        "plan --target tiny --set training.stpes=5", 2, "--set training.stpes=5", "did you mean 'steps'?"
    ),
    "a setting without its section": Mistake(
        "plan --target tiny --set steps=5", 2, "unknown section 'steps'", "sections:"
    ),
    "a setting without a value": Mistake(
        "plan --target tiny --set training.steps", 2, "expected section.key=value", "--set training.steps=500"
    ),
    "a section for a setting": Mistake(
        "plan --target tiny --set training=5", 2, "a key of 'training' is missing", "keys of training: "
    ),
    "a setting of nothing": Mistake(
        "plan --target tiny --set training.steps=", 2, "it has no value", "give one, `null` for none"
    ),
    "text for a number": Mistake(
        "plan --target tiny --set training.steps=many", 2, "must be a whole number, not 'many'", "dspark config show"
    ),
    "a number out of range": Mistake(
        "plan --target tiny --set training.steps=-3", 2, "training.steps: must be", "dspark config show"
    ),
    "misspelt variable": Mistake(
        "plan --target tiny", 2, "DSPARK_DRAFTER__GAMA", "did you mean 'gamma'?", variable("DSPARK_DRAFTER__GAMA", "3")
    ),
    "misspelt key of a build": Mistake(
        "plan --target tiny", 2, f"{BUILD}:19", "did you mean 'steps'?", edited(BUILD, "  steps: 30", "  stepz: 30")
    ),
    "a build that is no YAML": Mistake(
        "plan --target tiny", 2, "not valid YAML", BUILD, edited(BUILD, "training:", "training: [")
    ),
    "a key that stands twice": Mistake(
        "plan --target tiny",
        2,
        f"{BUILD}:4: not valid YAML: key",
        "command again",
        edited(BUILD, "target: tiny\n", TWICE),
    ),
    "an empty params.yaml": Mistake(
        "plan --target tiny", 2, "params.yaml: `defaults` is missing", "git checkout params.yaml", emptied
    ),
    "a target's file that is no YAML": Mistake(
        "targets show mine", 2, "mine.yaml:2: not valid YAML", "give the same command again", half_target
    ),
    "a recipe that is not there": Mistake(
        "plan --target tiny",
        2,
        "recipe 'dspark-rn' does not exist",
        "did you mean 'dspark-rnn'?",
        edited(BUILD, "target: tiny\n", "target: tiny\nrecipe: dspark-rn\n"),
    ),
    "a domain that is not there": Mistake(
        "plan --target tiny",
        2,
        "domain 'maths' does not exist",
        "did you mean 'math'?",
        edited("params.yaml", "[math, code, chat]", "[maths, code, chat]"),
    ),
    "prompts that are not there": Mistake(
        "run --target tiny", 3, "chat.jsonl", "pipeline/domains", removed("pipeline/domains/chat.jsonl")
    ),
    "a model of the hub without network": Mistake(
        "run --target qwen3-8b", 3, "qwen3-8b", "dspark targets add", variable("HF_HUB_OFFLINE", "1")
    ),
    "a model folder that is not there": Mistake("targets add mine nowhere", 3, "nowhere", "dspark targets add"),
    "a model of another kind": Mistake("targets add mine drafter", 3, "names no model_type", "targets add", checkpoint),
    "a model folder that was cut off": Mistake(
        "targets add mine drafter", 3, "config.json: not valid JSON", "download it again", half_model
    ),
    "a config.json of another model": Mistake(
        "targets add mine model", 3, "num_hidden_layers is 2, the weights have 1 layers", "config.json", model_folder(1)
    ),
    "weights that are no numbers": Mistake(
        "targets fetch mine", 3, "is not finite", "save or download the model again", model_folder(2, float("nan"))
    ),
    "a name that is taken": Mistake("targets add tiny .", 2, "target 'tiny' exists", "dspark targets add NAME PATH"),
    "no extra": Mistake(
        "run --target tiny", 3, "not installed: torch", "pip install 'dspark[pipeline,cpu]", without("torch")
    ),
    "no GPU": Mistake("run --target tiny", 3, "sees no GPU", "dspark doctor", variable("DSPARK_DEVICE", "cuda")),
    "a full disk": Mistake("run --target tiny", 3, "1 MiB free on the disk", "free some space", little_room),
    "a dvc.yaml that is no YAML": Mistake(
        "run --target tiny", 3, "dvc.yaml:8: not valid YAML", "git checkout", edited(DAG, "stages:", "stages: [")
    ),
    "a plan of a dvc.yaml that is no YAML": Mistake(
        "plan --target tiny", 3, "dvc.yaml:8: not valid YAML", "git checkout", edited(DAG, "stages:", "stages: [")
    ),
    "a misspelt key of dvc.yaml": Mistake(
        "plan --target tiny", 3, "dvc.yaml:8: extra keys", "git checkout", edited(DAG, "foreach", "forech")
    ),
    "a model folder that was moved": Mistake(
        "run --target mine", 3, "target 'mine': /nowhere is not a folder", "pipeline/targets/mine.yaml", moved_folder
    ),
    "two documents on stdout": Mistake(
        "run --target tiny --json --events -", 2, "both print to stdout", "--events a file"
    ),
    "events into nowhere": Mistake(
        "run --target tiny --events no/such/file", 2, "--events no/such/file: cannot be written", "--events FILE"
    ),
    "status before any run": Mistake("status", 3, "nothing was run here yet", "dspark run --target"),
    "logs before any run": Mistake("logs train", 3, "nothing was run here yet", "dspark run --target"),
    "a list of logs before any run": Mistake("logs", 3, "nothing was run here yet", "dspark run --target NAME"),
    "plots before any run": Mistake("plots tiny", 3, "nothing to draw yet", "dspark run"),
    "a registry before any run": Mistake("registry list", 3, "there is no registry yet", "dspark run --target NAME"),
    "a package that is not there": Mistake(
        "package verify nowhere", 2, "nowhere does not exist", "builds/NAME/package"
    ),
    "a report on what is not there": Mistake("report no/where", 2, "no/where does not exist", "builds/NAME/package"),
    "drift from what is not there": Mistake(
        f"drift --package nowhere --metrics {AWAY}", 2, "nowhere does not exist", "builds/NAME/package"
    ),
    "a smoke test of what is not there": Mistake(
        f"package smoke {AWAY} --package nowhere", 2, "nowhere does not exist", "builds/NAME/package"
    ),
    "a drafter that is not there": Mistake(
        f"certify --drafter nowhere --url {AWAY} --target tiny", 2, "nowhere: not found", "GGUF file, or the folder"
    ),
    "a file for a package": Mistake(
        "package show params.yaml", 2, "params.yaml is not a folder", "builds/NAME/package"
    ),
    "a folder that is no package": Mistake(
        "package show pipeline", 7, "it is not a package", "packages lie in builds/NAME/package"
    ),
    "a stage of promotion that is not there": Mistake("promote tiny --to prod", 2, "'prod'", "dspark promote --help"),
    "a tracking server that is away": Mistake(
        f"promote tiny --to staging --tracking-uri {AWAY}", 8, "does not answer", "see that it is up", impatient
    ),
    "a tracking address that cannot work": Mistake(
        "run --target tiny --tracking-uri mlflow.db", 2, "mlflow.db", "sqlite:////folder/mlflow.db"
    ),
    "an engine that is away": Mistake(
        f"certify --drafter drafter --url {AWAY} --target tiny", 8, f"answers at {AWAY}", "start", checkpoint
    ),
}


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("newcomer") / "ws"
    scaffold(root)
    return root


@pytest.fixture
def root(untouched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new workspace, the current folder."""
    root = tmp_path / "ws"
    shutil.copytree(untouched, root)
    monkeypatch.chdir(root)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no cache"))
    monkeypatch.setattr(progress, "_stop", type(progress._stop)())
    return root


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_ends_in_its_code_and_the_next_command(
    name: str, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake = MISTAKES[name]
    mistake.prepare(root, monkeypatch)
    code = run_command(mistake.command.split())
    told = capsys.readouterr().err
    lines = [line for line in told.splitlines() if not line.endswith(" ...")]  # the step that is under way
    assert code == mistake.code, told
    assert mistake.says in lines[0] and lines[0].startswith("Error: "), told
    assert mistake.next in told, told
    assert len(lines) <= LIMIT, told
    assert "Traceback" not in told and "fault in dspark" not in told
    assert not (root / "builds").exists()


def test_a_second_run_at_the_same_time(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with run_lock(Workspace(root), "dspark run of build 'tiny'", print):
        assert run_command(["plan", "--target", "tiny"]) == 3
    told = capsys.readouterr().err
    assert "this workspace is in use: dspark run of build 'tiny'" in told and "dspark status" in told
    assert len(told.splitlines()) <= LIMIT


def test_the_catalogue_in_the_docs_is_this_one() -> None:
    """Exit code and name of each, as docs/reference/errors.md lists them."""
    text = (CHECKOUT / "docs/reference/errors.md").read_text()
    listed = dict(re.findall(r"^\| ([^|]+) \| `[^|]*` \| (\d) \|", text, re.MULTILINE))
    assert listed == {name: str(mistake.code) for name, mistake in MISTAKES.items()} | {
        "a second run at the same time": "3"
    }
    assert len(listed) >= 30
