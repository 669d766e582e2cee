"""Outputs travel by DVC's remote and `dvc.lock`: nothing is made again elsewhere. In S3: `tests/services`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import FakeSandbox

pytestmark = pytest.mark.long
DECLARED = ("dvc.yaml", "params.yaml", "pipeline", "serving_profiles", "stages", ".dvcignore", "description.json")


def test_a_build_is_pulled_and_goes_on_where_it_stood(made: FakeSandbox, tmp_path: Path) -> None:
    refused = made.dspark("remote", "push", "--target", "fake")
    assert refused.code == 3 and "dvc remote add --default" in refused.err, refused.err
    # As `dvc remote add --default storage FOLDER` writes it.
    remote = f"['remote \"storage\"']\n    url = {tmp_path / 'storage'}\n"
    made.edit(".dvc/config", lambda text: text.replace("[core]\n", "[core]\n    remote = storage\n", 1) + remote)
    clone = type(made)(tmp_path / "clone")
    for name in (*DECLARED, ".dvc/config"):
        (clone.root / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (made.root / name).is_dir() else shutil.copyfile
        copy(made.root / name, clone.root / name)

    nothing = clone.dspark("remote", "pull", "--target", "fake")
    assert nothing.code == 3 and "git add --force dvc.lock" in nothing.err, nothing.err
    shutil.copyfile(made.root / "dvc.lock", clone.root / "dvc.lock")
    lacking = clone.dspark("remote", "pull", "--target", "fake")
    assert lacking.code == 3 and "dspark remote push --build fake" in lacking.err, lacking.err

    pushed = made.dspark("remote", "push", "--target", "fake", "--json")
    assert pushed.code == 0, pushed.err
    assert len(pushed.json["stages"]) == 10 and pushed.json["files"] > 10 and pushed.json["unmade"] == []
    pulled = clone.dspark("remote", "pull", "--target", "fake", "--json")
    assert pulled.code == 0 and pulled.json == {**pushed.json, "direction": "pull", "files": pulled.json["files"]}
    assert clone.ran() == []
    assert not (clone.root / ".dspark/store/features").exists()
