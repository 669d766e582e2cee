"""`dspark retrain`: what it asks a run to do, and what it refuses before anything is changed."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "package"))  # fake_build.py
sys.path.insert(0, str(Path(__file__).parents[1] / "registry"))  # fake_server.py

import fake_build
from fake_server import FakeServer, serving

from dspark.config.build import ResolvedBuild
from dspark.errors import DsparkError, IntegrityError, PreflightError, ServiceError, SettingsError
from dspark.io.jsonfile import write_model
from dspark.package.assemble import assemble
from dspark.package.verify import read_manifest, verify
from dspark.workspace import retrain as module
from dspark.workspace.layout import Workspace
from dspark.workspace.listener import Silent
from dspark.workspace.results import RunRecord
from dspark.workspace.retrain import Retraining, retrain
from dspark.workspace.run import Request, resolve_request

BUILD = """target: tiny
recipe: dspark
domains: [math]
evaluation_domains: [code]
serving_profiles: [cpu]
drafter: {gamma: 3, layers: 1, markov: {rank: 4}}
training: {steps: 5}
"""


GATES = (Path(__file__).resolve().parents[3] / "pipeline/gates.yaml").read_text()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of build `demo`, trained on math and chat; never changed."""
    root = tmp_path_factory.mktemp("build")
    assemble(fake_build.make(root), root / "package", card=fake_build.card)
    return root / "package"


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    root = tmp_path / "workspace"
    rows = "source: {kind: jsonl, path: rows.jsonl}\n"
    files = {
        "params.yaml": "",
        "pipeline/builds/demo.yaml": BUILD,
        "pipeline/targets/tiny.yaml": "source: {kind: folder, path: /x}\n",
        "pipeline/recipes/dspark.yaml": "",
        **{f"pipeline/domains/{name}.yaml": rows for name in ("math", "chat", "code")},
        "pipeline/domains/rows.jsonl": '{"prompt": "hello"}\n',
        "serving_profiles/cpu.yaml": "engine: reference\naccess: local\n",
        "pipeline/gates.yaml": GATES,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    found = Workspace(root)
    write_model(found.target_record("tiny"), fake_build.record())
    return found


@pytest.fixture
def server(package: Path, tmp_path: Path) -> Iterator[FakeServer]:
    """A registry that has the package in production."""
    shutil.copytree(package, tmp_path / "store/artifacts/artifacts/package")
    tags = {f"dspark.{key}": value for key, value in read_manifest(package).digests.model_dump().items()}
    with serving(tmp_path / "store") as found:
        found.register("mlflow-artifacts:/artifacts", tags)
        yield found


@pytest.fixture
def ask(
    workspace: Workspace, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., ResolvedBuild]:
    """Ask for a retraining on `sql`; the build that the run would make."""
    prompts = tmp_path / "sql.jsonl"
    prompts.write_text('{"prompt": "select"}\n')
    asked_for: list[Request] = []
    judged: list[str | None] = []

    def judge(package: Path, policy: Any, *, champion: str | None, profiles: Any) -> None:
        judged.append(champion)

    monkeypatch.setattr(module, "judge", judge)
    monkeypatch.setattr(module, "run", lambda workspace, request, listener: asked_for.append(request))
    monkeypatch.setattr(module, "install_stop_signals", lambda: None)

    def go(**changes: Any) -> ResolvedBuild:
        asked = replace(Retraining("sql", prompts, 0.25, None, server.address), **changes)
        done = retrain(workspace, Request(build="demo", flags=("training.seed=3",)), asked, Silent())
        resolved = resolve_request(workspace, asked_for[-1]).chosen
        assert judged.pop() == done.champion == resolved.build.against
        return resolved

    return go


def contents(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_the_run_goes_on_from_the_champion_with_all_domains_and_no_declaration_of_the_build_changes(
    workspace: Workspace, package: Path, server: FakeServer, ask: Callable[..., ResolvedBuild]
) -> None:
    """chat is in no build file any more, but the champion knows it: it is replayed and measured all the same."""
    before = contents(workspace.root / "pipeline")
    resolved = ask()
    digest = read_manifest(package).digests.package_digest
    build = resolved.build
    assert build.corpus.domains == ("math", "chat", "sql") and build.corpus.evaluation_domains == ("code",)
    assert build.against == digest
    training = build.training
    assert training.initial is not None and training.initial.package == digest
    assert training.mixture is not None and (training.mixture.new, training.mixture.replay) == (("sql",), 0.25)
    assert (training.steps, training.seed) == (5, 3)
    verify(workspace.package(digest), digest=digest)
    after = contents(workspace.root / "pipeline")
    assert after.keys() - before.keys() == {"domains/sql.yaml", "domains/sql.jsonl"} and before.items() <= after.items()
    origins = {name: origin for name, _, origin in resolved.rows()}
    assert origins["training.mixture.replay"].startswith("dspark retrain --domain sql")

    server.asked.clear()
    assert ask().build == build  # what a kill cut short goes on as the same run
    assert server.fetched() == []


def test_a_domain_that_is_declared_is_trained_on_again_in_its_place(ask: Callable[..., ResolvedBuild]) -> None:
    build = ask(domain="math", prompts=None).build
    assert build.corpus.domains == ("math", "chat")
    assert build.training.mixture is not None and build.training.mixture.new == ("math",)


def test_another_package_is_gone_on_from_if_one_is_named(
    workspace: Workspace, package: Path, server: FakeServer, ask: Callable[..., ResolvedBuild], tmp_path: Path
) -> None:
    digest = read_manifest(package).digests.package_digest
    assert ask(source=str(package)).build.against == digest
    assert server.asked == []
    assert ask(source="models:/dspark-demo/1").build.against == digest
    with pytest.raises(SettingsError, match="there is no such folder"):
        ask(source=str(tmp_path / "nowhere"))
    broken = Path(shutil.copytree(package, tmp_path / "broken"))
    (broken / "drafter/model.safetensors").write_bytes(b"other")
    shutil.rmtree(workspace.package(digest))
    with pytest.raises(IntegrityError):
        ask(source=str(broken))
    with pytest.raises(SettingsError, match="models:/dspark-demo/7 is not in the registry"):
        ask(source="models:/dspark-demo/7")


def no_champion(server: FakeServer, workspace: Workspace) -> None:
    server.aliases.clear()


def evaluated(server: FakeServer, workspace: Workspace) -> None:
    path = workspace.root / "pipeline/builds/demo.yaml"
    path.write_text(BUILD.replace("[code]", "[sql]"))
    shutil.copy(workspace.root / "pipeline/domains/math.yaml", workspace.root / "pipeline/domains/sql.yaml")


def other_geometry(server: FakeServer, workspace: Workspace) -> None:
    (workspace.root / "pipeline/builds/demo.yaml").write_text(BUILD.replace("gamma: 3", "gamma: 2"))


def other_target(server: FakeServer, workspace: Workspace) -> None:
    record = fake_build.record().model_copy(update={"weights_digest": "f" * 64})
    write_model(workspace.target_record("tiny"), record)


def lost_domain(server: FakeServer, workspace: Workspace) -> None:
    (workspace.root / "pipeline/domains/chat.yaml").unlink()


def no_registry(server: FakeServer, workspace: Workspace) -> None:
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (no_champion, PreflightError, "build 'demo': nothing is in production, so there is no drafter to go on from"),
        (evaluated, SettingsError, "domain 'sql' is only ever evaluated in build 'demo'"),
        (other_geometry, SettingsError, "gamma is 3, here 2"),
        (other_target, SettingsError, r"belongs to org/tiny-llama .* \(weights_digest differ\)"),
        (lost_domain, PreflightError, "the champion was trained on chat, not declared in pipeline/domains"),
        (no_registry, ServiceError, "MLflow at "),
    ],
)
def test_what_cannot_be_retrained_is_refused_and_declares_nothing(
    workspace: Workspace,
    server: FakeServer,
    ask: Callable[..., ResolvedBuild],
    change: Callable[[FakeServer, Workspace], None],
    error: type[DsparkError],
    said: str,
) -> None:
    change(server, workspace)
    before = contents(workspace.root / "pipeline")
    with pytest.raises(error, match=said):
        ask()
    assert contents(workspace.root / "pipeline") == before


def test_a_workspace_without_a_registry_has_no_champion_and_gets_none_made(
    workspace: Workspace, ask: Callable[..., ResolvedBuild]
) -> None:
    database = workspace.root / "mlflow/mlflow.db"
    with pytest.raises(PreflightError, match="there is no registry yet") as refused:
        ask(tracking_uri=f"sqlite:///{database}")
    assert "dspark promote dspark-demo --to production" in refused.value.hint
    assert not database.parent.exists()


def test_a_domain_that_nobody_knows_needs_prompts(ask: Callable[..., ResolvedBuild]) -> None:
    with pytest.raises(SettingsError, match="domain 'sql' is not declared") as refused:
        ask(prompts=None)
    assert "--prompts FILE" in refused.value.hint


def test_a_second_mixture_is_refused_where_it_is_said(workspace: Workspace) -> None:
    asked = Retraining("sql", None, 0.5, None, "")
    variable = "DSPARK_TRAINING__MIXTURE__REPLAY"
    for request, said in (
        (Request(build="demo", flags=("training.mixture.replay=0.3",)), "--set training.mixture.replay=0.3: "),
        (Request(build="demo", environment={variable: "0.3"}), f"{variable}: "),
    ):
        with pytest.raises(SettingsError, match=f"^{said}") as refused:
            retrain(workspace, request, asked, Silent())
        assert refused.value.hint == "give the share as --replay SHARE"


def test_alone_in_its_build_a_domain_has_nothing_to_be_mixed_with() -> None:
    asked: Any = SimpleNamespace(domain="sql", replay=0.5)
    assert "mixture" not in module._layer(["sql"], asked, "0" * 64)["training"]


def test_the_command_that_goes_on_with_a_retraining_is_the_retraining() -> None:
    words = Retraining("sql", Path("my prompts.jsonl"), 0.5, "models:/x@staging", "").words
    record = RunRecord(id="1", build="demo", pid=1, started=0.0, flags=["training.steps=9"], verb=list(words))
    assert record.command == (
        "dspark retrain --domain sql --prompts 'my prompts.jsonl' --replay 0.5 --from models:/x@staging "
        "--build demo --set training.steps=9"
    )
    assert RunRecord(id="1", build="demo", pid=1, started=0.0).command == "dspark run --build demo"


def test_the_command_that_goes_on_sends_the_package_to_where_it_was_to_go() -> None:
    """As it was asked for, all but a password, which is stored nowhere."""
    assert Request().options == ()
    request = Request(publish=False, tracking_uri="https://me:secret@mlflow.example.org")
    record = RunRecord(id="1", build="demo", pid=1, started=0.0, flags=["training.seed=1"], options=[*request.options])
    assert record.command == (
        "dspark run --build demo --set training.seed=1 --tracking-uri 'https://me:***@mlflow.example.org' --no-publish"
    )
