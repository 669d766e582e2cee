"""One holder of a stage, one history, whoever else promotes at the same time and wherever it is interrupted."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from race import exit_code, forked

from dspark.errors import GateError, IntegrityError, Interrupted, SettingsError
from dspark.io.progress import Progress
from dspark.package.verify import read_manifest
from dspark.registry.catalogue import find_build, holders
from dspark.registry.connection import connected
from dspark.registry.gate_report import GateReport, GateRow
from dspark.registry.lookup import find_version
from dspark.registry.promotion import Author, gates_of, promote, rollback
from dspark.registry.receipts import default_uri
from dspark.registry.stages import read_chain, settled

AUTHOR = Author("ada@loom", "c0ffee")
MODEL = "dspark-demo-production"


@pytest.fixture
def workspace(tmp_path, published) -> Path:
    (tmp_path / "mlflow").mkdir()
    shutil.copyfile(published / "mlflow" / "mlflow.db", tmp_path / "mlflow" / "mlflow.db")
    return tmp_path


@pytest.fixture
def registry(workspace):
    with connected(default_uri(workspace), workspace=workspace) as opened:
        yield opened


def judge(verdict="pass", asked=None):
    """Gates that are open or shut, for what they are asked about; what they read in a package is tested with them."""

    def answer(package: Path, champion: str | None) -> GateReport:
        manifest = read_manifest(package)
        if asked is not None:
            asked.append((manifest.digests.package_digest, champion))
        row = GateRow(gate="tau math, temperature 0", verdict=verdict, reason="at most 3 % less")
        return GateReport.of(
            [row],
            build=manifest.build,
            package_digest=manifest.digests.package_digest,
            champion=champion,
            stage="production",
        )

    return answer


def push(registry, workspace, version=None, *, stage="production", verdict="pass", **more):
    more.setdefault("judge", judge(verdict))
    return promote(registry, "demo", stage, author=AUTHOR, scratch=workspace / "work", version=version, **more)


def back(registry, workspace, *, stage="production", **more):
    more.setdefault("reason", "slower under load")
    return rollback(registry, "demo", stage, author=AUTHOR, scratch=workspace / "work", **more)


def story(registry, stage="production") -> list[int]:
    return [entry.source_version for entry in read_chain(registry, "demo", stage).links]


def aliases(registry, stage="production") -> tuple[int | None, int | None]:
    """What the alias names on the build's model and on the stage's."""
    models = [registry.client.get_registered_model(name) for name in ("dspark-demo", f"dspark-demo-{stage}")]
    return tuple(int(model.aliases[stage]) if stage in model.aliases else None for model in models)


def test_a_promotion_is_recorded_with_everything_about_it(registry, workspace):
    asked = []
    done = push(registry, workspace, 1, judge=judge(asked=asked), reason="first release")
    assert (done.outcome, done.source_version, done.replaces) == ("done", 1, None)
    assert (done.link.by, done.link.git_commit, done.link.reason) == ("ada@loom", "c0ffee", "first release")
    assert asked == [(done.package_digest, None)]
    again = push(registry, workspace, judge=judge(asked=asked))  # the candidate: what was published last
    assert (again.outcome, again.source_version, again.replaces) == ("done", 3, 1)
    assert asked[1] == (again.package_digest, done.package_digest)  # held against the champion
    assert story(registry) == [1, 3] and aliases(registry) == (3, 2)

    copy = registry.client.get_model_version(MODEL, "2")
    original = registry.client.get_model_version("dspark-demo", "3")
    assert copy.source == "models:/dspark-demo/3" and copy.run_id == original.run_id
    assert copy.tags["dspark.package_digest"] == original.tags["dspark.package_digest"]
    assert copy.tags["dspark.promotion.replaces"] == "1"
    chain = read_chain(registry, "demo", "production")
    report = gates_of(registry, chain, chain.head)
    assert report.passed and report.champion == done.package_digest
    assert not list((workspace / "work").iterdir())


def test_promoting_what_holds_the_stage_changes_nothing(registry, workspace):
    push(registry, workspace, 1)
    assert push(registry, workspace, 1).outcome == "already"
    assert story(registry) == [1]


def test_shut_gates_refuse_and_force_leaves_a_mark(registry, workspace):
    push(registry, workspace, 1)
    refused = push(registry, workspace, 2, verdict="worse")
    assert refused.outcome == "refused" and refused.gates.refusals and story(registry) == [1]
    for reason in (None, "  "):
        with pytest.raises(SettingsError, match="reason"):
            push(registry, workspace, 2, verdict="worse", force=True, reason=reason)
    forced = push(registry, workspace, 2, verdict="worse", force=True, reason="the old one crashes")
    assert forced.outcome == "done" and forced.link.forced and forced.link.reason == "the old one crashes"
    push(registry, workspace, 3)
    assert [link.forced for link in read_chain(registry, "demo", "production").links] == [False, True, False]
    # Not needed where the gates are open, so no mark either.
    assert not push(registry, workspace, 1, force=True, reason="in a hurry").link.forced


def test_a_dry_run_asks_the_gates_and_writes_nothing(registry, workspace):
    assert push(registry, workspace, 1, dry_run=True).outcome == "would"
    assert push(registry, workspace, 1, dry_run=True, verdict="fail").outcome == "refused"
    assert push(registry, workspace, 1, dry_run=True, verdict="fail", force=True, reason="r").outcome == "would"
    assert not registry.client.search_registered_models(f"name = '{MODEL}'")


def test_from_staging_to_production(registry, workspace):
    """What is rehearsed is what is promoted, whatever has become the candidate since."""
    asked = []
    push(registry, workspace, 1)
    push(registry, workspace, 2, stage="staging", judge=judge(asked=asked))
    assert aliases(registry, "staging") == (2, 1) and aliases(registry) == (1, 1)
    done = push(registry, workspace, alias="staging")
    assert done.source_version == 2 and story(registry) == [1, 2] and story(registry, "staging") == [2]
    assert asked[0][1] is not None  # against production's holder, since nothing else is the champion
    # The copy is one of the build's version: nothing of its promotion into staging came along.
    copy = registry.client.get_model_version(MODEL, "2")
    assert copy.tags["dspark.promotion.into"] == MODEL and copy.source == "models:/dspark-demo/2"


def test_rolling_back_adds_to_history(registry, workspace):
    for version in (1, 2, 3):
        push(registry, workspace, version)
    assert back(registry, workspace, dry_run=True).outcome == "would"
    first = back(registry, workspace)
    assert (first.source_version, first.replaces, first.link.kind) == (2, 3, "rollback")
    assert first.link.reason == "slower under load" and aliases(registry) == (2, 4)
    registry.client.delete_model_version("dspark-demo", "1")  # its copy in the stage is still there
    assert back(registry, workspace).source_version == 1
    assert story(registry) == [1, 2, 3, 2, 1]
    with pytest.raises(SettingsError, match="first that held"):
        back(registry, workspace)
    with pytest.raises(SettingsError, match="reason"):
        back(registry, workspace, reason=" ")
    with pytest.raises(SettingsError, match="nothing of build 'demo' holds staging"):
        back(registry, workspace, stage="staging")


def test_what_is_not_there_is_said_with_what_is(registry, workspace):
    with pytest.raises(SettingsError, match="no version 9"):
        push(registry, workspace, 9)
    with pytest.raises(SettingsError, match="no version holds staging"):
        push(registry, workspace, alias="staging")
    with pytest.raises(SettingsError) as caught:
        find_build(registry, "demmo")
    assert "did you mean 'demo'?" in caught.value.hint
    assert find_build(registry, "demo") == find_build(registry, "dspark-demo") == "demo"
    push(registry, workspace, 1)
    for name in (MODEL, "demo-production", "it's", ""):
        with pytest.raises(SettingsError):
            find_build(registry, name)


def test_a_build_that_is_called_like_a_stage_is_not_taken_for_one(registry, workspace):
    registry.client.create_registered_model(MODEL)
    with pytest.raises(SettingsError, match="belongs to a build"):
        push(registry, workspace, 1)


def test_a_package_that_was_changed_in_the_registry_is_not_promoted(registry, workspace, monkeypatch, tmp_path):
    """Both a changed byte and a sound package of another digest in its place."""
    place = Path(registry.client.get_model_version_download_uri("dspark-demo", "1").removeprefix("file://"))
    other = Path(registry.client.get_model_version_download_uri("dspark-demo", "2").removeprefix("file://"))
    kept = tmp_path / "kept"
    shutil.move(place / "artifacts" / "package", kept)
    try:
        for damage in (_flip, _swap):
            damage(kept, other / "artifacts" / "package", place / "artifacts" / "package")
            with pytest.raises(IntegrityError):
                push(registry, workspace, 1, force=True, reason="force does not help here")
            shutil.rmtree(place / "artifacts" / "package")
    finally:
        shutil.move(kept, place / "artifacts" / "package")
    assert story(registry) == []


def _flip(kept: Path, other: Path, place: Path) -> None:
    shutil.copytree(kept, place)
    weights = place / "drafter" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)


def _swap(kept: Path, other: Path, place: Path) -> None:
    shutil.copytree(other, place)


class Hook(Progress):
    """Does something at the n-th safe point."""

    def __init__(self, step: int, action) -> None:
        self.left, self.action = step, action

    def advance(self, count: int = 1, **fields) -> None:
        self.left -= count
        if self.left == 0 and count:
            self.action()


def test_whoever_is_overtaken_is_told_and_stays_void(registry, workspace):
    """The other one promotes between the gates and the copy."""
    push(registry, workspace, 1)
    with pytest.raises(GateError, match="somebody else was first: version 2 replaced version 1") as caught:
        push(registry, workspace, 3, progress=Hook(3, lambda: push(registry, workspace, 2)))
    assert caught.value.exit_code == 6 and "history demo" in caught.value.hint
    chain = read_chain(registry, "demo", "production")
    assert story(registry) == [1, 2] and [(copy.version, copy.void) for copy in chain.void] == [
        (3, "lost to version 2")
    ]
    assert aliases(registry) == (2, 2)
    assert push(registry, workspace, 3).outcome == "done" and story(registry) == [1, 2, 3]


def test_an_alias_that_is_set_too_late_is_set_right_by_who_set_it(registry, workspace):
    """The first has won and is about to set the aliases; the second replaces it and sets them; then the first does."""
    push(registry, workspace, 1)

    class Late(Client):
        def __getattr__(self, name):
            found = getattr(self._client, name)
            if name != "set_registered_model_alias":
                return found

            def late(*arguments):
                if self._left:
                    self._left = 0
                    push(registry, workspace, 3)
                    assert aliases(registry) == (3, 3)
                found(*arguments)

            return late

    assert push(replace(registry, client=Late(registry.client, 1)), workspace, 2).outcome == "done"
    assert story(registry) == [1, 2, 3] and aliases(registry) == (3, 3)


def test_a_stop_is_obeyed_before_the_copy_and_never_after(registry, workspace):
    def stop():
        raise Interrupted("stop")

    for step in (1, 2, 3):
        with pytest.raises(Interrupted):
            push(registry, workspace, 1, progress=Hook(step, stop))
        assert story(registry) == [] and not list((workspace / "work").glob("*"))
    assert push(registry, workspace, 1, progress=Hook(4, stop)).outcome == "done"


class Client:
    """A client whose n-th changing call is the last thing that the process does, before or after it took effect."""

    CHANGES = ("create_registered_model", "create_model_version", "set_registered_model_alias", "set_model_version_tag")

    def __init__(self, client, die_at: float) -> None:
        self._client, self._left = client, die_at

    def __getattr__(self, name):
        found = getattr(self._client, name)
        return self._counted(found) if name in self.CHANGES else found

    def _counted(self, call):
        def counted(*arguments, **more):
            self._tick()
            result = call(*arguments, **more)
            self._tick()
            return result

        return counted

    def _tick(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_in_promotion(workspace, point, version) -> int:
    def work():
        with connected(default_uri(workspace), workspace=workspace) as opened:
            push(replace(opened, client=Client(opened.client, point)), workspace, version)

    return exit_code(forked(work))


def test_killed_between_any_two_calls_it_has_happened_or_not_and_readers_complete_it(workspace, published):
    """Calls of a first promotion: the stage's model, the copy, two aliases. After one is before the next."""
    for point in (1, 3, 4, 6, 8):
        shutil.copyfile(published / "mlflow" / "mlflow.db", workspace / "mlflow" / "mlflow.db")
        assert kill_in_promotion(workspace, point, 2) == -signal.SIGKILL
        with connected(default_uri(workspace), workspace=workspace) as registry:
            happened = point >= 4  # the copy exists
            chain, mended = settled(registry, "demo", "production")
            assert (chain.head is not None) == happened
            assert len(mended) == (0 if point < 4 or point == 8 else 2 if point < 6 else 1)
            if not happened:
                assert push(registry, workspace, 2).outcome == "done"
            assert story(registry) == [2] and aliases(registry) == (2, 1)
            assert settled(registry, "demo", "production")[1] == ()


def test_killed_after_losing_its_copy_is_marked_by_whoever_looks(workspace, registry):
    """Both saw an empty stage. The loser is killed right after its copy: void, and nobody's alias."""
    push(registry, workspace, 1)

    def work():
        with connected(default_uri(workspace), workspace=workspace) as opened:
            client = Client(opened.client, 2)
            push(replace(opened, client=client), workspace, 3, progress=Hook(3, lambda: push(opened, workspace, 2)))

    assert exit_code(forked(work)) == -signal.SIGKILL
    chain = read_chain(registry, "demo", "production")
    assert story(registry) == [1, 2] and [copy.void for copy in chain.void] == [None]
    assert holders(registry, "demo").mended == (f"{MODEL} version 3 marked as void: lost to version 2",)
    assert aliases(registry) == (2, 2)


def test_an_answer_that_got_lost_is_no_failure(registry, workspace):
    """A proxy that times out after the server did its work, and a client that asks again: two copies, one promotion."""
    failure = registry.mlflow.exceptions.MlflowException

    class Lossy(Client):
        def __getattr__(self, name):
            found = getattr(self._client, name)
            if name != "create_model_version":
                return found

            def twice(*arguments, **more):
                found(*arguments, **more)
                found(*arguments, **more)
                raise failure("504 Gateway Time-out")

            return twice

    done = push(replace(registry, client=Lossy(registry.client, 0)), workspace, 1)
    assert done.outcome == "done" and story(registry) == [1] and aliases(registry) == (1, 1)
    assert len(read_chain(registry, "demo", "production").void) == 1


def test_aliases_that_a_hand_moved_are_set_right(registry, workspace):
    registry.client.set_registered_model_alias("dspark-demo", "production", "3")
    held = holders(registry, "demo")
    assert held.mended == ("alias production of dspark-demo named version 3, which nobody promoted: removed",)
    push(registry, workspace, 1)
    push(registry, workspace, 2)
    registry.client.set_registered_model_alias("dspark-demo", "production", "3")
    registry.client.set_registered_model_alias(MODEL, "production", "1")
    assert find_version("models:/dspark-demo@production", registry.uri).number == "2"  # for `package pull`
    assert len(holders(registry, "demo").mended) == 2 and aliases(registry) == (2, 2)
    assert holders(registry, "demo").mended == ()


def test_copies_by_other_hands_are_no_promotions(registry, workspace):
    push(registry, workspace, 1, stage="staging")
    push(registry, workspace, 2)
    for source in ("models:/dspark-demo/3", "models:/dspark-demo-staging/1", f"models:/{MODEL}/1"):
        registry.client.copy_model_version(source, MODEL)
    assert story(registry) == [2] and push(registry, workspace, 3).outcome == "done"
    assert story(registry) == [2, 3] and aliases(registry) == (3, 5)


def test_a_promotion_whose_tags_were_changed_stops_everybody(registry, workspace):
    push(registry, workspace, 1)
    registry.client.set_model_version_tag(MODEL, "1", "dspark.promotion.replaces", "seven")
    for look in (lambda: push(registry, workspace, 2), lambda: holders(registry, "demo")):
        with pytest.raises(IntegrityError, match=f"{MODEL} version 1"):
            look()


def test_a_gate_report_that_was_changed_is_not_shown(registry, workspace):
    push(registry, workspace, 1, verdict="worse", force=True, reason="r")
    chain = read_chain(registry, "demo", "production")
    text = registry.client.get_model_version(MODEL, "1").tags["dspark.promotion.gates"]
    registry.client.set_model_version_tag(MODEL, "1", "dspark.promotion.gates", text.replace("worse", "better"))
    with pytest.raises(IntegrityError, match="gate report was changed"):
        gates_of(registry, chain, chain.head)
