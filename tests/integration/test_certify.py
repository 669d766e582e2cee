"""`dspark certify` against the real llama.cpp server, on a random target and a random drafter."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dspark.cli.boundary import run_command
from dspark.io import progress

if TYPE_CHECKING:
    from conftest import Sandbox

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("xllamacpp") is None,
        reason="xllamacpp is not installed: pip install 'dspark[llamacpp]'",
    ),
]


@dataclass(frozen=True)
class Served:
    """A workspace, a drafter's file, and a server that speculates with it."""

    root: Path
    drafter: Path
    url: str


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "reduced"])
def served(
    request: pytest.FixtureRequest,
    new_sandbox: Sandbox,
    tmp_path_factory: pytest.TempPathFactory,
    ascii_tokens: Any,
) -> Iterator[Served]:
    """With a drafter of the whole vocabulary, and with one of three quarters of it and no constant channel."""
    import torch

    from dspark.config.models import DrafterSettings
    from dspark.drafters.config import DrafterConfig
    from dspark.drafters.dspark import DSparkDrafter
    from dspark.engines.llamacpp import LlamaCppServer, LlamaCppSettings
    from dspark.export.gguf import write_drafter_gguf
    from dspark.io.gguffile import read_gguf
    from dspark.targets.catalogue import read_target
    from dspark.targets.gguf import write_target_gguf
    from dspark.targets.loading import load_target
    from dspark.targets.materialise import materialise

    root, folder = new_sandbox.root, tmp_path_factory.mktemp("served")
    record = materialise(read_target(root / "pipeline/targets", "tiny", root=root), root=root)
    target = load_target(record, root)
    vocabulary = record.vocab_physical
    ids = torch.arange(vocabulary // 4, vocabulary) if request.param else None
    settings = DrafterSettings.model_validate(
        {"gamma": 3, "layers": 1, "markov": {"rank": 64}, "draft_vocab_size": None if ids is None else len(ids)}
    )
    drafter = DSparkDrafter(DrafterConfig.of(record, settings), target.embedding, target.head, ids, seed=1)
    with torch.no_grad():  # it proposes what stands before: a random target says some tokens over and over
        rows = torch.randn(vocabulary, 64)
        drafter.markov_head.markov_w1.weight.copy_(rows)
        drafter.markov_head.markov_w2.weight.copy_(rows if ids is None else rows[ids])
    tokens = ascii_tokens(folder / "tokens.gguf", record.vocab_physical)
    write_target_gguf(folder / "target.gguf", record, root, origin=tokens)
    write_drafter_gguf(folder / "drafter.gguf", drafter.eval(), read_gguf(folder / "target.gguf"))
    engine = LlamaCppSettings(folder / "target.gguf", folder / "drafter.gguf", n_max=3, context=512, memory="F32")
    with LlamaCppServer(engine, folder / "server.log") as server:
        yield Served(root, folder / "drafter.gguf", server.address)


def certify(served: Served, *more: str, code: int = 0) -> None:
    asked = ["-C", str(served.root), "certify", "--drafter", str(served.drafter), "--url", served.url]
    assert run_command([*asked, "--target", "tiny", "--domain", "math", "--prompts", "3", *more]) == code


def test_the_engine_counts_what_the_replay_counts(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_stop", type(progress._stop)())
    certify(served, "--new-tokens", "40", "--out", str(tmp_path / "certificate.json"), "--quiet")
    text = capsys.readouterr().out
    assert "difference            +0.00%, tolerance 2%: agrees" in text
    found: dict[str, Any] = json.loads((tmp_path / "certificate.json").read_text())
    assert found["schema"] == "dspark/server-certificate/1"
    assert found["tau"]["equal_counters"] == found["prompts"] == 3
    assert (found["n_max"], found["gamma"], found["served_target"]) == (3, 3, "target.gguf")
    assert all(one["engine"] == one["offline"] for one in found["accepted_by_position"])


def test_mistakes_are_said_before_anything_is_asked(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_stop", type(progress._stop)())
    nothing = Served(served.root, tmp_path / "none.gguf", served.url)
    certify(nothing, code=2)
    (tmp_path / "package").mkdir()
    certify(Served(served.root, tmp_path / "package", served.url), code=4)
    assert "`drafter` in a package" in capsys.readouterr().err
    certify(nothing, code=2)
    assert "none.gguf: not found" in capsys.readouterr().err
    (tmp_path / "none.gguf").write_bytes(b"no GGUF")
    certify(nothing, code=7)
    gone = Served(served.root, served.drafter, "http://127.0.0.1:9")
    certify(gone, code=8)
    assert "nothing answers at http://127.0.0.1:9" in capsys.readouterr().err
    certify(served, "--domain", "maths", code=2)
