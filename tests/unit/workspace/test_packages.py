"""The store of packages: kept verified, refused when damaged or of something else."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "package"))  # fake_build.py

import fake_build

from dspark.config.models import Build, InitialWeights
from dspark.errors import IntegrityError, PreflightError, SettingsError
from dspark.io.digest import digest_file
from dspark.io.jsonfile import write_model
from dspark.package.assemble import assemble
from dspark.package.verify import read_manifest
from dspark.workspace.layout import Workspace
from dspark.workspace.packages import initial_files, keep_package, kept_package


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package made by the real `assemble`; never changed."""
    root = tmp_path_factory.mktemp("build")
    assemble(fake_build.make(root), root / "package", card=fake_build.card)
    return root / "package"


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    found = Workspace(tmp_path / "workspace")
    write_model(found.target_record("tiny"), fake_build.record())
    return found


@pytest.fixture
def starting_from(package: Path) -> Callable[..., Build]:
    """The package's own build with something changed, training from the package."""

    def make(**changes: Any) -> Build:
        build = fake_build.build()
        initial = InitialWeights(package=read_manifest(package).digests.package_digest)
        training = build.training.model_copy(update={"initial": initial})
        return build.model_copy(update={"training": training, **changes})

    return make


def test_a_package_is_kept_under_its_digest_and_read_back_verified(workspace: Workspace, package: Path) -> None:
    manifest = keep_package(workspace, package)
    digest = manifest.digests.package_digest
    assert kept_package(workspace, digest) == manifest == keep_package(workspace, package)
    assert [path.name for path in workspace.package(digest).parent.iterdir()] == [digest]


def test_what_is_damaged_is_not_kept_and_what_was_damaged_since_is_refused_then_replaced(
    workspace: Workspace, package: Path, tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(package, tmp_path / "broken"))
    (broken / "drafter/model.safetensors").write_bytes(b"other weights")
    with pytest.raises(IntegrityError):
        keep_package(workspace, broken)
    digest = read_manifest(package).digests.package_digest
    with pytest.raises(PreflightError, match=f"package {digest} is not in"):
        kept_package(workspace, digest)
    folder = workspace.package(digest)
    assert not folder.exists() and not list(folder.parent.iterdir())
    keep_package(workspace, package)
    (folder / "drafter/model.safetensors").write_bytes(b"other weights")
    with pytest.raises(IntegrityError) as refused:
        kept_package(workspace, digest)
    assert refused.value.hint.startswith(f"remove {folder} and fetch it again:\n")
    assert f"{folder} --digest {digest}" in refused.value.hint
    keep_package(workspace, package)
    assert kept_package(workspace, digest).digests.package_digest == digest


def test_training_depends_on_the_very_files_of_the_package(
    workspace: Workspace, package: Path, starting_from: Callable[..., Build]
) -> None:
    assert initial_files(workspace, fake_build.build()) == {}
    with pytest.raises(PreflightError, match="is not in"):
        initial_files(workspace, starting_from())
    keep_package(workspace, package)
    names = ("drafter/config.json", "drafter/model.safetensors")
    assert initial_files(workspace, starting_from()) == {name: digest_file(package / name) for name in names}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gamma": 2}, "gamma is 3, here 2"),
        ({"layers": 2}, "layers is 1, here 2"),
        ({"markov": {"rank": 8}}, "markov_rank is 4, here 8"),
        ({"draft_vocab_size": 16}, "draft_vocab_size is None, here 16"),
    ],
)
def test_another_geometry_is_refused_before_anything_runs(
    workspace: Workspace, package: Path, starting_from: Callable[..., Build], changes: dict[str, Any], reason: str
) -> None:
    keep_package(workspace, package)
    settings = fake_build.build().drafter.model_dump()
    drafter = type(fake_build.build().drafter).model_validate(settings | changes)
    with pytest.raises(SettingsError, match=reason):
        initial_files(workspace, starting_from(drafter=drafter))


def test_other_taps_and_another_target_are_refused(
    workspace: Workspace, package: Path, starting_from: Callable[..., Build]
) -> None:
    keep_package(workspace, package)
    record = fake_build.record()
    write_model(workspace.target_record("tiny"), record.model_copy(update={"taps": (0, 1)}))
    with pytest.raises(SettingsError, match=r"taps is \[0, 2\], here \[0, 1\]"):
        initial_files(workspace, starting_from())
    other = record.model_copy(update={"weights_digest": "f" * 64, "revision": "r2"})
    write_model(workspace.target_record("tiny"), other)
    with pytest.raises(SettingsError, match=r"belongs to org/tiny-llama r1, .* r2 \(weights_digest differ\)"):
        initial_files(workspace, starting_from())
