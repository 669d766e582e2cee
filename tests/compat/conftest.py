"""A tiny target with a random drafter, and the released readers in processes of their own."""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]
FETCHED = CHECKOUT / ".compat"


@dataclass(frozen=True)
class Made:
    """A target's folder as the hub would have it, its record, and a drafter that no tensor of which is trivial."""

    folder: Path
    record: Any
    target: Any
    drafter: Any


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    import torch

    from dspark.config.models import DrafterSettings, MarkovSettings, TargetSpec
    from dspark.drafters.config import DrafterConfig
    from dspark.drafters.dspark import DSparkDrafter
    from dspark.targets.loading import load_target
    from dspark.targets.materialise import materialise

    root = tmp_path_factory.mktemp("target")
    shape = {
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 20000.0,
        "tie_word_embeddings": False,
    }
    spec = TargetSpec.model_validate(
        {"name": "tiny", "source": {"kind": "random", "seed": 1, "config": shape}, "dtype": "bfloat16", "taps": [1, 3]}
    )
    record = materialise(spec, root=root).model_copy(update={"public_id": "org/tiny"})
    target = load_target(record, root=root)
    config = DrafterConfig.of(record, DrafterSettings(gamma=4, layers=2, markov=MarkovSettings(rank=8)))
    drafter = DSparkDrafter(config, target.embedding.float(), target.head.float(), seed=2)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in drafter.parameters():
            # Large enough for attention to matter, or a wrong RoPE would go unnoticed.
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
            parameter.copy_(parameter.bfloat16())  # every dtype then stores the very same values
    return Made(record.folder(root), record, target, drafter.eval().requires_grad_(False))


@pytest.fixture
def checkpoint(made: Made, tmp_path: Path) -> Callable[..., Path]:
    """Writes the drafter's union checkpoint, with fields of its config changed as asked."""
    from dspark.drafters.checkpoint import write_union

    def write(name: str = "drafter", *, dtype: str = "bfloat16", drafter: Any = None, **changes: Any) -> Path:
        folder = tmp_path / name
        write_union(folder, drafter or made.drafter, made.record, dtype=dtype)  # type: ignore[arg-type]
        edit(folder, **changes)
        return folder

    return write


@pytest.fixture
def headless(made: Made) -> Any:
    """The same drafter without its heads, as recipe dflash trains one."""
    from dspark.drafters.kinds import build_drafter

    changes = {"markov_type": "none", "markov_rank": 0, "confidence": False}
    config = made.drafter.config.model_copy(update=changes)
    drafter = build_drafter(config, made.drafter.embedding, made.drafter.head)
    state = made.drafter.state_dict()
    drafter.load_state_dict({name: state[name] for name in drafter.state_dict()})
    return drafter.eval().requires_grad_(False)


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(scope="session")
def released(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Unpacks what `make test-compat` fetched; skips where it is not there.

    Called with the archives' names as patterns; all go into one folder. `only` names the members to unpack, again as
    patterns, of which everything above `top` is dropped; compiled parts stay out unless asked for.
    """

    def unpack(*archives: str, only: Sequence[str] = ("*",), top: str = "", compiled: bool = False) -> Path:
        folder = tmp_path_factory.mktemp("released")
        for pattern in archives:
            found = sorted(FETCHED.glob(pattern))
            if not found:
                pytest.skip(f"{pattern} is not here: make test-compat")
            for member, data in _members(found[-1]):
                _, _, rest = member.rpartition(top) if top else ("", "", member)
                if any(fnmatch.fnmatch(rest, one) for one in only) and (compiled or not rest.endswith(".so")):
                    path = folder / rest
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data())
        return folder

    return unpack


def _members(archive: Path) -> Any:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if not name.endswith("/"):
                    yield name, lambda name=name: wheel.read(name)
        return
    with tarfile.open(archive) as source:
        for entry in source:
            if entry.isfile():
                yield entry.name, lambda entry=entry: source.extractfile(entry).read()


@pytest.fixture(scope="session")
def run_reader() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script with the readers' folders on its path, so that nothing of them reaches this process."""

    def run(script: Path, *arguments: Any, path: Sequence[Path], folder: Path | None = None) -> Any:
        places = [*map(str, path), str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
        quiet = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
        return subprocess.run(
            [sys.executable, str(script), *map(str, arguments)],
            env={**os.environ, **quiet, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )

    return run


@pytest.fixture(scope="session")
def ask_reader(run_reader: Any) -> Callable[..., Any]:
    """Runs a script of this folder and gives what it printed last: JSON."""

    def ask(script: str, *arguments: Any, path: Sequence[Path]) -> Any:
        done = run_reader(HERE / script, *arguments, path=path)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.strip().splitlines()[-1])

    return ask
