"""No code of a package or of the model around it runs when it is shown, verified, signed, or pulled.

The package would betray it: every bait writes a mark when it runs, and the process dies on the audit events of running
anything. The control shows that baits and trap work.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import fake_build
import pytest
from fake_server import serving

from dspark.config.gates import read_gates
from dspark.package.signature import write_keys
from dspark.package.verify import read_manifest
from dspark.registry.connection import connected
from dspark.registry.gates import judge
from dspark.registry.promotion import Author, promote
from dspark.registry.publish import publish
from dspark.registry.receipts import default_uri

sys.path.insert(0, str(Path(__file__).parents[1] / "package"))

from race import exit_code, forked
from resealing import reseal
from trap import SPRUNG, arm

TRAP = Path(__file__).with_name("trap.py")
ROOT = Path(__file__).parents[3]
# Modules that Python, or a command, may look for in the current folder or beside what it is given.
MODULES = ("sitecustomize", "usercustomize", "dspark", "json", "mlflow", "numpy", "pydantic", "conftest", "setup")
OPAQUE = "engines/onnxruntime/draft_block.onnx.data"


class Bait:
    """Unpickling it writes the mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch '{self.mark}'",)


@pytest.fixture
def mark(tmp_path) -> Path:
    return tmp_path / "it ran"


def bait_beside(folder: Path, mark: Path) -> None:
    """Files that something might run, where no file of a package stands."""
    code = f"open({str(mark)!r}, 'w').close()\n"
    for name in MODULES:
        (folder / f"{name}.py").write_text(code)
    (folder / "bait.pth").write_text(f"import sys; exec({code!r})\n")
    for name in ("python_model.pkl", "model.pt", "drafter.joblib"):
        (folder / name).write_bytes(pickle.dumps(Bait(mark)))
    (folder / f"$(touch '{mark.name}').csv").write_text("a\n")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text(f"[core]\n\tfsmonitor = touch '{mark}'\n")


def bait_inside(folder: Path, mark: Path) -> None:
    """Files of the package itself, as whoever can make all digests right would change them."""
    (folder / OPAQUE).write_bytes(pickle.dumps(Bait(mark)))
    described = folder / "engines/onnxruntime/io.json"
    value = json.loads(described.read_bytes())
    data = (folder / OPAQUE).read_bytes()
    value["weights"] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    described.write_text(json.dumps(value))
    for script in folder.glob("engines/*/launch.sh"):
        script.write_text(f'#!/usr/bin/env bash\ncd "$(dirname "$0")"\ntouch ../../../{mark.name!r}\n')
        script.chmod(0o755)
    card = folder / "README.md"
    card.write_text(
        card.read_text() + f"$(touch '{mark}') `touch '{mark}'` {{{{ cycler.__init__.__globals__ }}}} {{0!r}}\n"
    )
    lineage = folder / "evidence/lineage.json"
    lineage.write_text(lineage.read_text().replace("0123456789abcdef", f"$(touch '{mark}');{{}}%s"))
    reseal(folder)


def trapped(folder: Path, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(TRAP), str(folder), *arguments]
    return subprocess.run(command, cwd=cwd or folder, env=environment, capture_output=True, text=True)


def test_control_the_baits_and_the_trap_do_work(pristine, mark, tmp_path):
    """Each kind is run as a careless tool would; once without the trap, so that the mark is seen to appear."""
    folder = Path(shutil.copytree(pristine, tmp_path / "p"))
    bait_inside(folder, mark)
    bait_beside(folder, mark)
    careless = {
        "unpickle": f"import pickle; pickle.load(open({OPAQUE!r}, 'rb'))",
        "import": "sys.path.insert(0, '.'); import conftest",
        "launch": "import subprocess; subprocess.run(['bash', 'engines/vllm/launch.sh'], check=True)",
        "shell": "os.system('ls *.csv; echo $(touch \"../it ran\")')",
    }
    for name, code in careless.items():
        assert trapped(folder, "exec", code).returncode == SPRUNG, name
        assert not mark.exists()
        subprocess.run([sys.executable, "-c", f"import os, sys; {code}"], cwd=folder, check=True, capture_output=True)
        assert mark.exists(), name
        mark.unlink()


def test_a_folder_full_of_baits_is_refused_without_running_any(pristine, mark, tmp_path):
    folder = Path(shutil.copytree(pristine, tmp_path / "p"))
    bait_beside(folder, mark)
    key = tmp_path / "key.pem"
    write_keys(key)
    for verb in (["verify", ".", "--key", f"{key}.pub"], ["sign", ".", "--key", str(key)]):
        done = trapped(folder, "package", *verb)
        assert done.returncode == 7, done.stderr
    assert not mark.exists()


def test_baits_that_a_forger_sealed_in_lie_still(pristine, mark, tmp_path):
    """Integrity is all that verification shows without a key; that nothing runs does not hang on it."""
    folder = Path(shutil.copytree(pristine, tmp_path / "p"))
    bait_inside(folder, mark)
    for verb in ("verify", "show"):
        done = trapped(folder, "package", verb, ".")
        assert done.returncode == 0, done.stderr
    # YAML is where values become objects, if a loader lets them; these are refused.
    config = next(folder.glob("engines/tensorrt_llm/*.yaml"))
    config.write_text(f"speculative_config: !!python/object/apply:os.system [\"touch '{mark}'\"]\n")
    reseal(folder)
    assert trapped(folder, "package", "verify", ".").returncode == 7
    assert not mark.exists()


def test_a_pull_brings_baits_home_at_most_as_bytes(pristine, mark, tmp_path):
    """The store holds a model whose code betrays whoever loads it, and a sealed package with baits inside."""
    model = tmp_path / "store" / "artifacts"
    package = Path(shutil.copytree(pristine, model / "artifacts" / "package"))
    bait_inside(package, mark)
    bait_beside(model, mark)
    bait_beside(package, mark)
    (model / "code").mkdir()
    (model / "code" / "loader.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    (model / "MLmodel").write_text(
        "flavors: {python_function: {loader_module: loader, code: code, data: python_model.pkl, env: conda.yaml}}\n"
    )
    (model / "conda.yaml").write_text(f"dependencies: [pip: ['x @ file:///$(touch {mark})']]\n")
    digests = read_manifest(package).digests.model_dump()
    here = tmp_path / "here"
    here.mkdir()
    bait_beside(here, mark)  # and the folder that it is called in is hostile too
    with serving(tmp_path / "store") as server:
        server.register("mlflow-artifacts:/artifacts", {f"dspark.{name}": value for name, value in digests.items()})
        arguments = ("package", "pull", "models:/dspark-demo@production", str(tmp_path / "out"), "--quiet")
        for _ in ("handed out by the server", "a folder that is read itself"):
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
            done = trapped(tmp_path / "store", *arguments, "--tracking-uri", server.address, cwd=here)
            assert done.returncode == 0, done.stderr
            assert "launch vllm" in done.stdout
            server.versions["dspark-demo"]["1"]["uri"] = str(model)
    listed = {entry.path for entry in read_manifest(package).files} | {"manifest.json"}
    found = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == listed and not mark.exists()


def test_promoting_runs_nothing_of_it(pristine, database, mark, tmp_path):
    """The gates read it, the verification too; in a process whose trap is armed once mlflow is loaded."""
    workspace = tmp_path / "workspace"
    (workspace / "mlflow").mkdir(parents=True)
    shutil.copyfile(database, workspace / "mlflow" / "mlflow.db")
    folder = Path(shutil.copytree(pristine, tmp_path / "package"))
    bait_inside(folder, mark)
    publish(folder, workspace=workspace, build="demo", receipts=workspace / "receipts")
    (model,) = (path.parent for path in (workspace / "mlflow").rglob("MLmodel"))
    (model / "pyfunc_model.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    bait_beside(model, mark)
    policy = read_gates(ROOT)

    def work() -> None:
        with connected(default_uri(workspace), workspace=workspace) as registry:
            arm(str(tmp_path))
            done = promote(
                registry,
                "demo",
                "production",
                judge=lambda package, champion: judge(
                    package, policy, champion=champion, profiles=fake_build.profiles(), stage="production"
                ),
                author=Author("ada", "c0ffee"),
                scratch=workspace / "work",
                force=True,
                reason="nothing of it may run, whatever the gates say",
            )
            assert done.outcome == "done"

    assert exit_code(forked(work)) == 0
    assert not mark.exists()
