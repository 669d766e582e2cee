"""`dspark import`: from a release to a build that names it, in a workspace whose files stay as they are."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "package"))  # fake_build.py
sys.path.insert(0, str(Path(__file__).parents[1] / "drafters"))  # foreign_layouts.py

import fake_build
from foreign_layouts import LAYOUTS, chain, flat, moved, write

from dspark.config.models import DrafterSettings, MarkovSettings
from dspark.config.resolve import resolve
from dspark.drafters.config import DrafterConfig
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.kinds import build_drafter
from dspark.errors import DataError, PreflightError, SettingsError
from dspark.io.jsonfile import write_model
from dspark.targets.ends import Ends
from dspark.workspace import import_drafter as module
from dspark.workspace.bundled import write_bundled
from dspark.workspace.import_drafter import Imported, ImportRequest, import_drafter
from dspark.workspace.imports import imported_files
from dspark.workspace.layout import Workspace
from dspark.workspace.listener import Silent
from dspark.workspace.release import Release, find_release

SETTINGS = DrafterSettings(gamma=3, layers=1, markov=MarkovSettings(rank=4))
DEMO = """target: tiny
corpus: shared
domains: [math]
evaluation_domains: [code]
serving_profiles: [cpu]
prompts: {per_domain: 9}
drafter: {gamma: 5, layers: 2, markov: {rank: 8}, draft_vocab_size: 16}
training: {steps: 5, max_length: 128, precision: float32, loss: {labels: soft}}
evaluation: {max_new_tokens: 24}
against: null
"""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def ends() -> Ends:
    generator = torch.Generator().manual_seed(2)
    return Ends(torch.randn(32, 8, generator=generator), torch.randn(32, 8, generator=generator))


@pytest.fixture(scope="module")
def drafter(ends: Ends) -> Any:
    return moved(DSparkDrafter(DrafterConfig.of(fake_build.record(), SETTINGS), *ends, seed=1))


@pytest.fixture
def workspace(tmp_path: Path, ends: Ends, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A workspace whose target is at hand, and a build `demo` of it."""
    root = tmp_path / "workspace"
    rows = "source: {kind: jsonl, path: rows.jsonl}\n"
    files = {
        "params.yaml": "defaults: {recipe: dspark, serving_profiles: [cpu], domains: [math]}\n",
        "pipeline/builds/demo.yaml": DEMO,
        "pipeline/targets/tiny.yaml": "source: {kind: folder, path: /x}\n",
        "pipeline/targets/other.yaml": "source: {kind: folder, path: /y}\n",
        "pipeline/recipes/dspark.yaml": "drafter: {gamma: 7, layers: 5}\ntraining: {learning_rate: 6.0e-4}\n",
        **{f"pipeline/domains/{name}.yaml": rows for name in ("math", "code")},
        "pipeline/domains/rows.jsonl": '{"prompt": "hello"}\n',
        "serving_profiles/cpu.yaml": "engine: reference\naccess: local\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    found = Workspace(root)
    write_model(found.target_record("tiny"), fake_build.record())
    monkeypatch.setattr(module, "materialise", lambda spec, *, root, progress: fake_build.record())
    monkeypatch.setattr(module, "install_stop_signals", lambda: None)
    monkeypatch.setattr("dspark.targets.ends.read_ends", lambda record, root: ends)
    return found


@pytest.fixture
def released(tmp_path: Path, drafter: Any) -> Path:
    return write(tmp_path / "released", flat(drafter), drafter.state_dict())


@pytest.fixture
def take(workspace: Workspace, released: Path) -> Callable[..., Imported]:
    def go(**asked: Any) -> Imported:
        return import_drafter(
            workspace, ImportRequest(**{"source": str(released), "target": "tiny", **asked}), Silent()
        )

    return go


def declarations(workspace: Workspace) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in (workspace.root / "pipeline").rglob("*") if path.is_file()}


def test_without_a_name_the_drafter_is_kept_and_no_file_is_written(
    workspace: Workspace, take: Callable[..., Imported], drafter: Any
) -> None:
    before = declarations(workspace)
    imported = take()
    assert declarations(workspace) == before and imported.build is None and imported.notes == ()
    assert imported.drafter == SETTINGS
    assert imported.parameters == sum(value.numel() for value in drafter.state_dict().values())
    assert imported.folder == workspace.imported(imported.origin.digest) and imported.folder.is_dir()
    # An override alone makes a build of it.
    flags = [f"training.imported={imported.origin.digest}", *("drafter.gamma=3", "drafter.layers=1")]
    flags += ["drafter.markov.rank=4", "drafter.draft_vocab_size=null"]
    assert imported_files(workspace, resolve(workspace.root, build="demo", flags=flags).chosen.build)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_build_shares_everything_but_its_drafter_with_another(
    workspace: Workspace, take: Callable[..., Imported], drafter: Any, tmp_path: Path, layout: str
) -> None:
    folder = write(tmp_path / layout, LAYOUTS[layout](drafter), drafter.state_dict())
    before = declarations(workspace)
    imported = take(source=str(folder), build="theirs", like="demo")
    assert imported.build == workspace.root / "pipeline/builds/theirs.yaml"
    after = declarations(workspace)
    assert after.keys() - before.keys() == {str(imported.build)} and before.items() <= after.items()
    pipeline = resolve(workspace.root, build="theirs")
    build, demo = pipeline.chosen.build, pipeline.builds["demo"].build
    assert build.corpus == demo.corpus and build.evaluation == demo.evaluation
    assert build.serving_profiles == demo.serving_profiles
    assert build.drafter == SETTINGS
    assert build.training.imported == imported.origin.digest and build.training.initial is None
    # What the dev split is measured by; how to train says nothing here.
    assert (build.training.max_length, build.training.precision) == (128, "float32")
    assert "steps" not in imported.build.read_text() and str(tmp_path) not in imported.build.read_text()
    assert imported_files(workspace, build).keys() == {"config.json", "model.safetensors"}
    assert imported.origin.layout == layout


@pytest.mark.parametrize(("kind", "layout"), [("dspark", flat), ("eagle3", chain)])
def test_a_build_of_a_drafter_without_heads_declares_it_so(
    workspace: Workspace, take: Callable[..., Imported], ends: Ends, tmp_path: Path, kind: str, layout: Any
) -> None:
    """DFlash and EAGLE-3; the hint of a build that says something else is all that it takes to say the right thing."""
    settings = DrafterSettings.model_validate(
        {"kind": kind, "gamma": 3, "layers": 1, "markov": {"type": "none"}, "confidence": False}
    )
    drafter = moved(build_drafter(DrafterConfig.of(fake_build.record(), settings), *ends, seed=1))
    folder = write(tmp_path / kind, layout(drafter), drafter.state_dict())
    imported = take(source=str(folder), build="theirs", like="demo")
    build = resolve(workspace.root, build="theirs").chosen.build
    assert build.drafter == imported.drafter == settings and imported_files(workspace, build)
    flags = [f"training.imported={imported.origin.digest}"]
    with pytest.raises(SettingsError, match=r"drafter\.markov\.type is vanilla") as refused:
        imported_files(workspace, resolve(workspace.root, build="demo", flags=flags).chosen.build)
    flags += [word for word in refused.value.hint.split() if "=" in word]
    assert imported_files(workspace, resolve(workspace.root, build="demo", flags=flags).chosen.build)


def test_the_same_command_again_changes_nothing_and_a_file_of_somebody_else_is_never_touched(
    workspace: Workspace, take: Callable[..., Imported]
) -> None:
    first = take(build="theirs", like="demo")
    before = declarations(workspace)
    assert take(build="theirs", like="demo") == first and declarations(workspace) == before
    with pytest.raises(SettingsError, match=r"pipeline/builds/demo\.yaml: build 'demo' exists"):
        take(build="demo", like="demo")
    assert declarations(workspace) == before


def test_by_default_the_target_s_own_build_is_what_it_is_like(
    workspace: Workspace, take: Callable[..., Imported]
) -> None:
    """No file declares it, so its corpus has the target's name and everything else is the workspace's default."""
    take(build="theirs")
    pipeline = resolve(workspace.root, build="theirs")
    assert pipeline.chosen.build.corpus == pipeline.builds["tiny"].build.corpus
    assert pipeline.chosen.build.corpus.name == "tiny"


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"build": "Bad Name"}, "cannot be a name"),
        ({"target": "tinny"}, "target 'tinny' does not exist"),
        ({"source": "/nowhere/at/all"}, "/nowhere/at/all: no such folder"),
        ({"source": "nowhere"}, "nowhere: no such folder"),
        ({"build": "new", "like": "nobody"}, "build 'nobody' does not exist"),
        ({"build": "new", "like": "other"}, "is for target"),
    ],
)
def test_mistakes_are_refused_and_leave_no_build(
    workspace: Workspace, take: Callable[..., Imported], asked: dict[str, Any], reason: str
) -> None:
    (workspace.root / "pipeline/builds/other.yaml").write_text("target: other\n")
    before = declarations(workspace)
    with pytest.raises(SettingsError, match=reason):
        take(**asked)
    assert declarations(workspace) == before


def test_a_build_that_would_have_mistakes_is_not_written(workspace: Workspace, take: Callable[..., Imported]) -> None:
    """The profile names fixed(5), which the released drafter's blocks of three cannot have."""
    profile = workspace.root / "serving_profiles/cpu.yaml"
    profile.write_text("engine: llamacpp\naccess: local\ndtype: float32\npolicies: [fixed(5)]\n")
    with pytest.raises(SettingsError, match=r"names fixed\(5\), a block has 3 drafts"):
        take(build="theirs", like="demo")
    assert not (workspace.root / "pipeline/builds/theirs.yaml").exists()


def test_another_target_s_drafter_is_not_kept(
    workspace: Workspace, take: Callable[..., Imported], drafter: Any, tmp_path: Path
) -> None:
    folder = write(tmp_path / "wrong", flat(drafter) | {"target_layer_ids": [0, 1]}, drafter.state_dict())
    with pytest.raises(DataError, match="reads the outputs of layers"):
        take(source=str(folder))
    assert not workspace.drafters.exists()


def test_matrices_of_another_model_are_noted(
    take: Callable[..., Imported], drafter: Any, ends: Ends, tmp_path: Path
) -> None:
    tensors = drafter.state_dict() | {"embed_tokens.weight": ends.embedding + 1, "lm_head.weight": ends.head}
    (note,) = take(source=str(write(tmp_path / "d", flat(drafter), tensors))).notes
    assert note.startswith("it stores embed_tokens.weight of other values")


def test_retraining_goes_on_from_an_imported_build(workspace: Workspace, take: Callable[..., Imported]) -> None:
    """`dspark retrain` lays initial weights over the build: then it trains, and nothing is imported any more."""
    from dspark.config.layers import Origin, Overlay
    from dspark.workspace.retrain import Retraining, _layer

    take(build="theirs", like="demo")
    layer = _layer(["math"], Retraining("math", None, 0.5, None, ""), "c" * 64)
    build = resolve(
        workspace.root, build="theirs", overlay=Overlay(layer, Origin("verb", "dspark retrain"))
    ).chosen.build
    assert build.training.imported is None and build.training.initial is not None
    with pytest.raises(SettingsError, match=r"imported.* trains nothing"):
        resolve(workspace.root, build="theirs", flags=[f"training.initial.package={'c' * 64}"])


# ---------------------------------------------------------------- the hub


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no hub."""
    folder = tmp_path / "hub-cache"
    folder.mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return folder


def snapshot(cache: Path, folder: Path) -> Path:
    """Put files into the cache as the hub's client does."""
    repo = cache / "models--org--drafter"
    shutil.copytree(folder, repo / "snapshots" / COMMIT)
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text(COMMIT)
    return repo / "snapshots" / COMMIT


def test_without_hub_and_cache_it_ends_in_seconds_and_says_how_to_supply_a_folder(
    workspace: Workspace, cache: Path, take: Callable[..., Imported]
) -> None:
    started = time.monotonic()
    with pytest.raises(
        PreflightError, match="org/drafter at main is not on this machine and HF_HUB_OFFLINE"
    ) as refused:
        take(source="org/drafter")
    assert time.monotonic() - started < 5 and "dspark import FOLDER" in refused.value.hint
    assert not (workspace.root / ".dspark").exists()


def test_a_cached_release_is_taken_with_its_commit(cache: Path, released: Path, take: Callable[..., Imported]) -> None:
    folder = snapshot(cache, released)
    imported = take(source="org/drafter")
    assert imported.origin.source == {"kind": "hub", "repo": "org/drafter", "revision": COMMIT}
    (folder / "model.safetensors").unlink()  # a part of a download is no release
    with pytest.raises(PreflightError, match="not on this machine"):
        take(source="org/drafter")
    assert find_release("org/drafter", "main", weights=False).folder == folder  # but enough to look at


def test_of_a_target_with_its_drafter_inside_no_weights_are_fetched(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dspark.targets import hub

    fetched: list[str] = []
    (tmp_path / "v4").mkdir()
    (tmp_path / "v4/config.json").write_text(json.dumps({"architectures": ["DeepseekV4ForCausalLM"]}))

    def fetch(source: Any, commit: str, names: list[str], progress: Any) -> Path:
        fetched.extend(names)
        return tmp_path / "v4"

    index = "model.safetensors.index.json"
    names = ["config.json", "model-00001-of-00046.safetensors", index, "tokenizer.json"]
    monkeypatch.setattr(hub, "lookup", lambda source: (COMMIT, names))
    monkeypatch.setattr(hub, "fetch", fetch)
    assert find_release("org/v4", "main", weights=True).source["revision"] == COMMIT
    assert fetched == ["config.json", index]


# ---------------------------------------------------------------- engine files of a bundled drafter


def test_engine_files_say_what_is_left_to_the_engine(tmp_path: Path) -> None:
    from dspark.drafters.inspection import BundledInspection, inspect_folder

    (tmp_path / "v4").mkdir()
    keys = {"block_size": 5, "markov_rank": 256, "noise_token_id": 128799, "target_layer_ids": [40, 41, 42]}
    config = {"architectures": ["DeepseekV4ForCausalLM"], **{f"dspark_{key}": value for key, value in keys.items()}}
    (tmp_path / "v4/config.json").write_text(json.dumps(config))
    found = inspect_folder(tmp_path / "v4")
    assert isinstance(found, BundledInspection)
    release = Release(tmp_path / "v4", {"kind": "hub", "repo": "org/v4", "revision": COMMIT})
    scripts = write_bundled(tmp_path / "out", found, release)
    assert scripts == [f"engines/{name}/launch.sh" for name in ("sglang", "tensorrt_llm", "vllm")]
    assert json.loads((tmp_path / "out/bundled.json").read_text())["drafter"]["gamma"] == 5
    text = (tmp_path / "out/README.md").read_text()
    for said in (
        "dspark_sts_fit",
        "dspark_sps_profiler",
        "not in this version",
        "Nothing here was measured",
        "llamacpp (",
    ):
        assert said in text
    assert all((tmp_path / "out" / script).is_file() for script in scripts) and str(tmp_path) not in text
    assert write_bundled(tmp_path / "out", found, release) == scripts  # its own work is replaced
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/mine.txt").write_text("x")
    with pytest.raises(SettingsError, match="something else is there"):
        write_bundled(tmp_path / "taken", found, release)
