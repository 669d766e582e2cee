"""Packages to measure against: refused before anything runs unless they are there, sound, and of the same target."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "package"))  # fake_build.py

import fake_build

from dspark.config.resolve import resolve
from dspark.errors import IntegrityError, PreflightError
from dspark.package.assemble import assemble
from dspark.package.verify import read_manifest
from dspark.workspace import preflight, rivals
from dspark.workspace.graph import all_settings, instances
from dspark.workspace.layout import Workspace
from dspark.workspace.rivals import open_rival, rival_mistake

CHECKOUT = Workspace(Path(__file__).resolve().parents[3])


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> tuple[Workspace, str]:
    """A workspace with one package in its store; never changed."""
    root = tmp_path_factory.mktemp("rivals")
    assemble(fake_build.make(root / "build"), root / "package", card=fake_build.card)
    workspace = Workspace(root / "workspace")
    digest = read_manifest(root / "package").digests.package_digest
    workspace.package(digest).parent.mkdir(parents=True)
    shutil.move(root / "package", workspace.package(digest))
    return workspace, digest


def test_a_sound_package_of_the_same_target_is_opened(stored: tuple[Workspace, str]):
    workspace, digest = stored
    folder, manifest = open_rival(workspace, digest, fake_build.record())
    assert folder == workspace.root / ".dspark/store/packages" / digest
    assert (manifest.digests.package_digest, manifest.inputs.corpus.domains) == (digest, ("math", "chat"))
    assert rival_mistake(workspace, digest, fake_build.record()) is None
    assert rival_mistake(workspace, digest, None) is None


def test_what_is_not_in_the_store_is_refused_with_the_command_that_brings_it(stored: tuple[Workspace, str]):
    workspace, _ = stored
    missing = "f" * 64
    for record in (None, fake_build.record()):
        error = rival_mistake(workspace, missing, record)
        assert isinstance(error, PreflightError) and missing in error.message
        fetch = error.hint.splitlines()[0]
        assert fetch == f"dspark package pull models:/NAME/VERSION {workspace.package(missing)} --digest {missing}"
        assert "@production" not in error.hint, "another package may hold that by now"


@pytest.mark.parametrize("field", ["weights_digest", "embedding_digest", "head_digest", "tokenizer_digest"])
def test_a_package_of_another_target_is_refused(stored: tuple[Workspace, str], field: str):
    workspace, digest = stored
    other = fake_build.record().model_copy(update={field: "0" * 64})
    with pytest.raises(PreflightError, match=f"belongs to target tiny .*not to this tiny: {field} differ"):
        open_rival(workspace, digest, other)


def test_a_package_with_other_taps_or_another_mask_token_cannot_draft_from_this_targets_features(
    stored: tuple[Workspace, str],
):
    workspace, digest = stored
    other = fake_build.record().model_copy(update={"taps": (0, 3), "mask_token_id": 2})
    with pytest.raises(PreflightError, match="taps, mask_token_id differ"):
        open_rival(workspace, digest, other)


def test_an_altered_or_wrongly_named_package_is_refused(stored: tuple[Workspace, str], tmp_path: Path):
    workspace, digest = stored
    copy = Workspace(tmp_path)
    shutil.copytree(workspace.package(digest), copy.package(digest))
    shutil.copytree(workspace.package(digest), copy.package("e" * 64))
    with pytest.raises(IntegrityError, match="not the one that it is named after") as refused:
        open_rival(copy, "e" * 64, fake_build.record())
    assert f"--digest {'e' * 64}" in refused.value.hint, "the same pull again would bring the same package"
    assert isinstance(rival_mistake(copy, "e" * 64, None), IntegrityError)
    weights = copy.package(digest) / "drafter/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    for record in (None, fake_build.record()):
        error = rival_mistake(copy, digest, record)
        assert isinstance(error, IntegrityError) and "sha256 differs" in error.message


def test_the_manifests_own_digest_is_no_name_of_a_package(stored: tuple[Workspace, str], tmp_path: Path):
    """`verify` takes either digest; the store is keyed by one of them."""
    workspace, digest = stored
    copy = Workspace(tmp_path)
    other = read_manifest(workspace.package(digest)).digests.self_digest
    shutil.copytree(workspace.package(digest), copy.package(other))
    for record in (None, fake_build.record()):
        with pytest.raises(IntegrityError, match="named after"):
            open_rival(copy, other, record)


def test_preflight_says_all_that_is_wrong_with_rivals_and_asks_nothing_without_them(monkeypatch: pytest.MonkeyPatch):
    build = resolve(CHECKOUT.root, build="tiny", flags=(f"against={'d' * 64}",)).chosen
    assert [problem.what[:72] for problem in preflight.unusable_rivals(CHECKOUT, build)] == [f"package {'d' * 64}"]
    monkeypatch.setattr(rivals, "rival_mistake", lambda *asked: pytest.fail("nothing is to be looked at"))
    assert preflight.unusable_rivals(CHECKOUT, resolve(CHECKOUT.root, build="tiny").chosen) == []


def test_naming_a_rival_changes_the_inputs_of_what_measures_and_of_nothing_else():
    def settings(*flags: str):
        resolved = resolve(CHECKOUT.root, build="smollm2-135m", flags=flags).chosen
        names = [instance.name for instance in instances(resolved)]
        return dict(zip(names, all_settings(CHECKOUT, resolved), strict=True))

    plain, measured = settings(), settings(f"against={'d' * 64}")
    assert {name for name in plain if plain[name] != measured[name]} == {
        "evaluate@smollm2-135m", "certify@smollm2-135m+reference-cpu", "package@smollm2-135m"}  # fmt: skip
    assert measured["certify@smollm2-135m+llamacpp-cpu"].against is None
