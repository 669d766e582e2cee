"""Whatever is changed, missing, added or linked in a package is refused with exit code 7."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark.errors import IntegrityError, SettingsError
from dspark.package.signature import sign, write_keys
from dspark.package.verify import read_manifest, verify


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def refused(folder: Path, key: Path | None = None) -> str:
    with pytest.raises(IntegrityError) as caught:
        verify(folder, key=key)
    assert caught.value.exit_code == 7
    assert caught.value.hint
    return caught.value.message


def test_a_pristine_package_verifies_and_says_what_that_means(pristine):
    manifest = read_manifest(pristine)
    report = verify(pristine)
    assert report.authenticated == "nothing" and "not authenticity" in report.note
    assert report.files == len(files_of(pristine)) - 1
    assert report.bytes == sum(
        (pristine / name).stat().st_size for name in files_of(pristine) if name != "manifest.json"
    )
    assert verify(pristine, digest=manifest.digests.package_digest).authenticated == "deployable files"
    assert verify(pristine, digest=manifest.digests.self_digest).authenticated == "everything"
    assert "evidence" in verify(pristine, digest=manifest.digests.package_digest).note
    assert "every file" in verify(pristine, digest=manifest.digests.self_digest).note


def test_another_digest_is_refused_and_a_malformed_one_is_a_usage_error(pristine):
    with pytest.raises(IntegrityError, match="neither"):
        verify(pristine, digest="0" * 64)
    upper = read_manifest(pristine).digests.package_digest.upper()
    for wrong in (upper, "abc", "", upper.lower() + "\n"):
        with pytest.raises(SettingsError):
            verify(pristine, digest=wrong)


def test_one_flipped_bit_in_any_file_is_refused(pristine, tmp_path):
    """Every file of a signed package, its signature too, at its first, middle and last byte: 200 flips and more."""
    folder = Path(shutil.copytree(pristine, tmp_path / "p"))
    private = tmp_path / "key.pem"
    public = write_keys(private)
    sign(folder, private)
    tries = 0
    names = files_of(folder)
    assert {"manifest.json", "manifest.sig"} <= set(names)
    for name in names:
        path = folder / name
        good = path.read_bytes()
        last, middle = len(good) - 1, len(good) // 2
        for position, bit in ((0, 1), (0, 128), (middle, 1), (middle, 16), (last, 1), (last, 8), (last, 128)):
            bad = bytearray(good)
            bad[position] ^= bit
            path.write_bytes(bad)
            refused(folder, key=public)
            tries += 1
        path.write_bytes(good)
    assert tries == 7 * len(names) >= 200
    assert verify(folder, key=public).signature == "valid"


@pytest.mark.parametrize("kind", ["nowhere", "file", "empty"])
def test_a_path_that_is_no_package_is_named_as_such(tmp_path, kind):
    path = tmp_path / "p"
    if kind == "file":
        path.write_text("x")
    elif kind == "empty":
        path.mkdir()
    said = {"nowhere": "does not exist", "file": "is not a folder", "empty": "it is not a package"}[kind]
    with pytest.raises(IntegrityError, match=said):
        verify(path)


def test_a_missing_or_cut_or_longer_file_is_refused(pristine, tmp_path):
    folder = Path(shutil.copytree(pristine, tmp_path / "p"))
    for name in files_of(folder):
        path = folder / name
        good = path.read_bytes()
        path.unlink()
        refused(folder)
        for bad in (b"", good[:-1], good + b"\n", good + b"\0"):
            path.write_bytes(bad)
            refused(folder)
        path.write_bytes(good)
    verify(folder)


@pytest.mark.parametrize(
    "name",
    [
        "extra.json",
        ".hidden",
        "manifest.json.bak",
        "manifest.sig",
        "drafter/extra.bin",
        "evidence/extra.json",
        "evidence/deep/er/extra.json",
        "engines/sglang/.env",
        "README.MD",
        "Manifest.json",
        "scheduler/Scheduler.json",
        "evidence/e\u0301.json",
        "evidence/new\nline",
        "evidence/not-utf8-\udcff.json",
    ],
)
def test_a_file_too_many_is_refused_wherever_it_stands(package, name):
    path = package / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"{}")
    refused(package)


@pytest.mark.parametrize("name", ["empty", "evidence/empty", "drafter/empty", "Drafter"])
def test_an_empty_folder_too_many_is_refused(package, name):
    (package / name).mkdir()
    assert "folder" in refused(package)


def test_links_are_refused_even_to_the_right_content(pristine, package, tmp_path):
    for name in files_of(package):
        path = package / name
        elsewhere = tmp_path / "elsewhere"
        shutil.copyfile(path, elsewhere)
        path.unlink()
        path.symlink_to(elsewhere)
        refused(package)
        path.unlink()
        os.link(elsewhere, path)
        if name != "manifest.json":
            assert "hard link" in refused(package)
        path.unlink()
        shutil.copyfile(elsewhere, path)
        elsewhere.unlink()
    verify(package)


def test_a_linked_manifest_is_refused_too(package, tmp_path):
    os.link(package / "manifest.json", tmp_path / "other name")
    assert "hard link" in refused(package)


def test_a_linked_folder_and_a_dangling_link_are_refused(package, tmp_path):
    shutil.move(package / "drafter", tmp_path / "drafter")
    (package / "drafter").symlink_to(tmp_path / "drafter")
    assert "link" in refused(package)
    (package / "drafter").unlink()
    shutil.move(tmp_path / "drafter", package / "drafter")
    (package / "nowhere").symlink_to("does-not-exist")
    assert "link" in refused(package)


def test_pipes_and_sockets_are_refused_without_waiting(package):
    os.mkfifo(package / "pipe")
    assert "special" in refused(package)
    (package / "pipe").unlink()
    weights = package / "drafter" / "model.safetensors"
    weights.unlink()
    os.mkfifo(weights)
    assert "special" in refused(package)
    weights.unlink()
    here = Path.cwd()
    os.chdir(package)  # a socket's path must be short
    try:
        with socket.socket(socket.AF_UNIX) as endpoint:
            endpoint.bind("drafter/model.safetensors")
            assert "special" in refused(package)
    finally:
        os.chdir(here)


def test_a_pipe_in_place_of_the_manifest_is_refused_without_waiting(package):
    (package / "manifest.json").unlink()
    os.mkfifo(package / "manifest.json")
    assert "regular" in refused(package)


def test_a_folder_in_place_of_a_file_and_a_file_in_place_of_a_folder(package):
    (package / "README.md").unlink()
    (package / "README.md").mkdir()
    refused(package)
    shutil.rmtree(package / "evidence")
    (package / "evidence").write_text("x")
    refused(package)


def test_swapped_and_renamed_files_are_refused(package):
    one, two = package / "scheduler/scheduler.json", package / "scheduler/calibration.json"
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    refused(package)
    one.write_bytes(first)
    two.rename(package / "scheduler/calibrations.json")
    two.write_bytes(second)
    refused(package)


def test_no_package_at_all_is_refused(tmp_path):
    refused(tmp_path / "nothing")
    refused(tmp_path)
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file")


def test_a_package_may_be_named_through_a_link(pristine, tmp_path):
    """The link stands outside: `current -> package-1` is how packages are switched."""
    (tmp_path / "current").symlink_to(pristine)
    verify(tmp_path / "current")


def test_an_unreadable_file_is_refused(package, monkeypatch):
    """As for a user without the right to read it (tests may run as root, who reads everything)."""
    real = os.open

    def refusing(path, flags, *rest, **keywords):
        if path == "README.md":
            raise PermissionError(13, "Permission denied", path)
        return real(path, flags, *rest, **keywords)

    monkeypatch.setattr(os, "open", refusing)
    assert "Permission denied" in refused(package)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_other_bytes_of_the_manifest_are_refused(pristine, tmp_path_factory, data):
    """Insertions, deletions and replacements anywhere: there is one spelling only."""
    good = (pristine / "manifest.json").read_bytes()
    start = data.draw(st.integers(0, len(good)))
    end = data.draw(st.integers(start, min(len(good), start + 4)))
    patch = data.draw(st.binary(max_size=4))
    bad = good[:start] + patch + good[end:]
    if bad == good:
        return
    folder = tmp_path_factory.mktemp("m")
    (folder / "manifest.json").write_bytes(bad)
    with pytest.raises(IntegrityError):
        read_manifest(folder)


def test_verification_needs_numpy_and_pydantic_only(pristine):
    code = (
        "import sys; from pathlib import Path; from dspark.package.verify import verify; verify(Path(sys.argv[1]));"
        "heavy = ['torch', 'transformers', 'mlflow', 'dvc', 'onnx', 'onnxruntime', 'pickle5', 'dill', 'cloudpickle'];"
        "sys.exit(','.join(name for name in heavy if name in sys.modules) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code, str(pristine)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
