"""What a serving machine fetches is the registered package, whole and verified, or nothing."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dspark.cli.boundary import run_command
from dspark.errors import IntegrityError, Interrupted, PreflightError, ServiceError, SettingsError
from dspark.io.progress import Progress
from dspark.package.signature import sign, write_keys
from dspark.package.verify import read_manifest, verify
from dspark.registry import gathering
from dspark.registry import pull as pulling
from dspark.registry.delivery import waiting_copy
from dspark.registry.events import PackageMade
from dspark.registry.pull import pull
from dspark.registry.signing import register_signature

sys.path.insert(0, str(Path(__file__).parent))  # fake_server.py

from fake_server import ARTIFACTS, serving

ADDRESS = "models:/dspark-demo@production"


@pytest.fixture
def stored(pristine, tmp_path) -> Path:
    """A copy of the package as MLflow stores it: inside a model, beside code that nobody asked for."""
    model = tmp_path / "store" / "1" / "models" / "m-1" / "artifacts"
    shutil.copytree(pristine, model / "artifacts" / "package")
    (model / "MLmodel").write_text("flavors: {python_function: {loader_module: os, code: code}}\n")
    (model / "pyfunc_model.py").write_text("raise SystemExit('ran')\n")
    return model / "artifacts" / "package"


@pytest.fixture
def server(stored, tmp_path):
    """It has the package as version 1 of dspark-demo, in production, and hands it out itself."""
    digests = read_manifest(stored).digests.model_dump()
    with serving(tmp_path / "store") as server:
        server.register("mlflow-artifacts:/1/models/m-1/artifacts", {f"dspark.{k}": v for k, v in digests.items()})
        yield server


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fetch(server, folder, **more):
    return pull(ADDRESS, folder, tracking_uri=server.address, **more)


def refused(server, folder, error=IntegrityError, **more) -> str:
    """Pulling fails, nothing stands in the place, and the same fails again (no half state helps it through)."""
    messages = []
    for _ in range(2):
        with pytest.raises(error) as caught:
            fetch(server, folder, **more)
        messages.append(caught.value.message)
        assert not folder.exists()
    assert messages[0] == messages[1]
    return messages[0]


def test_a_pulled_package_is_the_registered_one_and_nothing_else_is_asked_for(server, pristine, tmp_path):
    folder = tmp_path / "serving" / "dräfter 1"
    manifest = fetch(server, folder)
    assert tree(folder) == tree(pristine) and manifest == read_manifest(pristine)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["dräfter 1"]
    assert not [path for path in server.asked if path.endswith(("MLmodel", ".py"))]
    assert sorted({*server.fetched()} - {"manifest.sig"}) == sorted(tree(pristine))


def test_a_version_is_addressed_by_number_too(server, pristine, tmp_path):
    pull("models:/dspark-demo/1", tmp_path / "p", tracking_uri=server.address + "/")
    assert tree(tmp_path / "p") == tree(pristine)


def test_a_package_that_waited_in_the_store_is_found_under_its_digests(server, stored, pristine, tmp_path):
    """MLflow keeps the name of the folder that was logged."""
    digests = read_manifest(stored).digests
    event = PackageMade(
        time=0.0,
        build="demo",
        folder="builds/demo/package",
        package_digest=digests.package_digest,
        evidence_digest=digests.evidence_digest,
    )
    stored.rename(stored.with_name(waiting_copy(tmp_path, event).name))
    fetch(server, tmp_path / "p")
    assert tree(tmp_path / "p") == tree(pristine)
    stored.parent.rename(stored.parent.with_name("elsewhere"))
    with pytest.raises(IntegrityError, match="holds no package"):
        fetch(server, tmp_path / "q")


@pytest.mark.parametrize("spelled", ["path", "file uri"])
def test_a_store_that_is_a_folder_is_read_itself(server, stored, pristine, tmp_path, spelled):
    model = stored.parents[1].rename(tmp_path / "sto re ü%20")
    server.versions["dspark-demo"]["1"]["uri"] = str(model) if spelled == "path" else model.as_uri()
    fetch(server, tmp_path / "p")
    assert tree(tmp_path / "p") == tree(pristine)
    assert server.fetched() == []


def test_what_stands_there_already_is_not_fetched_again(server, pristine, tmp_path):
    folder = tmp_path / "p"
    fetch(server, folder)
    before = folder.stat().st_ino
    server.asked.clear()
    fetch(server, folder)
    assert server.fetched() == ["manifest.json", "manifest.sig"] and folder.stat().st_ino == before


def test_of_another_package_only_the_files_that_differ_are_fetched(server, pristine, tmp_path):
    """A file was damaged, one is missing, one is too many: two are fetched, the third is gone."""
    folder = Path(shutil.copytree(pristine, tmp_path / "p"))
    (folder / "README.md").write_bytes(b"changed")
    (folder / "scheduler/calibration.json").unlink()
    (folder / "evidence/old.csv").write_text("a\n1\n")
    fetch(server, folder)
    assert tree(folder) == tree(pristine)
    assert sorted(server.fetched()) == ["README.md", "manifest.json", "manifest.sig", "scheduler/calibration.json"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


class StopsAfter(Progress):
    """Asks for a stop after so many files."""

    def __init__(self, files: int) -> None:
        self.left = files

    def advance(self, count: int = 1, **fields) -> None:
        self.left -= count
        if self.left <= 0:
            raise Interrupted("stop")


def test_a_pull_that_was_stopped_goes_on_where_it_was(server, pristine, tmp_path):
    folder = tmp_path / "p"
    with pytest.raises(Interrupted):
        fetch(server, folder, progress=StopsAfter(10))
    assert not folder.exists()
    first = set(server.fetched())
    server.asked.clear()
    fetch(server, folder)
    assert tree(folder) == tree(pristine)
    # The file during which it was stopped is fetched again, whole ones are not.
    assert len(first & set(server.fetched()) - {"manifest.json", "manifest.sig"}) <= 1
    assert len(first) >= 10


def test_a_half_file_and_a_damaged_one_of_an_earlier_attempt_are_fetched_again(server, pristine, tmp_path):
    part = tmp_path / ".p.pull"
    for name in ("README.md", "drafter/model.safetensors", "certificate.json"):
        (part / name).parent.mkdir(parents=True, exist_ok=True)
        (part / name).write_bytes((pristine / name).read_bytes())
    (part / "README.md").write_bytes(b"half")
    weights = bytearray((pristine / "drafter/model.safetensors").read_bytes())
    weights[-1] ^= 1
    (part / "drafter/model.safetensors").write_bytes(weights)
    fetch(server, tmp_path / "p")
    assert tree(tmp_path / "p") == tree(pristine)
    assert "certificate.json" not in server.fetched()
    assert {"README.md", "drafter/model.safetensors"} <= set(server.fetched())


def test_links_that_wait_in_the_hidden_folder_lead_nowhere(server, pristine, tmp_path):
    """Nothing is written through them and nothing is taken for a fetched file because of them."""
    outside = tmp_path / "outside"
    outside.mkdir()
    shutil.copyfile(pristine / "README.md", outside / "README.md")
    part = tmp_path / ".p.pull"
    part.mkdir()
    (part / "drafter").symlink_to(outside)
    (part / "README.md").symlink_to(outside / "README.md")
    os.link(outside / "README.md", part / "certificate.json")
    (part / "scheduler").write_text("a file where a folder goes")
    (part / "manifest.json").mkdir()
    (part / "speculation_profile.json" / "inside").mkdir(parents=True)
    fetch(server, tmp_path / "p")
    assert tree(tmp_path / "p") == tree(pristine)
    assert [path.name for path in outside.iterdir()] == ["README.md"]
    (tmp_path / ".q.pull").symlink_to(outside)
    with pytest.raises(PreflightError, match=r"\.q\.pull"):
        fetch(server, tmp_path / "q")


def test_every_single_file_that_the_store_changed_cut_or_lost_is_refused(server, stored, pristine, tmp_path):
    """With the registry's tags right and the manifest too: the damage is found before the package appears.

    All other files are there from an earlier attempt, so that each attempt is quick.
    """
    server.versions["dspark-demo"]["1"]["uri"] = str(stored.parents[1])
    part = Path(shutil.copytree(pristine, tmp_path / ".p.pull"))
    for number, (name, good) in enumerate(sorted(tree(stored).items())):
        (part / name).unlink(missing_ok=True)
        path = stored / name
        damaged = bytearray(good)
        damaged[len(good) // 2] ^= 4
        for bad in (bytes(damaged), (good[:-1], good + b"\n", None)[number % 3]):
            path.unlink() if bad is None else path.write_bytes(bad)
            with pytest.raises(IntegrityError):
                fetch(server, tmp_path / "p")
            assert not (tmp_path / "p").exists()
        path.write_bytes(good)
        shutil.copyfile(path, part / name)
    fetch(server, tmp_path / "p")


def test_a_store_with_another_sound_package_than_was_registered_is_refused(server, stored, tmp_path):
    """The package is sound in itself; only the registry's tags tell that it is not the registered one."""
    for tag in ("dspark.package_digest", "dspark.self_digest"):
        tags = server.versions["dspark-demo"]["1"]["tags"]
        right, tags[tag] = tags[tag], "0" * 64
        assert "the registry says" in refused(server, tmp_path / "p")
        tags[tag] = right
    tags.pop("dspark.package_digest")
    assert "the registry says nothing" in refused(server, tmp_path / "p")


@pytest.mark.parametrize(
    "name",
    ["../outside", "/etc/passwd", "drafter/../../outside", "drafter/x\\..\\y", "a/b", ".hidden", "evidence/a b.csv",
     "evidence/$(touch ran).csv", "engines/vllm/;reboot.sh", "evidence/\u202egnp.csv", "manifest.json", "MLmodel"],
)  # fmt: skip
def test_names_that_leave_the_package_or_have_no_place_in_it_are_never_asked_for(server, stored, tmp_path, name):
    value = json.loads((stored / "manifest.json").read_bytes())
    value["files"].append({"path": name, "bytes": 4, "sha256": "0" * 64, "class": "evidence"})
    value["files"].sort(key=lambda entry: entry["path"])
    reseal(stored, server, value)
    refused(server, tmp_path / "p")
    assert [path for path in server.fetched() if path not in ("manifest.json", "manifest.sig")] == []
    assert not (tmp_path / "outside").exists()


def reseal(stored: Path, server, value) -> None:
    """Make the digests of a changed manifest right by package.md's rules, and the registry's tags with it."""
    import hashlib

    def digest(classes):
        rows = [f"{item['path']} {item['sha256']}\n" for item in value["files"] if item["class"] in classes]
        return hashlib.sha256("".join(sorted(rows)).encode()).hexdigest()

    def canonical():
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    value["digests"] = {
        "model_digest": digest({"model"}),
        "package_digest": digest({"model", "deploy"}),
        "evidence_digest": digest({"evidence"}),
    }
    value["digests"]["self_digest"] = hashlib.sha256(canonical()).hexdigest()
    (stored / "manifest.json").write_bytes(canonical())
    tags = server.versions["dspark-demo"]["1"]["tags"]
    tags |= {f"dspark.{name}": digest for name, digest in value["digests"].items()}


def test_links_in_a_store_are_refused(server, stored, tmp_path):
    server.versions["dspark-demo"]["1"]["uri"] = str(stored.parents[1])
    for name in ("README.md", "drafter"):
        path = stored / name
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        assert "link" in refused(server, tmp_path / f"p-{name}")
        path.unlink()
        (tmp_path / "elsewhere").rename(path)
    os.mkfifo(tmp_path / "pipe")
    (stored / "README.md").unlink()
    (tmp_path / "pipe").rename(stored / "README.md")
    assert "regular" in refused(server, tmp_path / "p")


@pytest.mark.parametrize("what", ["files", "a link", "a file", "a package that is not whole"])
def test_what_is_no_package_is_never_replaced(server, pristine, tmp_path, what):
    folder = tmp_path / "p"
    if what == "files":
        folder.mkdir()
        (folder / "precious").write_text("x")
    elif what == "a link":
        (tmp_path / "there").mkdir()
        folder.symlink_to(tmp_path / "there")
    elif what == "a file":
        folder.write_text("x")
    else:
        folder.mkdir()
        (folder / "manifest.json").write_text("{}")
        fetch(server, folder)
        assert tree(folder) == tree(pristine)
        return
    with pytest.raises(PreflightError):
        fetch(server, folder)
    assert server.asked == [] and not (folder.is_dir() and (folder / "manifest.json").exists())


def test_an_empty_folder_is_filled(server, pristine, tmp_path):
    (tmp_path / "p").mkdir()
    fetch(server, tmp_path / "p")
    assert tree(tmp_path / "p") == tree(pristine)


def test_another_process_that_fetches_into_the_same_place_is_not_disturbed(server, tmp_path):
    part = tmp_path / ".p.pull"
    part.mkdir()
    handle = os.open(part, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(PreflightError, match="another process"):
        fetch(server, tmp_path / "p")
    os.close(handle)
    fetch(server, tmp_path / "p")


@pytest.mark.parametrize("place", [".p.pull", "in/the/way"])
def test_a_file_in_the_way_is_named(server, tmp_path, place):
    """Where the hidden folder goes, or on the way to it."""
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("x")
    folder = tmp_path / "p" if place == ".p.pull" else tmp_path / place / "p"
    with pytest.raises(PreflightError, match="Not a directory"):
        fetch(server, folder)
    assert (tmp_path / place).read_text() == "x"


def test_a_disk_that_is_too_small_is_noticed_before_anything_is_fetched(server, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(gathering.shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(PreflightError, match="are to be fetched"):
        fetch(server, tmp_path / "p")
    assert server.fetched() == ["manifest.json", "manifest.sig"]


def test_a_disk_that_fills_meanwhile_is_no_fault_of_the_server(server, tmp_path, monkeypatch):
    real = pulling.atomic_path

    def full(path):
        if path.name == "certificate.json":
            raise OSError(28, "No space left on device")
        return real(path)

    monkeypatch.setattr(pulling, "atomic_path", full)
    with pytest.raises(PreflightError, match=r"certificate\.json: No space left on device"):
        fetch(server, tmp_path / "p")
    monkeypatch.undo()
    server.asked.clear()
    fetch(server, tmp_path / "p")
    assert "certificate.json" in server.fetched() and "README.md" not in server.fetched()


def test_what_a_package_leaves_out_is_neither_asked_for_nor_lost(server, stored, pristine, tmp_path):
    """The file that is made from the target: not fetched, and kept in the place where it was made already."""
    name = "engines/onnxruntime/target_ends.onnx.data"
    made = stored / name
    value = json.loads((stored / "manifest.json").read_bytes())
    next(entry for entry in value["files"] if entry["path"] == name)["made_from"] = "target"
    reseal(stored, server, value)
    data = made.read_bytes()
    made.unlink()
    fetch(server, tmp_path / "p")
    assert name not in server.fetched() and verify(tmp_path / "p").absent == (name,)
    (tmp_path / "p" / name).write_bytes(data)
    (tmp_path / "p" / "README.md").unlink()
    fetch(server, tmp_path / "p")
    assert verify(tmp_path / "p").absent == () and name not in server.fetched()


# ---------------------------------------------------------------- addresses and servers


@pytest.mark.parametrize(
    "address",
    ["dspark-demo", "models:/dspark-demo", "models:/dspark-demo/latest", "models:/dspark-demo/0", "models:/a/b/1",
     "models:/@production", "models:/dspark-demo@", "models:/dspark-demo@a/1", "runs:/1/x", "models://host/x/1", ""],
)  # fmt: skip
def test_what_is_no_address_is_said_without_asking_anybody(server, tmp_path, address):
    with pytest.raises(SettingsError, match="no address of a registered package"):
        pull(address, tmp_path / "p", tracking_uri=server.address)
    assert server.asked == []


@pytest.mark.parametrize(
    ("address", "said"),
    [("models:/dspark-demo@staging", "alias staging"), ("models:/dspark-demo/7", "version=7"), ("models:/no/1", "no")],
)
def test_what_the_registry_does_not_know_is_named(server, tmp_path, address, said):
    with pytest.raises(SettingsError, match=said) as caught:
        pull(address, tmp_path / "p", tracking_uri=server.address)
    assert address in caught.value.message and caught.value.hint


@pytest.mark.parametrize(
    ("uri", "error", "said"),
    [
        ("gs://bucket/models/m-1/artifacts", SettingsError, "serve-artifacts"),
        ("mlflow-artifacts://elsewhere.example:5000/1/x", SettingsError, "elsewhere.example"),
        ("file://elsewhere.example/srv/x", SettingsError, "cannot be fetched"),
        ("file:///nowhere/at/all", IntegrityError, "no package"),
        ("mlflow-artifacts:/9/none", IntegrityError, "no package"),
    ],
)
def test_stores_that_cannot_be_read_are_named(server, tmp_path, uri, error, said):
    server.versions["dspark-demo"]["1"]["uri"] = uri
    assert said in "".join([refused(server, tmp_path / "p", error), _hint(server, tmp_path / "p")])


def _hint(server, folder) -> str:
    with pytest.raises(Exception) as caught:
        fetch(server, folder)
    return caught.value.hint


def cut(handler) -> None:
    """Half of what was announced, then the connection ends."""
    data = (handler.server.root / handler.path.removeprefix(ARTIFACTS)).read_bytes()
    handler.send(200, data[: len(data) // 2], length=len(data))
    handler.close_connection = True


def test_a_server_that_fails_during_the_download_is_asked_again(server, pristine, tmp_path):
    server.faults["README.md"] = lambda handler: handler.answer(503, {"message": "busy"})
    assert "503" in refused(server, tmp_path / "p", ServiceError)
    server.faults["README.md"] = cut
    assert "README.md" in refused(server, tmp_path / "p")
    server.faults.clear()
    fetch(server, tmp_path / "p")
    assert tree(tmp_path / "p") == tree(pristine)


def test_a_server_that_answers_500_for_what_is_not_there_is_asked_what_is(server, stored, pristine, tmp_path):
    """So does MLflow where it hands out what lies in S3; of an S3 that is away it says the same."""
    server.faults["manifest.sig"] = lambda handler: handler.answer(500, {"message": "HeadObject: Not Found"})
    fetch(server, tmp_path / "p")
    assert tree(tmp_path / "p") == tree(pristine)
    (stored / "manifest.sig").write_bytes(bytes(64))
    assert "500" in refused(server, tmp_path / "q", ServiceError)
    server.faults["mlflow-artifacts/artifacts"] = lambda handler: handler.answer(200, {"files": [3]})
    assert "does not say which files" in refused(server, tmp_path / "q", ServiceError)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda handler: handler.send(200, b"<html>a login page</html>"), "something else than a JSON object"),
        (lambda handler: handler.send(200, b"[]"), "something else than a JSON object"),
        (lambda handler: handler.answer(200, {"model_version": {}}), "does not say"),
        (lambda handler: handler.answer(200, {"model_version": {"version": "1", "tags": [3]}}), "does not say"),
        (lambda handler: handler.answer(401, {}), "access is refused"),
        (lambda handler: handler.send(302, b"", Location="http://elsewhere.example/"), "not followed"),
        (lambda handler: handler.wfile.write(b"nonsense\r\n\r\n"), "did not answer"),
    ],
)
def test_a_server_that_is_none_of_mlflow_is_a_failed_service(server, tmp_path, fault, said):
    server.faults["registered-models/alias"] = fault
    message = refused(server, tmp_path / "p", ServiceError)
    assert said in message and server.address in message


def test_no_server_at_all(tmp_path):
    with pytest.raises(ServiceError, match="did not answer"):
        pull(ADDRESS, tmp_path / "p", tracking_uri="http://127.0.0.1:9")
    for address in ("http://", "http://host:port", "http://h/?x=1"):
        with pytest.raises(SettingsError):
            pull(ADDRESS, tmp_path / "p", tracking_uri=address)


def test_credentials_go_to_the_server_and_into_no_message(server, tmp_path, monkeypatch):
    inside = server.address.replace("http://", "http://me:s%40cret@")
    pull(ADDRESS, tmp_path / "p", tracking_uri=inside)
    expected = "Basic " + base64.b64encode(b"me:s@cret").decode()
    assert {headers["Authorization"] for headers in server.headers} == {expected}
    server.faults["alias"] = lambda handler: handler.answer(500, {})
    with pytest.raises(ServiceError) as caught:
        pull(ADDRESS, tmp_path / "q", tracking_uri=inside)
    assert "cret" not in caught.value.message + caught.value.hint
    server.headers.clear()
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "tok")
    with pytest.raises(ServiceError):
        fetch(server, tmp_path / "q")
    assert server.headers[0]["Authorization"] == "Bearer tok"


# ---------------------------------------------------------------- digests and signatures from outside


def test_another_digest_than_the_registered_one_is_refused_before_the_download(server, stored, tmp_path):
    assert "neither its package_digest" in refused(server, tmp_path / "p", digest="0" * 64)
    assert set(server.fetched()) == {"manifest.json", "manifest.sig"}
    fetch(server, tmp_path / "p", digest=read_manifest(stored).digests.self_digest)


@pytest.mark.parametrize("where", ["before it was published", "afterwards, in the registry"])
def test_a_signature_is_fetched_and_demanded(server, stored, tmp_path, where):
    private, other = tmp_path / "key.pem", tmp_path / "other.pem"
    public, wrong = write_keys(private), write_keys(other)
    assert "not signed" in refused(server, tmp_path / "p", key=public)
    signature = sign(stored, private)
    tags = server.versions["dspark-demo"]["1"]["tags"]
    if where != "before it was published":
        (stored / "manifest.sig").unlink()
        tags["dspark.signature"] = base64.b64encode(signature).decode()
    assert "no signature of this package" in refused(server, tmp_path / "p", key=wrong)
    assert set(server.fetched()) <= {"manifest.json", "manifest.sig"}
    fetch(server, tmp_path / "p", key=public)
    assert verify(tmp_path / "p", key=public).signature == "valid"
    tags["dspark.signature"] = "not base64"
    assert "holds no signature" in refused(server, tmp_path / "q", key=public)


def test_what_was_published_unsigned_is_signed_in_the_registry(server, pristine, tmp_path):
    """Artifacts stay as they are; only the version that holds this very package takes its signature."""
    folder = Path(shutil.copytree(pristine, tmp_path / "here"))
    key = write_keys(tmp_path / "key.pem")
    sign(folder, tmp_path / "key.pem")
    version = register_signature(folder, ADDRESS, tracking_uri=server.address)
    assert (version.name, version.number) == ("dspark-demo", "1")
    assert [told["key"] for told in server.told] == ["dspark.signature"]
    fetch(server, tmp_path / "p", key=key)
    server.versions["dspark-demo"]["1"]["tags"]["dspark.self_digest"] = "0" * 64
    with pytest.raises(IntegrityError, match="has the manifest 0000"):
        register_signature(folder, ADDRESS, tracking_uri=server.address)
    assert len(server.told) == 1


def test_the_verb_prints_how_to_launch(server, pristine, tmp_path, capsys, monkeypatch):
    """Without a workspace; a folder whose name needs quoting."""
    for name in ("DSPARK_TRACKING_URI", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my drafter"
    command = ["package", "pull", ADDRESS, str(folder), "--quiet"]
    assert run_command(command) == 3  # no workspace, and nothing names a server
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.address)
    assert run_command([*command, "--engine", "vllm"]) == 0
    printed = capsys.readouterr().out
    assert read_manifest(pristine).digests.package_digest in printed
    assert f"bash '{folder}/engines/vllm/launch.sh'" in printed and "sglang" not in printed
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert run_command([*command, "--tracking-uri", server.address, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "dspark/pull/1" and document["launch"].keys() >= {"vllm", "sglang", "onnxruntime"}
    assert run_command([*command, "--tracking-uri", server.address, "--engine", "llamacpp"]) == 2
    said = capsys.readouterr().err
    assert "holds no files for llamacpp" in said and "vllm" in said
    assert run_command([*command, "--tracking-uri", server.address, "--digest", "0" * 64]) == 7


def test_pulling_needs_the_light_base_alone(server, tmp_path):
    """Neither mlflow nor boto3, torch or requests is loaded."""
    code = (
        "import sys; from pathlib import Path; from dspark.registry.pull import pull;"
        "pull(sys.argv[1], Path(sys.argv[2]), tracking_uri=sys.argv[3]);"
        "heavy = ['torch', 'transformers', 'mlflow', 'dvc', 'onnx', 'boto3', 'requests', 'sqlalchemy', 'pandas'];"
        "sys.exit(','.join(name for name in heavy if name in sys.modules) or 0)"
    )
    arguments = [sys.executable, "-c", code, ADDRESS, str(tmp_path / "p"), server.address]
    result = subprocess.run(arguments, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
